"""What groups over shared memory leave behind, and what others can get at: nothing."""

import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.process.ranks import CPU, PATIENCE, Rank, Ranks, names_in

from lockstep.comm.hosts import GroupHosts, host_identity
from lockstep.comm.lost_ranks import own_process
from lockstep.comm.shm import file_layout, native, rendezvous
from lockstep.comm.shm.memory import Memory, create_file
from lockstep.comm.stored_values import Deadline
from lockstep.errors import GroupError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it makes namespaces, or takes another user's id")
NOBODY = 65534
MEGABYTE = 1 << 20
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_RDONLY, MS_REC, MS_PRIVATE = 0x1, 0x4000, 0x40000
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
PIDFD_GETFD = 438
"""Of <linux/sched.h>, <sys/mount.h>, <linux/sockios.h>, <linux/if.h> and <sys/syscall.h>."""


# -- Groups that are destroyed -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holdings:
    num_descriptors: int
    num_threads: int
    num_mappings: int
    private_bytes: int
    shared_bytes: int


def holdings() -> Holdings:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Holdings(
        num_descriptors=len(names_in("/proc/self/fd")),
        num_threads=len(names_in("/proc/self/task")),
        num_mappings=len(Path("/proc/self/maps").read_text().splitlines()),
        private_bytes=int(status["RssAnon"].split()[0]) * 1024,
        shared_bytes=int(status["RssShmem"].split()[0]) * 1024,
    )


def use(rank: Rank, group: Any) -> None:
    """Make one call of each kind that makes a group hold something: threads, channels, views, memory of its own."""
    tensor = torch.full((100,), rank.number + 1.0)
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    owned = group.allocate_tensor(100_000, dtype=torch.float32, device=CPU)
    dist.all_reduce(owned, group=group)
    if rank.number == 0:
        dist.send(tensor, 1, group=group)
    else:
        dist.recv(tensor, 0, group=group)
    assert tensor.tolist() == [3.0] * 100


def make_many(rank: Rank, num_groups: int) -> tuple[Holdings, Holdings]:
    """Make groups, use them and destroy them; return what the process had after ten, and at the end."""
    port = 0
    if rank.number > 0:
        port = rank.hear()
    store = dist.TCPStore("127.0.0.1", port, is_master=rank.number == 0, wait_for_workers=False)
    if rank.number == 0:
        rank.say(store.port)
    dist.init_process_group("shm", store=store, rank=rank.number, world_size=rank.size)
    early = holdings()
    for number in range(num_groups):
        if number == 10:
            early = holdings()
        group = dist.new_group(backend="shm")
        use(rank, group)
        dist.destroy_process_group(group)
        del group
    late = holdings()
    dist.barrier()
    return early, late


def test_hundreds_of_groups_leave_nothing_behind(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, make_many, 400) as ranks:
        ranks.say(1, ranks.hear(0))
        for early, late in ranks.results():
            assert late.num_descriptors <= early.num_descriptors
            assert late.num_threads <= early.num_threads + 1  # one may be about to end
            assert late.num_mappings <= early.num_mappings + 20  # the allocator of C has some that come and go
            assert late.private_bytes <= early.private_bytes + 2 * MEGABYTE
            assert late.shared_bytes <= early.shared_bytes + MEGABYTE


def leave_messages_behind(rank: Rank) -> float:
    """Destroy a group with receives under way that nobody waits for; return how long that takes."""
    rank.join()
    dist.barrier()
    for tag in range(400):
        dist.irecv(torch.zeros(2), 1 - rank.number, tag=tag)
    dist.barrier()  # or one may destroy the group while the other still makes receives
    began = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - began


def test_receives_that_were_never_waited_for_do_not_delay_the_end(tmp_path: Path) -> None:
    # Each of them once waited a while for its sender first, to see then that the group was gone: 50 ms each.
    with Ranks(tmp_path, 2, leave_messages_behind) as ranks:
        assert max(ranks.results()) < 10.0


def allocate_and_drop(rank: Rank) -> None:
    """Take tensors from a group and drop them, all of one length and then of many; keep one past the group's end."""
    group = rank.join()
    kept = group.allocate_tensor(MEGABYTE, dtype=torch.float32, device=CPU).fill_(5.0)
    # Long enough to be reduced where they lie: short ones would pass through the outboxes and leave them grown.
    lengths = [MEGABYTE // 2] * 300 + [MEGABYTE // 2 + 1024 * number for number in range(100)]
    early = holdings()
    for number, length in enumerate(lengths):
        tensor = group.allocate_tensor(length, dtype=torch.float32, device=CPU)
        assert not tensor.any()
        tensor.fill_(1.0)
        if number % 10 == 0:
            dist.all_reduce(tensor)
            assert tensor.min() == tensor.max() == rank.size
    del tensor
    dist.barrier()
    late = holdings()
    assert late.num_descriptors <= early.num_descriptors
    assert late.shared_bytes <= early.shared_bytes + MEGABYTE
    assert os.fstat(group._memory.descriptor).st_blocks * 512 <= rank.size * kept.nbytes + MEGABYTE
    dist.barrier()
    dist.destroy_process_group()
    del group
    assert kept.min() == kept.max() == 5.0
    kept += 1
    assert kept.sum() == 6.0 * MEGABYTE


def test_tensors_of_a_group_give_their_memory_back_and_outlive_it(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, allocate_and_drop) as ranks:
        ranks.results()


def test_a_heap_that_is_full_is_an_error_and_lengths_that_recur_do_not_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_layout, "HEAP_SPAN", 4 * MEGABYTE)
    plan = file_layout.FileLayout(1)
    memory = Memory(create_file(plan), plan, 0)
    try:
        for _ in range(10):
            tensor = memory.allocate(3 * MEGABYTE, torch.uint8)
            assert not tensor.any()
            tensor.fill_(1)
            del tensor
        memory.allocate(MEGABYTE, torch.uint8)
        with pytest.raises(GroupError, match="cannot allocate 2097152 bytes more"):
            memory.allocate(2 * MEGABYTE, torch.uint8)
    finally:
        memory.close()


# -- Ranks that are killed ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traces:
    """What may be left of processes that are gone, where nobody else leaves anything."""

    shared: list[str]
    temporary: list[str]
    sockets: list[str]


def traces() -> Traces:
    sockets = [line.split()[7] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7]
    return Traces(names_in("/dev/shm"), names_in(tempfile.gettempdir()), sorted(sockets))


def system_calls(*calls: tuple[Any, ...]) -> None:
    """Make calls of the C library, until one fails."""
    for function, *arguments in calls:
        if function(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{function.__name__}: {os.strerror(number)}")


def live_alone() -> None:
    """Give this process an empty /dev/shm, an empty folder for temporary files, and a network without sockets."""
    libc = ctypes.CDLL(None, use_errno=True)
    system_calls(
        (libc.unshare, CLONE_NEWNS | CLONE_NEWNET),
        (libc.mount, None, b"/", None, MS_REC | MS_PRIVATE, None),
        (libc.mount, b"none", b"/dev/shm", b"tmpfs", 0, None),
        (libc.mount, b"none", tempfile.gettempdir().encode(), b"tmpfs", 0, None),
    )
    with socket.socket() as loopback:
        fcntl.ioctl(loopback, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))


def fork_rank(number: int, scene: Callable[[Rank], Any]) -> tuple[int, Connection]:
    """Start a rank of two, that shares what this process has alone."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        rank = Rank(number, 2, tempfile.gettempdir(), theirs)
        rank.run(scene, ())
        os._exit(0)
    theirs.close()
    return pid, ours


def reduce_for_ever(rank: Rank) -> None:
    group = rank.join()
    use(rank, group)
    owned = group.allocate_tensor(MEGABYTE, dtype=torch.float32, device=CPU)
    rank.say()
    while True:
        dist.all_reduce(owned)


def wait_for_rank_1(rank: Rank) -> None:
    module: Any = rendezvous
    wait_for_all = module._wait_for_all

    def say_and_wait(*arguments: Any) -> None:
        rank.say()
        wait_for_all(*arguments)

    module._wait_for_all = say_and_wait
    hosts = GroupHosts(identities=("a", "a"), host_names=("a", "a"))
    deadline = Deadline.after(timedelta(seconds=PATIENCE))
    rendezvous.connect_ranks(rank.store(), 0, file_layout.FileLayout(2), deadline, hosts=hosts)


def kill_all(rank: Rank) -> str | list[Traces]:
    """Kill two ranks in a stream of calls, and one that waits for another; return what is there before and after."""
    native.load()  # the library may lie in the folder that is hidden now
    try:
        live_alone()
    except OSError as error:
        return str(error)
    found = [traces()]
    for scenes in ((reduce_for_ever, reduce_for_ever), (wait_for_rank_1,)):
        ranks = [fork_rank(number, scene) for number, scene in enumerate(scenes)]
        for _, line in ranks:
            assert line.poll(PATIENCE)
            said = line.recv()
            assert said == ("said", None), said[1]
        found.append(traces())
        for pid, _ in ranks:
            os.kill(pid, signal.SIGKILL)
        for pid, _ in ranks:
            os.waitpid(pid, 0)
        Path(tempfile.gettempdir(), "store").unlink()  # the test's own
        found.append(traces())
    return found


@pytest.mark.root
@needs_root
def test_ranks_that_are_killed_leave_nothing_behind(tmp_path: Path) -> None:
    with Ranks(tmp_path, 1, kill_all) as ranks:
        found = ranks.result(0)
    if isinstance(found, str):
        pytest.skip(found)
    before, working, after_work, waiting, after_wait = found
    nothing = Traces([], [], [])
    assert before == after_work == after_wait == nothing
    assert (working.shared, working.temporary) == ([], ["store"])
    assert waiting.sockets == []


def list_files(rank: Rank) -> list[str]:
    """Return the names of all files that this process has open or mapped."""
    use(rank, rank.join())
    links = [Path("/proc/self/fd", name) for name in names_in("/proc/self/fd")]
    opened = [str(link.readlink()) for link in links if link.is_symlink()]
    # What a program inherits that a rank starts, it keeps: all but rank 0 once had the file so.
    files = [int(link.name) for link in links if link.is_symlink() and "memfd:lockstep" in str(link.readlink())]
    assert [os.get_inheritable(number) for number in files] == [False]
    mapped = [line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines()]
    dist.barrier()
    return [*opened, *(name for names in mapped for name in names)]


def test_a_group_has_no_file_with_a_name(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, list_files) as ranks:
        for names in ranks.results():
            assert "/memfd:lockstep (deleted)" in names
            assert [name for name in names if name.startswith(("/dev/shm", str(tmp_path)))] == []


# -- Little shared memory ----------------------------------------------------------------------------------------------


def have_little(how: str) -> None:
    """Give this process 64 MB of /dev/shm, or none that it can write, or no /dev/shm at all."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounts = {
        "64 MB": (libc.mount, b"none", b"/dev/shm", b"tmpfs", 0, b"size=64m"),
        "read-only": (libc.mount, b"none", b"/dev/shm", b"tmpfs", MS_RDONLY, b"size=4k"),
        "missing": (libc.mount, b"none", b"/dev", b"tmpfs", 0, None),
    }
    system_calls((libc.unshare, CLONE_NEWNS), (libc.mount, None, b"/", None, MS_REC | MS_PRIVATE, None), mounts[how])
    if how == "missing":
        for name, number in (("null", 3), ("zero", 5), ("random", 8), ("urandom", 9)):
            os.mknod(f"/dev/{name}", 0o666 | stat.S_IFCHR, os.makedev(1, number))


def reduce_100_megabytes(rank: Rank, how: str) -> str:
    """All-reduce 100 MB, once in a tensor of its own and once in one of the group."""
    try:
        have_little(how)
    except OSError as error:
        return str(error)
    assert Path("/dev/shm").exists() == (how != "missing")
    group = rank.join()
    own = torch.full((25 * MEGABYTE,), 1.0)
    shared = group.allocate_tensor(25 * MEGABYTE, dtype=torch.float32, device=CPU).fill_(2.0)
    for tensor, expected in ((own, 2.0), (shared, 4.0)):
        dist.all_reduce(tensor)
        assert tensor.min() == tensor.max() == expected
    assert how == "missing" or names_in("/dev/shm") == []
    dist.destroy_process_group()
    return ""


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("how", ["64 MB", "read-only", "missing"])
def test_the_size_of_dev_shm_does_not_matter(how: str, tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, reduce_100_megabytes, how) as ranks:
        reasons = ranks.results()
    if any(reasons):
        pytest.skip(reasons[0])


def identity_without_a_look_at_others(rank: Rank) -> str:
    module: Any = os
    listdir = os.listdir

    def refuse(path: Any) -> list[str]:
        if Path(path) == Path(f"/proc/{os.getppid()}/fd"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return listdir(path)

    module.listdir = refuse
    return host_identity()


def test_a_container_that_shows_no_files_of_other_processes_is_a_reason_not_to_share_memory(tmp_path: Path) -> None:
    with Ranks(tmp_path, 1, identity_without_a_look_at_others) as ranks:
        assert "lets processes of one user not open each other's files" in ranks.result(0)


def limit_files(rank: Rank) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEGABYTE, resource.RLIM_INFINITY))
    return host_identity()


def test_a_limit_on_the_length_of_files_is_a_reason_not_to_share_memory(tmp_path: Path) -> None:
    with Ranks(tmp_path, 1, limit_files) as ranks:
        assert ranks.result(0) == "alone, ulimit -f limits the length of its files"


# -- Other users -------------------------------------------------------------------------------------------------------


def admit_slowly(me: Rank) -> float:
    """Make a group, rank 1 only when it is told to; say the file's descriptor once it is offered."""
    module: Any = rendezvous
    open_file, wait_for_all = module._open_file, module._wait_for_all

    def say_and_wait(memory: Memory, *arguments: Any) -> None:
        if me.number == 0:
            me.say(memory.descriptor)
        wait_for_all(memory, *arguments)

    def open_when_told(*arguments: Any) -> int:
        me.hear()
        return open_file(*arguments)

    module._wait_for_all, module._open_file = say_and_wait, open_when_told
    group = me.join()
    me.say(group._memory.descriptor)
    me.hear()
    total = torch.tensor([me.number + 1.0])
    dist.all_reduce(total)
    return total.item()


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def refused(*arguments: Any, call: Callable[..., Any] = os.open) -> bool:
    try:
        call(*arguments)
    except PermissionError:
        return True
    return False


def intrude(rank: Rank, pid: int) -> None:
    """As another user: try to get at a group's memory, while it is made and afterwards."""
    libc = ctypes.CDLL(None, use_errno=True)
    mapped = [f"/proc/{pid}/map_files/{name}" for name in names_in(f"/proc/{pid}/map_files")]
    become_nobody()
    for _ in range(2):
        descriptor = rank.hear()
        assert refused(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        assert refused(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
        rank.say()
    assert refused(f"/proc/{pid}/mem", os.O_RDWR)
    assert refused(f"/proc/{pid}/map_files", call=names_in)
    assert mapped
    assert all(refused(name, os.O_RDONLY) for name in mapped)
    pidfd = os.pidfd_open(pid)
    assert libc.syscall(PIDFD_GETFD, pidfd, descriptor, 0) == -1
    assert ctypes.get_errno() == errno.EPERM


@pytest.mark.root
@needs_root
def test_another_user_can_neither_join_nor_read(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, admit_slowly) as ranks:
        descriptor = ranks.hear(0)
        with Ranks(tmp_path, 1, intrude, ranks.pid(0)) as intruder:
            intruder.say(0, descriptor)
            intruder.hear(0)
            ranks.say(1)
            descriptor = ranks.hear(0)
            ranks.hear(1)
            intruder.say(0, descriptor)
            intruder.hear(0)
            intruder.result(0)
        ranks.say(0)
        ranks.say(1)
        assert ranks.results() == [3.0, 3.0]


def pose_as_rank_0(rank: Rank) -> None:
    started = own_process().started
    become_nobody()
    rank.say((os.getpid(), started, create_file(file_layout.FileLayout(2))))
    rank.hear()


@pytest.mark.root
@needs_root
def test_a_rank_does_not_join_another_user(tmp_path: Path) -> None:
    with Ranks(tmp_path, 1, pose_as_rank_0) as impostor:
        pid, started, descriptor = impostor.hear(0)
        store, deadline = dist.HashStore(), Deadline.after(timedelta(seconds=PATIENCE))
        offered = {"pid": pid, "started": started, "descriptor": descriptor, "problem": ""}
        store.set("file", json.dumps(offered))
        hosts = GroupHosts(identities=("a", "a"), host_names=("a", "a"))
        with pytest.raises(GroupError, match="belongs to another user"):
            rendezvous.connect_ranks(store, 1, file_layout.FileLayout(2), deadline, hosts=hosts)
