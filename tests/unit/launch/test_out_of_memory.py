"""Who sent a SIGKILL, from recorded files of the kernel."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.launch import exits
from lockstep.launch.exits import KillerNames, OomKills, name_killer, read_oom_kills

V2 = {
    "proc/self/cgroup": "0::/user.slice/job.scope\n",
    "proc/vmstat": "nr_free_pages 12\noom_kill 7\nnuma_hit 3\n",
    "sys/fs/cgroup/user.slice/job.scope/memory.events": "low 0\nhigh 0\nmax 31\noom 2\noom_kill 2\noom_group_kill 0\n",
}
V1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/4716a9\n0::/\n",
    "proc/vmstat": "oom_kill 7\n",
    "sys/fs/cgroup/memory/docker/4716a9/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
}
CONTAINER = {
    "proc/self/cgroup": "4:memory:/process/4716a9\n0::/\n",
    "proc/vmstat": "oom_kill 0\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
}


def record(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "group", "host"), [(V2, 2, 7), (V1, 5, 7), (CONTAINER, 1, 0), ({"proc/vmstat": "x 1\n"}, None, None)]
)
def test_counters_are_read(tmp_path: Path, files: dict[str, str], group: int | None, host: int | None) -> None:
    assert read_oom_kills(record(tmp_path, files)) == OomKills(group=group, host=host)


def test_a_system_without_counters_tells_nothing(tmp_path: Path) -> None:
    assert read_oom_kills(tmp_path) == OomKills(group=None, host=None)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((2, 7), (3, 8), "by the kernel's out-of-memory killer: the memory limit of this control group"),
        ((2, 7), (2, 8), "probably by the kernel's out-of-memory killer, which killed processes on this host"),
        ((None, 7), (None, 8), "probably by the kernel's"),
        ((2, 7), (2, 7), "by another process: the kernel's out-of-memory killer has killed nothing meanwhile"),
        ((2, None), (2, None), "by another process or by the kernel because memory ran out"),
    ],
)
def test_the_killer_is_named(
    before: tuple[int | None, int | None], after: tuple[int | None, int | None], expected: str
) -> None:
    readings = [OomKills(group=group, host=host) for group, host in (before, after)]
    assert name_killer(*readings).startswith(expected)


def test_workers_that_are_killed_together_have_one_killer(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a whole control group that reached its limit, only the first was said to be ended by the kernel.
    kills, now = [0], [0.0]
    monkeypatch.setattr(exits, "read_oom_kills", lambda: OomKills(group=kills[0], host=None))
    monkeypatch.setattr(exits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    names = KillerNames()
    now[0], kills[0] = 60.0, 2
    assert names.name().startswith("by the kernel's")
    now[0] = 60.1
    assert names.name().startswith("by the kernel's")
    now[0] = 120.0
    assert not names.name().startswith("by the kernel's")
