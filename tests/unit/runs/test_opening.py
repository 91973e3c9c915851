"""Which directory a run goes on in, and from which checkpoint."""

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.manifests import manifest

from lockstep.checkpoint.file import read_manifest, save_checkpoint
from lockstep.checkpoint.manifest import Checkpoint
from lockstep.errors import CheckpointError, ConfigError, RunDirectoryError
from lockstep.runs.config import parse_config
from lockstep.runs.opening import NEWEST, OpenedRun, OpenRequest, open_run, with_recorded_shards

VALUES = {"model": "mine:Net", "data": "mine:data"}


def save(path: Path, global_step: int, **values: Any) -> Path:
    config = parse_config(VALUES, "config").model_dump()
    written = manifest(**{"epoch": 0, "step": 1, "global_step": global_step, "config": config} | values)
    save_checkpoint(path, Checkpoint(model={"a": torch.ones(2)}, optimizer={}, manifest=written))
    return path


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a run with checkpoints of steps 3 and 7, and best.ckpt a link to that of 3."""
    monkeypatch.chdir(tmp_path)
    run_dir = Path("runs/mine")
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").touch()
    for step in (3, 7):
        save(run_dir / f"step-0000000{step}.ckpt", step)
    (run_dir / "best.ckpt").symlink_to("step-00000003.ckpt")
    return run_dir


def opened(
    resumed: str | None, *, told: list[str] | None = None, says: bool = False, job: str | None = None, **values: Any
) -> OpenedRun:
    wanted = OpenRequest(
        config=parse_config({**VALUES, **values}, "config"),
        name="mine",
        resumed=resumed,
        has_run_dir_override=says,
        allowed=frozenset(),
        job=job,
    )
    with ExitStack() as held:
        return open_run(wanted, held, ([] if told is None else told).append)


def automatic(job: str | None = "torchrun 7", **values: Any) -> OpenedRun:
    return opened(None, says="run_dir" in values, job=job, resume="auto", **values)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.glob("step-*.ckpt"))


@pytest.mark.parametrize("resumed", [NEWEST, "runs/mine", "runs/mine/step-00000007.ckpt"])
def test_a_run_continues_in_its_own_directory(old: Path, resumed: str) -> None:
    run = opened(resumed, epochs=3)
    assert run.run_dir == old
    assert run.origin is not None
    assert run.origin.checkpoint == old / "step-00000007.ckpt"
    assert [str(change) for change in run.changes] == ["epochs was 10 and is now 3"]


@pytest.mark.parametrize("resumed", [NEWEST, "runs/mine", "runs/mine/step-00000007.ckpt", None])
def test_a_run_keeps_the_number_of_shards_with_which_it_began(old: Path, resumed: str | None) -> None:
    for path in old.glob("step-*.ckpt"):
        path.unlink()
    save(old / "step-00000007.ckpt", 7, config=parse_config(VALUES | {"num_shards": 6}, "config").model_dump())
    wanted = OpenRequest(
        config=parse_config(VALUES, "config"), name="mine", resumed=resumed, has_run_dir_override=False, allowed=()
    )
    found = with_recorded_shards(wanted).config
    assert found.num_shards == (4 if resumed is None else 6)
    assert found.with_shards(3, is_said=False).num_shards == 6
    (old / "step-00000007.ckpt").unlink()
    (old / "config.yaml").write_text("num_shards: 8")  # killed before its first checkpoint
    own = replace(wanted, resumed=None, config=parse_config(VALUES | {"run_dir": str(old), "resume": "auto"}, "config"))
    assert with_recorded_shards(own).config.num_shards == 8


@pytest.mark.parametrize("resumed", ["runs/mine/step-00000003.ckpt", "runs/mine/best.ckpt"])
def test_an_older_checkpoint_is_refused_and_leads_into_a_new_directory(old: Path, resumed: str) -> None:
    with pytest.raises(RunDirectoryError, match=r"step-00000007.ckpt would not belong to the steps.*run_dir=NAME"):
        opened(resumed)
    run = opened(resumed, says=True, run_dir="runs/other")
    assert run.origin is not None
    assert run.origin.checkpoint == Path("runs/other/step-00000003.ckpt")
    assert read_manifest(run.origin.checkpoint).global_step == 3
    assert names(old) == ["step-00000003.ckpt", "step-00000007.ckpt"]
    assert opened("runs/other", run_dir="runs/other").run_dir == Path("runs/other")
    (old.parent / "good").symlink_to("mine/best.ckpt")
    assert names(opened("runs/good", says=True, run_dir="runs/third").run_dir) == ["step-00000003.ckpt"]
    assert read_manifest(Path("runs/third/step-00000003.ckpt")).global_step == 3  # it was a link to nothing


def test_an_older_one_is_taken_where_all_newer_ones_are_broken(old: Path) -> None:
    # A flipped bit in a tensor was only found when the workers loaded it: the run could not go on, and from the
    # checkpoint before only in another directory. Later the broken one would have been the newest again.
    newest = old / "step-00000007.ckpt"
    newest.write_bytes(newest.read_bytes()[:-1] + b"!")
    told: list[str] = []
    run = opened(str(old), told=told)
    assert run.run_dir == old
    assert run.origin is not None
    assert run.origin.checkpoint.name == "step-00000003.ckpt"
    assert "tensor 'a' is not as written. Trying the checkpoint before it." in told[0]
    assert names(old) == ["step-00000003.ckpt"]
    assert (old / "step-00000007.ckpt.broken").is_file()
    newest.write_bytes(b"broken")
    assert opened(str(old / "step-00000003.ckpt")).run_dir == old


def test_a_checkpoint_of_a_later_format_is_not_taken_for_a_broken_one(old: Path) -> None:
    save(old / "step-00000007.ckpt", 7, format_version=9)
    for resumed, said in ((NEWEST, "has format 9"), (str(old / "step-00000003.ckpt"), "is not the newest")):
        with pytest.raises((CheckpointError, RunDirectoryError), match=said):
            opened(resumed)


@pytest.mark.parametrize("name", ["step-00000007.ckpt", "mine.ckpt"])
def test_a_checkpoint_from_elsewhere_begins_a_new_directory(old: Path, name: str) -> None:
    Path("elsewhere").mkdir()
    shutil.copy(old / "step-00000007.ckpt", f"elsewhere/{name}")
    run = opened(f"elsewhere/{name}")
    assert run.run_dir == Path("runs/mine-2")
    assert names(run.run_dir) == ["step-00000007.ckpt"]
    assert Path(f"elsewhere/{name}").exists()


@pytest.mark.parametrize(
    ("resumed", "said"),
    [("gone", "no checkpoint or run directory gone"), ("runs", "runs holds no checkpoint. Name a")],
)
def test_what_cannot_be_resumed_is_explained(old: Path, resumed: str, said: str) -> None:
    with pytest.raises((CheckpointError, RunDirectoryError), match=said):
        opened(resumed)


def test_a_checkpoint_after_the_last_epoch_is_refused(old: Path) -> None:
    # It ended at once, and showed the weights of epoch 3 as those of the two that were asked for.
    save(old / "step-00000009.ckpt", 9, epoch=2)
    with pytest.raises(CheckpointError, match="is at epoch 3, after step 1, but epochs is only 2"):
        opened(NEWEST, epochs=2)
    assert opened(NEWEST, epochs=3).origin is not None


def test_nothing_is_made_for_a_config_that_does_not_fit(old: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--allow batch_size|batch_size was"):
        opened(str(old / "step-00000003.ckpt"), says=True, run_dir="runs/other", batch_size=8)
    assert not Path("runs/other").exists()


def test_a_job_that_is_started_again_finds_its_own_run_and_no_other(old: Path) -> None:
    first = automatic()
    assert first.run_dir == Path("runs/mine-2")
    assert automatic("Slurm 3.0").run_dir == Path("runs/mine-3")
    again = automatic()
    assert (again.run_dir, again.origin) == (first.run_dir, None)  # killed before its first checkpoint
    save(first.run_dir / "step-00000002.ckpt", 2)
    save(first.run_dir / "step-00000004.ckpt", 4)
    newest = automatic().origin
    assert newest is not None
    assert newest.checkpoint == first.run_dir / "step-00000004.ckpt"
    newest.checkpoint.write_bytes(newest.checkpoint.read_bytes()[:-3])
    before = automatic().origin
    assert before is not None
    assert before.checkpoint.name == "step-00000002.ckpt"
    assert names(old) == ["step-00000003.ckpt", "step-00000007.ckpt"]


def test_a_named_run_is_begun_and_continued(old: Path) -> None:
    assert automatic(None, run_dir="fresh").origin is None
    assert automatic(None, run_dir="fresh").origin is None
    run = automatic(None, run_dir=str(old))
    assert run.origin is not None
    assert run.origin.checkpoint == old / "step-00000007.ckpt"


def test_what_is_not_this_run_is_not_written_over(old: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing says which run"):
        automatic(None)
    with pytest.raises(CheckpointError, match="batch_size"):
        automatic(None, run_dir=str(old), batch_size=64)
    automatic(None, run_dir="fresh")
    with pytest.raises(RunDirectoryError, match=r"another config.*batch_size was 128 and is now 64"):
        automatic(None, run_dir="fresh", batch_size=64)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    with pytest.raises(RunDirectoryError, match="is not the directory of a run"):
        automatic(None, run_dir="photos")


def test_a_refused_resume_without_a_path_says_which_run_it_took(old: Path) -> None:
    took = r"--resume without a path took runs/mine/step-00000007[.]ckpt, the newest checkpoint of the last run named"
    with pytest.raises(CheckpointError, match=took) as newest:
        opened(NEWEST, seed=3)
    assert str(newest.value).count("(LS709)") == 1
    with pytest.raises(CheckpointError) as named:
        opened(str(old), seed=3)
    assert "without a path" not in str(named.value)
