"""A forked child frees nothing that it inherits, which could wait for a thread that it has not."""

import gc
import os
import select
import signal
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import lockstep.comm
from lockstep.processes.forking import INHERITED_GARBAGE

assert lockstep.comm  # it is what asks for this


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


@pytest.mark.parametrize("end", ["_go_on", "_freeze"])
def test_of_two_threads_that_fork_at_once_each_child_collects_garbage_again(end: str) -> None:
    garbage = type(INHERITED_GARBAGE)()
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        garbage._pause()
        other = threading.Thread(target=garbage._pause)
        other.start()
        other.join()
        assert not gc.isenabled()
        last = threading.Thread(target=getattr(garbage, end))  # in the parent, or in the child of the other thread
        last.start()
        last.join()
        if end == "_go_on":
            assert not gc.isenabled()
            garbage._go_on()
        assert gc.isenabled()
    finally:
        gc.unfreeze()
        gc.enable() if was_enabled else gc.disable()
