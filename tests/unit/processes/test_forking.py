"""A forked child frees nothing that it inherits, which could wait for a thread that it has not."""

import gc
import os
import select
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import lockstep.comm
from lockstep.processes import forking

assert lockstep.comm  # it is what asks for this


class Owner:
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def say(self) -> None:
        self.said.append("in the child")


def test_a_child_calls_what_it_is_to_call_and_nothing_that_is_its_parents_to_call() -> None:
    said: list[str] = []
    owner, gone = Owner(said), Owner(said)
    forking.call_in_children(owner.say)
    forking.call_in_children(gone.say)
    of_owner = forking.finalize_here(owner, said.append, "collected")
    del gone
    process = forking.this_process()
    child = os.fork()
    if child == 0:
        of_owner()
        os._exit(said == ["in the child"] and forking.this_process() != process)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert said == []
    assert forking.this_process() == process
    of_owner()
    assert said == ["collected"]


def test_a_child_that_ends_as_python_does_calls_no_handlers_of_its_parent() -> None:
    # It wrote into the store that the script had ended: a false alarm.
    script = """
import os, sys
from lockstep.processes.forking import call_at_exit_here
revoke = call_at_exit_here(print, "revoked")
call_at_exit_here(print, "ended")
revoke()
if os.fork():
    os.wait()
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["ended"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_child_does_not_wait_in_the_destructor_of_an_old_group(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    gc.disable()
    held = SimpleNamespace(group=dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20)))
    held.itself = held
    del held
    if is_enabled:
        gc.enable()
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(3 if gc.isenabled() else 4)
    descriptor = os.pidfd_open(child)
    ended = select.select([descriptor], [], [], 20)[0]
    os.close(descriptor)
    is_unchanged = gc.isenabled() == is_enabled
    gc.enable() if was_enabled else gc.disable()
    if not ended:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert (code, is_unchanged) == (3 if is_enabled else 4, True)


@pytest.mark.parametrize("end", ["go_on", "begin_child"])
def test_of_two_threads_that_fork_at_once_each_child_collects_garbage_again(end: str) -> None:
    garbage = forking._Forks()
    garbage.leave_garbage_alone()
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        garbage.pause()
        other = threading.Thread(target=garbage.pause)
        other.start()
        other.join()
        assert not gc.isenabled()
        last = threading.Thread(target=getattr(garbage, end))  # in the parent, or in the child of the other thread
        last.start()
        last.join()
        if end == "go_on":
            assert not gc.isenabled()
            garbage.go_on()
        assert gc.isenabled()
    finally:
        gc.unfreeze()
        gc.enable() if was_enabled else gc.disable()
