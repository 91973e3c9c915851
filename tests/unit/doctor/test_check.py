"""`lockstep check`: planted mistakes are found at their line, and correct scripts are left alone."""

# ruff: noqa: E501 - lines of scripts as people write them

import ast
import json
from pathlib import Path

import pytest
from tests.unit.doctor.checked_scripts import CORRECT, SPAWN_WITH_A_CLASS, TORCHRUN
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.doctor.scripts import Level, check_source

UNCHANGED = Path(__file__).parents[2] / "process" / "unchanged_scripts"
EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPTS = {
    **CORRECT,
    **{path.name: path.read_text("utf-8") for path in (*UNCHANGED.glob("*.py"), *EXAMPLES.glob("*.py"))},
}
SAVED = '        torch.save(model.module.state_dict(), "last.pt")'
MISTAKES = [
    ("no-sampler", "loader = DataLoader(train_set, batch_size=32, sampler=sampler)", "loader = DataLoader(train_set, batch_size=32, shuffle=True)"),
    ("no-sampler", "loader = DataLoader(train_set, batch_size=32, sampler=sampler)", "loader = DataLoader(train_set, 32)"),
    ("no-sampler", "sampler = DistributedSampler(train_set)", "sampler = torch.utils.data.RandomSampler(train_set)"),
    ("set-epoch", "    sampler.set_epoch(epoch)", "    pass"),
    ("saved-by-all", f"    if dist.get_rank() == 0:\n{SAVED}", SAVED[4:]),
    ("printed-by-all", "        if dist.get_rank() == 0:\n            print(epoch, mean.item())", "        print(epoch, mean.item())"),
    ("loss-of-one-rank", "        dist.all_reduce(mean, dist.ReduceOp.AVG)\n        if dist.get_rank() == 0:\n            print(epoch, mean.item())", "        if dist.get_rank() == 0:\n            print(epoch, loss.item())"),
    ("collective-on-some-ranks", "    dist.barrier()\n    if dist.get_rank() == 0:\n", "    if dist.get_rank() == 0:\n        dist.barrier()\n"),
    ("collective-on-some-ranks", "        dist.all_reduce(mean, dist.ReduceOp.AVG)\n        if dist.get_rank() == 0:\n", "        if not dist.get_rank():\n            dist.all_reduce(mean)\n"),
    ("one-seed", "17 + dist.get_rank()", "17"),
    ("module-in-names", "model.module.state_dict()", "model.state_dict()"),
    ("fixed-port", "dist.init_process_group", 'os.environ["MASTER_PORT"] = "29500"\ndist.init_process_group'),
    ("device-ids", "device_ids=[local_rank]", "device_ids=[0]"),
    ("device-ids", "device_ids=[local_rank]", "device_ids=[0, 1]"),
    ("device-ids", "device_ids=[local_rank]", "device_ids=[dist.get_rank()]"),
    ("one-device", "set_device(local_rank)", "set_device(0)"),
    ("batch-size", "batch_size=32", "batch_size=args.global_batch_size"),
    ("map-location", ', map_location="cpu"', ""),
    ("padded-evaluation", "dist.destroy_process_group()", "def evaluate(model, loader):\n    with torch.no_grad():\n        for images, labels in loader:\n            model(images)\n\n\ntest_loader = DataLoader(test_set, sampler=DistributedSampler(test_set, shuffle=False))\nevaluate(model, test_loader)"),
    ("padded-evaluation", "dist.destroy_process_group()", "test_sampler = DistributedSampler(test_set, shuffle=False)\ntest_loader = DataLoader(test_set, sampler=test_sampler)\nwith torch.no_grad():\n    for images, labels in test_loader:\n        model(images)"),
    ("step-left-out", "        optimizer.zero_grad()\n", "        if torch.isnan(loss):\n            continue\n        optimizer.zero_grad()\n"),
]  # fmt: skip
"""Rule, what is replaced in the correct script, and by what."""


SETUP = """
import os
import torch.distributed as dist

RANK = int(os.environ.get("RANK", -1))
ddp = int(os.environ.get("RANK", -1)) != -1
number = int(os.environ.get("LOCAL_RANK", "0"))
master_process = number == 0
distributed = args.rank >= 0
flag = args.verbose
"""
SPLITTING = """
rank == 0, rank != 0, rank > 0, rank < 2, 1 <= rank < 3, rank % 2, rank % 2 == 0, rank // 8 == 0, not rank, rank, is_main, number == 0
local_rank == 0, args.local_rank not in [-1, 0], RANK in {-1, 0}, dist.get_rank() == 0, is_main_process(), not is_main_process()
rank == world_size - 1, master_process, world_size > 1 and rank == 0, not args.distributed or args.rank == 0, args.gpu == 0, flags[rank]
int(os.environ["RANK"]) == 0, os.environ["RANK"] == "0", rank == args.chief, should_log(rank), accelerator.process_index == 0
args.multiprocessing_distributed and args.rank % ngpus_per_node == 0, rank in group_ranks
"""
ON_EVERY_RANK = """
RANK != -1, rank >= 0, rank > -1, -1 != rank, rank == -1, args.local_rank != -1, RANK not in (-1,), rank < world_size, 0 <= rank < world_size
"RANK" in os.environ, "RANK" in os.environ and "WORLD_SIZE" in os.environ, os.environ.get("RANK") is not None, os.environ.get("RANK")
rank is not None, args.gpu is not None, world_size > 1, n_gpu > 1, ddp, not ddp, bool(ddp), distributed, flag, dist.is_initialized()
int(os.environ.get("RANK", -1)) != -1, args.rank > -1 or args.dist_url == "env://", isinstance(rank, int)
"""


@pytest.mark.parametrize("tests", [SPLITTING, ON_EVERY_RANK])
def test_a_test_of_ranks_is_told_apart_from_a_test_of_a_launcher(tests: str) -> None:
    # Public scripts guard their barriers by `if RANK != -1:`, which holds on every rank under a launcher.
    for line in tests.strip().split("\n"):
        for test in ast.parse(f"[{line}]", mode="eval").body.elts:  # type: ignore[attr-defined]
            found = (
                check_source(f"{SETUP}if {ast.unparse(test)}:\n    dist.init_process_group()\n    dist.barrier()\n")
                or []
            )
            told = "collective-on-some-ranks" in [each.rule for each in found]
            assert told == (tests == SPLITTING), ast.unparse(test)


@pytest.mark.parametrize("line", ["print(loss.item(), force=True)", "builtins.print = quiet"])
def test_a_print_that_was_replaced_prints_on_one_rank(line: str) -> None:
    # As in the references of torchvision and DETR, whose `force=True` prints on all ranks.
    script = TORCHRUN.replace(
        "        if dist.get_rank() == 0:\n            print(epoch, mean.item())", "        print(epoch, mean.item())"
    )
    assert "printed-by-all" in [each.rule for each in check_source(script) or []]
    if "force" in line:
        script = script.replace("print(epoch, mean.item())", line)
    else:
        script = script.replace("import torch\n", f"import builtins\nimport torch\n{line}\n", 1)
    assert "printed-by-all" not in [each.rule for each in check_source(script) or []]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_correct_script_is_left_alone(name: str) -> None:
    found = check_source(SCRIPTS[name]) or []
    # One seed on all ranks, and dropout: that is its authors', and our tests compare its bits.
    assert [each.rule for each in found] == (["one-seed"] if name == "mingpt_ddp.py" else [])


@pytest.mark.parametrize(("rule", "right", "wrong"), MISTAKES)
def test_a_planted_mistake_is_found_at_its_line(rule: str, right: str, wrong: str) -> None:
    assert TORCHRUN.count(right) >= 1
    script = TORCHRUN.replace(right, wrong, 1)
    if rule == "step-left-out":  # with a collective in the loop the ranks may have agreed
        script = script.replace("        dist.all_reduce(mean, dist.ReduceOp.AVG)\n        if dist.get_rank() == 0:\n            print(epoch, mean.item())\n", "")  # fmt: skip
    ast.parse(script)
    found = check_source(script)
    assert [each.rule for each in found] == [rule]
    changed = [number for number, line in enumerate(script.splitlines(), 1) if line not in TORCHRUN.splitlines()]
    near = {line + off for line in changed for off in (-1, 0, 1)} if changed else {found[0].line}
    assert found[0].line in near | ({20, 23, 24} if rule in {"no-sampler", "set-epoch"} else set())
    ast.parse(found[0].mended)


def test_a_mistake_in_a_class_is_found() -> None:
    script = SPAWN_WITH_A_CLASS.replace("if self.gpu_id == 0 and epoch % self.save_every == 0:", "if epoch % 2 == 0:")
    assert [each.rule for each in check_source(script)] == ["saved-by-all"]


def test_a_script_that_is_not_parallel_is_not_judged() -> None:
    assert check_source("import torch\ntorch.save({}, 'a.pt')\n") is None


@pytest.mark.parametrize("line", ["import lockstep as ls\nls.launch(main, workers=2)", "from lockstep import Trainer"])
def test_a_script_of_the_trainer_is_data_parallel(line: str) -> None:
    found = check_source(f"{line}\nimport torch\ntorch.manual_seed(3)\nnet = torch.nn.Dropout(0.5)\n")
    assert found == []
    assert [each.rule for each in check_source(f"{line}\nimport torch\ntorch.save(0, 'a.pt')") or []] == [
        "saved-by-all"
    ]


def test_the_command_lists_file_line_and_the_line_as_it_should_be(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(TORCHRUN.replace("device_ids=[local_rank]", "device_ids=[0]"))
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 1
    assert f"{path}:21: mistake (device-ids): Every rank uses device 0." in done.output
    assert "model = DDP" not in done.output
    assert "DDP(model, device_ids=[local_rank])" in done.output
    assert f"{path}: 1 mistake, 0 notes" in done.output
    (value,) = json.loads(CliRunner().invoke(app, ["check", "--json", str(path)]).output)
    assert (value["line"], value["level"], value["file"]) == (21, Level.MISTAKE.value, str(path))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_a_script_is_read_as_python_reads_it(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "train.py"
    declared = "" if encoding == "utf-8-sig" else f"# -*- coding: {encoding} -*-\n"
    alone = "\fif dist.get_rank() == 0:\n    dist.barrier()\n"
    path.write_text(
        f"{declared}import torch.distributed as dist\ndist.init_process_group()  # é\n{alone}", encoding=encoding
    )
    done = CliRunner().invoke(app, ["check", str(path)])
    assert (done.exit_code, "    dist.barrier()  # outside" in done.output) == (1, True), done.output


def test_notes_count_only_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(TORCHRUN.replace("17 + dist.get_rank()", "17"))
    assert CliRunner().invoke(app, ["check", str(path)]).exit_code == 0
    assert CliRunner().invoke(app, ["check", "--strict", str(path)]).exit_code == 1


@pytest.mark.parametrize("text", ["def f(:\n", None, "a\0b"])
def test_what_is_no_script_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "train.py"
    if text is not None:
        path.write_text(text)
    assert CliRunner().invoke(app, ["check", str(path)]).exit_code == 2


def test_a_file_that_cannot_be_read_does_not_keep_the_others_from_being_checked(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(TORCHRUN.replace("    sampler.set_epoch(epoch)", "    pass"))
    paths = [str(tmp_path / name) for name in ("missing.py", "wrong.py")]
    result = CliRunner().invoke(app, ["check", *paths])
    assert result.exit_code == 2
    assert "set-epoch" in result.output
    assert "missing.py cannot be read" in result.output


def test_a_state_that_another_network_is_given_is_no_checkpoint() -> None:
    script = TORCHRUN.replace("model.module.state_dict()", "model.state_dict()")
    script = script.replace('model.load_state_dict(torch.load("last.pt", map_location="cpu"))', "pass")
    copied = script.replace("for epoch", "teacher.load_state_dict(model.module.state_dict())\nfor epoch")
    assert check_source(copied) == check_source(script.replace("for epoch", "\nfor epoch"))
