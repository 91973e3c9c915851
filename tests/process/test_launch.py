"""`ls.launch`: results, failures, and that nothing is left behind. Real processes, real kills."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.process import warm
from tests.process.ranks import wait_until

import lockstep as ls
from lockstep.devices import Device, Placement
from lockstep.errors import DeviceError, GroupError, ReductionError, WorkerFailedError
from lockstep.launch import functions, launcher, supervision, template, worker_pool

pytestmark = pytest.mark.usefixtures("warm_workers")
CPU2 = "cpu:2"


def add_ranks(run: ls.Run, offset: int, *, scale: int = 1) -> tuple[int, int]:
    total = torch.tensor([run.rank + offset])
    dist.all_reduce(total)
    return run.rank, int(total) * scale


def workers_of(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


END_SECONDS = 60.0
"""How long workers may take to end after their launcher: a second, and more where other programs use the cores."""


def assert_all_end(processes: list[psutil.Process], within: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=within)
    for process in alive:
        process.kill()
    assert not alive


class Seen(NamedTuple):
    """What a worker sees of its surroundings, and what it gives back."""

    run: tuple[int, int, int, str]
    environment: list[str]
    threads: int
    draw: float
    argv: list[str]
    total: int
    large: torch.Tensor
    listening: set[str]
    """Where the launcher listens."""
    can_take_port: bool
    second_group: str
    """The error for a worker that makes a group again."""


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    """What three workers see; rank 1 has closed its output when it reports."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # a closure, so the function goes by value

    def look(run: ls.Run, megabytes: torch.Tensor, *, scale: int) -> Seen:
        draw = torch.rand(()).item()
        total = torch.tensor([run.rank + 10])
        dist.all_reduce(total)
        found = Seen(
            run=(run.rank, run.world_size, run.local_rank, str(run.device)),
            environment=[os.environ[name] for name in names],
            threads=torch.get_num_threads(),
            draw=draw,
            argv=sys.argv,
            total=int(total) * scale,
            large=megabytes + run.rank,
            listening=listening(psutil.Process(os.getppid())),
            can_take_port=can_take(int(os.environ["MASTER_PORT"])),
            second_group=set_up_again(),
        )
        if run.rank == 1:
            sys.stdout.close()
        return found

    def listening(process: psutil.Process) -> set[str]:
        return {row.laddr.ip for row in process.net_connections("tcp") if row.status == psutil.CONN_LISTEN}

    def can_take(port: int) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # with which it got the port
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
            return True

    def set_up_again() -> str:
        try:
            ls.init_process_group("gloo")
        except GroupError as error:
            message = str(error)
        dist.barrier()
        ls.destroy_process_group()
        ls.destroy_process_group()  # twice is fine
        return message

    return ls.launch(look, torch.zeros(2 << 20), devices="cpu:3", threads_per_worker=1, seed=3, scale=2)


def test_each_worker_sees_its_rank_and_settings_and_its_result_comes_in_rank_order(seen: list[Seen]) -> None:
    torch.manual_seed(3)
    draw = torch.rand(()).item()
    assert len(seen) == 3  # that of rank 1 too, which has closed its output
    for rank, found in enumerate(seen):
        assert found.run == (rank, 3, rank, "cpu")
        assert found.environment == [str(rank), str(rank), "3", "3"]
        assert found.threads == 1
        assert found.draw == draw
        assert found.argv == sys.argv
        assert found.total == 66
        assert found.large.shape == (2 << 20,)
        assert found.large.min() == found.large.max() == rank
        assert f"This process is rank {rank} of a process group already" in found.second_group


def test_the_launcher_listens_on_no_port_and_nobody_can_take_that_of_the_workers(seen: list[Seen]) -> None:
    assert all(found.listening == set() for found in seen)
    assert not any(found.can_take_port for found in seen)


def test_a_function_may_make_a_store_of_its_own_at_the_port(tmp_path: Path) -> None:
    made = tmp_path / "made"

    def meet(run: ls.Run) -> list[float]:
        found = []
        ls.destroy_process_group()
        for make in (dist.init_process_group, ls.init_process_group):
            make("gloo")
            total = torch.ones(1)
            dist.all_reduce(total)
            found.append(total.item())
            dist.barrier()
            dist.destroy_process_group()
        # Until rank 0 has made it, rank 1 may still reach the one of the last group, which rank 0 is closing.
        while run.rank == 1 and not made.exists():
            time.sleep(0.01)
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, 2, run.rank == 0, wait_for_workers=False)
        made.touch()
        found.append(float(store.add("n", 0)))
        if run.rank == 0:
            store.wait(["read"])  # it serves the store
        else:
            store.set("read", "")
        return found

    assert ls.launch(meet, devices=CPU2) == [[2.0, 2.0, 0.0]] * 2


def test_launches_at_the_same_moment_do_not_clash() -> None:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(ls.launch(add_ranks, 0, devices=CPU2))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[(0, 1), (1, 1)]] * 2


def test_the_first_failure_is_reported_with_its_traceback_and_the_rest_are_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail_on_one(run: ls.Run) -> None:
        if run.rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.barrier()
        if run.rank == 0:  # asked to stop, it goes on: it is to be killed
            while True:
                signal.pause()
        if run.rank == 1:
            raise KeyError("the culprit")
        dist.barrier()

    before = workers_of(os.getpid())
    with pytest.raises(WorkerFailedError) as caught:
        ls.launch(fail_on_one, devices="cpu:3")
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in fail_on_one" in str(caught.value)
    assert 'raise KeyError("the culprit")' in str(caught.value)
    # Before it was raised, which is when the last one has ended, nobody knew what the caller was waiting for.
    assert [record.getMessage() for record in caplog.records] == [
        "Worker 1 failed first: KeyError: 'the culprit'. The other workers are being stopped. (LS601)"
    ]
    assert workers_of(os.getpid()) == before


def test_a_killed_worker_is_the_cause_and_not_those_that_lost_it() -> None:
    def die_on_one(run: ls.Run) -> None:
        dist.barrier()
        if run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(WorkerFailedError, match="Worker 1 failed first: killed by SIGKILL") as caught:
        ls.launch(die_on_one, devices=CPU2)
    assert caught.value.rank == 1


def test_an_error_that_tells_of_another_worker_is_not_the_cause() -> None:
    # Whose message came first decided, so that sometimes ours hid the user's own.
    def fail_one_after_the_other(run: ls.Run) -> None:
        dist.barrier()
        if run.rank == 0:
            raise ReductionError("The backward of 1 of 2 ranks ended in an exception.")
        time.sleep(1.0)  # longer than failures are waited for otherwise
        raise KeyError("the culprit")

    with pytest.raises(WorkerFailedError, match="Worker 1 failed first: KeyError: 'the culprit'"):
        ls.launch(fail_one_after_the_other, devices=CPU2)


class SlowToPickleError(Exception):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        (self.folder / "pickling").touch()
        while not (self.folder / "later").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        return SlowToPickleError, (self.folder,)


def test_a_failure_has_the_time_at_which_it_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It had the time at which its exception was pickled, and the quicker one was called the first.
    monkeypatch.setattr(supervision, "EARLIER_FAILURE_SECONDS", 20.0)

    def fail_one_after_the_other(run: ls.Run) -> None:
        if run.rank == 0:
            raise SlowToPickleError(tmp_path)
        while not (tmp_path / "pickling").exists():
            time.sleep(0.01)
        (tmp_path / "later").touch()
        raise KeyError("the later")

    with pytest.raises(WorkerFailedError, match=r"Worker 0 failed first: .*SlowToPickleError"):
        ls.launch(fail_one_after_the_other, devices=CPU2)


def test_a_worker_that_exits_is_a_failure() -> None:
    def leave(run: ls.Run) -> None:
        os._exit(7)

    with pytest.raises(WorkerFailedError, match="ended with exit code 7 without reporting a result or an error"):
        ls.launch(leave, devices="cpu")


def test_what_cannot_be_sent_is_explained() -> None:
    with pytest.raises(WorkerFailedError, match="returned a lock that cannot be sent"):
        ls.launch(lambda _run: threading.Lock(), devices="cpu")
    with pytest.raises(TypeError, match=r"`args\[0\]` is of type _thread.lock.* Create it inside the function"):
        ls.launch(lambda _run, _lock: None, threading.Lock(), devices="cpu")


def test_no_workers_is_refused() -> None:
    with pytest.raises(DeviceError, match="1 or more"):
        ls.launch(add_ranks, 0, workers=0)


SCRIPT = """
import signal, sys
import lockstep as ls

class Holder:  # a class of the script itself, without a main guard below
    def __init__(self, value): self.value = value

def main(run, holder):
    if holder.value == "wait":
        open(f"ready-{run.rank}", "w").close()
        signal.pause()
    return Holder(holder.value + run.rank)

print([result.value for result in ls.launch(main, Holder(eval(sys.argv[1])), devices=sys.argv[2])])
"""


def start_script(tmp_path: Path, argument: str, devices: str) -> subprocess.Popen[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    return warm.Popen(
        [sys.executable, "script.py", argument, devices],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    out, err = start_script(tmp_path, "40", "cpu").communicate(timeout=100)
    assert out.strip() == "[40]", err


SHADOWED = ("types", "json", "signal", "pickle", "lockstep", "torch")


def test_the_current_directory_is_not_searched_for_modules(tmp_path: Path) -> None:
    # Workers searched it before they got the launcher's search path, so they ran what others had put there.
    for name in SHADOWED:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the current directory')")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text("OFFSET = 40")
    script = tmp_path / "code" / "script.py"
    script.write_text(
        "import lockstep as ls\n"
        "def main(run):\n"
        "    import mine\n"
        "    return run.rank + mine.OFFSET\n"
        "print(ls.launch(main, devices='cpu'))\n"
    )
    command = [sys.executable, str(script)]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert found.stdout.strip() == "[40]", found.stderr


BACKENDS = """
import functools, torch
import torch.backends.cudnn as cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel
import lockstep as ls

@functools.lru_cache
def offset():
    return 40

def main(run):
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.mkldnn.deterministic = True
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch._dynamo.config.suppress_errors = True
    with sdpa_kernel(SDPBackend.MATH), cudnn.flags(enabled=False):
        total = torch.ops.aten.add.Tensor(torch.ones(()), torch.backends.mps.is_available() + offset())
    return int(total), torch.backends.cudnn.deterministic

print(ls.launch(main, devices="cpu"))
"""


def test_a_function_of_a_script_may_use_torchs_backends(tmp_path: Path) -> None:
    # They are instances of subclasses of ModuleType, which cloudpickle does not take: "cannot pickle 'CudnnModule'".
    (tmp_path / "script.py").write_text(BACKENDS)
    found = warm.run([sys.executable, "script.py"], cwd=tmp_path)
    assert found.stdout.strip() == "[(41, True)]", found.stderr


@pytest.mark.parametrize(
    ("how", "workers"), [(signal.SIGKILL, 2), (signal.SIGTERM, 1), (signal.SIGINT, 2), (signal.SIGHUP, 1)]
)
def test_no_worker_outlives_the_launcher(tmp_path: Path, how: signal.Signals, workers: int) -> None:
    process = start_script(tmp_path, "'wait'", f"cpu:{workers}")
    wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(workers)), "the workers")
    started = workers_of(process.pid)
    assert len(started) >= workers
    process.send_signal(how)
    assert_all_end(started, within=END_SECONDS)
    _, err = process.communicate(timeout=100)
    assert process.returncode == -how
    if how is signal.SIGINT:
        assert "KeyboardInterrupt" in err


STOPPING = """
import signal, sys, time
import lockstep as ls
asked = []
def main(run, how):
    def ask(*_):
        if how == "fail":
            raise RuntimeError("the disk is full")
        asked.append(1)
    signal.signal(signal.SIGTERM, ask)
    open(f"ready-{run.rank}", "w").close()
    while not asked:
        time.sleep(0.02)
    return run.rank
if ls.launch(main, sys.argv[1], devices="cpu:2") == [0, 1]:
    sys.exit(75)
"""


@pytest.mark.parametrize(("how", "code", "said"), [("return", 75, ""), ("fail", 1, "the disk is full")])
def test_workers_that_handle_sigterm_may_save_and_return(tmp_path: Path, how: str, code: int, said: str) -> None:
    # The launcher once ended at once, and the workers with it.
    (tmp_path / "script.py").write_text(STOPPING)
    process = warm.Popen([sys.executable, "script.py", how], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)), "the workers")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    assert said in err


@pytest.mark.parametrize("is_from_thread", [False, True])
@pytest.mark.parametrize(("kind", "devices"), [("template", CPU2), ("interpreter", "cpu"), ("fork", CPU2)])
def test_an_interrupt_while_a_worker_starts_leaves_none(
    kind: str, devices: str, is_from_thread: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # It came between the start of the process and the line that took note of it.
    started: list[Any] = []

    def interrupt() -> None:
        if is_from_thread:  # as where the kernel gives it to another thread, since this one blocks it
            thread = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))
            thread.start()
            thread.join()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    class InterruptedPopen(subprocess.Popen[bytes]):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            if "-c" in args[0]:  # not the guardian
                interrupt()

    def fork(self: template.WorkerTemplate, *given: Any) -> Any:
        worker = fork_worker(self, *given)
        started.append(worker)
        interrupt()
        return worker

    if kind == "fork":
        fork_worker = template.WorkerTemplate.fork
        monkeypatch.setattr(template.WorkerTemplate, "fork", fork)
    else:
        monkeypatch.setattr(subprocess, "Popen", InterruptedPopen)
        monkeypatch.setattr(template if kind == "template" else functions, "subprocess", subprocess)
    with pytest.raises(KeyboardInterrupt):
        ls.launch(add_ranks, 0, devices=devices)
    assert len(started) == {"template": 1, "interpreter": 2, "fork": 1}[kind]  # with the guardian
    assert all(process.returncode is not None for process in started)
    assert capfd.readouterr().err == ""


NOTEBOOK = """
import builtins, code
vars(builtins).update(display=None, get_ipython=None, __IPYTHON__=True)  # as IPython does
cell = '''
import torch
import lockstep as ls
offset = 5
def work(run):
    torch.backends.cudnn.benchmark = False
    display("shown", run.rank)
    return run.rank + offset, get_ipython()
print(ls.launch(work, devices="cpu"))
'''
code.InteractiveInterpreter({"__name__": "__main__"}).runcode(compile(cell, "<cell>", "exec"))
"""


def test_a_function_of_a_notebook_cell_is_sent_by_value() -> None:
    found = warm.run([sys.executable, "-c", NOTEBOOK])
    assert found.stdout.splitlines() == ["shown 0", "[(5, None)]"], found.stderr


@pytest.mark.usefixtures("seen")  # the first launch of a process may open what stays
def test_a_launch_leaves_no_descriptor_open() -> None:
    before = psutil.Process().num_fds()
    ls.launch(add_ranks, 0, devices="cpu")
    with pytest.raises(WorkerFailedError):
        ls.launch(lambda _run: 1 / 0, devices="cpu")
    assert psutil.Process().num_fds() <= before


def test_processes_that_a_worker_leaves_behind_end_and_do_not_hold_up_the_launch() -> None:
    def leave_two(run: ls.Run) -> tuple[int, int]:
        child = os.fork()
        if child == 0:
            time.sleep(120)
            os._exit(0)
        return child, subprocess.Popen(["sleep", "120"], close_fds=False).pid

    began = time.monotonic()
    [children] = ls.launch(leave_two, devices="cpu")
    assert time.monotonic() - began < 60
    assert all(map(has_ended, children))


LEAVING = """
import subprocess, sys, time
import lockstep as ls

def main(run):
    child = subprocess.Popen(["sleep", "300"])
    with open("child", "w") as stream:
        print(child.pid, file=stream)
    if sys.argv[1] == "fail":
        raise KeyError("the culprit")
    time.sleep(300)

ls.launch(main, devices="cpu")
"""


@pytest.mark.parametrize("how", [None, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_what_a_worker_has_started_ends_with_it(how: signal.Signals | None, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LEAVING)
    command = [sys.executable, "script.py", "fail" if how is None else "wait"]
    process = warm.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    noted = tmp_path / "child"
    wait_until(lambda: noted.exists() and noted.read_text().endswith("\n"), "the worker")
    if how is not None:
        process.send_signal(how)
    process.communicate(timeout=100)
    wait_until(lambda: has_ended(int(noted.read_text())), "the end of what the worker has started")


def test_a_worker_that_closes_every_descriptor_is_a_failure_and_no_hang() -> None:
    def close_all(run: ls.Run) -> None:
        os.closerange(3, 256)
        signal.pause()

    with pytest.raises(WorkerFailedError, match=r"closed its pipe to the launcher|ended with exit code|killed by"):
        ls.launch(close_all, devices="cpu")


def test_an_exception_that_is_known_in_the_worker_only_is_reported_as_text(tmp_path: Path) -> None:
    (tmp_path / "alien_module.py").write_text("class AlienError(Exception): pass\n")

    def raise_alien(run: ls.Run, folder: str) -> None:
        sys.path.insert(0, folder)
        raise __import__("alien_module").AlienError("the real cause")

    with pytest.raises(WorkerFailedError, match="the real cause") as caught:
        ls.launch(raise_alien, str(tmp_path), devices="cpu")
    assert caught.value.rank == 0

    def return_alien(run: ls.Run, folder: str) -> object:
        sys.path.insert(0, folder)
        return __import__("alien_module").AlienError()

    with pytest.raises(WorkerFailedError, match="Worker 0 returned a value that the launcher cannot unpickle"):
        ls.launch(return_alien, str(tmp_path), devices="cpu")


def test_what_outlives_the_function_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The launch took half a minute and killed the worker without a word; of the exception nothing was seen but an
    # OSError of our own: the forked process had the worker's pipes no more.
    monkeypatch.setattr(worker_pool, "SLOW_END_SECONDS", 0.1)
    monkeypatch.setattr(worker_pool, "TEARDOWN_SECONDS", 1.0)
    said = tmp_path / "said"

    def leave_something(run: ls.Run) -> int:
        if run.rank == 0:
            threading.Thread(target=time.sleep, args=[1000]).start()
        elif (child := os.fork()) == 0:
            os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
            raise ValueError("in the child")
        else:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        return run.rank

    assert ls.launch(leave_something, devices=CPU2) == [0, 1]
    assert "A process that the function has forked" in said.read_text()
    assert said.read_text().endswith("ValueError: in the child\n")
    assert "but worker 0 still runs, 0.1 s later" in caplog.text or "workers 0, 1 still run" in caplog.text


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [WithoutTextError(), ValueError("bad \udc80 text")])
def test_an_exception_whose_text_cannot_be_made_or_encoded_is_reported(error: Exception) -> None:
    # Telling the other rank failed first, so the worker "ended with exit code 1 without reporting an error".
    def fail(run: ls.Run) -> None:
        if run.rank == 1:
            raise error
        dist.barrier()

    with pytest.raises(WorkerFailedError, match=rf"Worker 1 failed first: .*{type(error).__name__}"):
        ls.launch(fail, devices=CPU2)


def test_a_worker_sees_the_device_of_its_placement_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(_run: ls.Run) -> tuple[str | None, str | None]:
        return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    assert ls.launch(look, devices="cpu") == [("", "PCI_BUS_ID")]
    devices = tuple(Device(name="cpu", visible=uuid, label=uuid) for uuid in ("GPU-a", "GPU-b"))
    found = ls.launch(look, devices=Placement(devices=devices, reason="by hand"))
    assert found == [("GPU-a", "PCI_BUS_ID"), ("GPU-b", "PCI_BUS_ID")]


def test_a_call_for_a_worker_that_has_returned_ends_at_once() -> None:
    def work(run: ls.Run) -> None:
        if run.rank == 0:
            dist.all_reduce(torch.ones(3))  # an evaluation on one rank alone

    with pytest.raises(WorkerFailedError, match="Rank 1 has left the group") as raised:
        ls.launch(work, devices=CPU2)
    assert raised.value.rank == 0


def test_without_its_template_a_launch_starts_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    others = workers_of(os.getpid())
    forking = template.WorkerTemplate(seed=0, threads=1)
    [process] = [each for each in workers_of(os.getpid()) if each not in others]
    monkeypatch.setattr(launcher, "make_template", lambda *_args, **_options: forking)
    assert ls.launch(add_ranks, 0, devices=CPU2) == [(0, 1), (1, 1)]
    assert forking.is_usable()
    process.kill()
    process.wait(END_SECONDS)
    assert ls.launch(add_ranks, 0, devices=CPU2) == [(0, 1), (1, 1)]
    assert not forking.is_usable()
    forking.close()


def test_a_template_with_a_thread_forks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A lock that the thread held would be held for ever in a worker.
    code = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "starts_thread.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = template.WorkerTemplate(seed=0, threads=1, modules=["starts_thread"])
    assert made.fork([], {}) is None
    made.close()


def test_a_worker_is_forked_also_where_the_current_directory_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The launcher could not tell it, and the run ended when it was to replace a lost worker.
    (folder := tmp_path / "gone").mkdir()
    monkeypatch.chdir(folder)
    made = template.WorkerTemplate(seed=0, threads=1)
    assert made.is_usable()
    folder.rmdir()
    with (tmp_path / "task").open("w+b") as task:
        forked = made.fork([task.fileno()] * 5, {})
    assert forked is not None
    assert forked.wait(END_SECONDS) == 1  # it was sent no task
    made.close()
