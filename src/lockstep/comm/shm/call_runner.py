"""Running a group's calls, one after another: what is checked before, recorded meanwhile, told after a failure."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import Work

from lockstep.comm.open_calls import CallEvents
from lockstep.comm.shm.arguments import check_writable
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.phases import PhaseExchange
from lockstep.comm.shm.work import WorkQueue
from lockstep.errors import CollectiveMismatchError, GroupError
from lockstep.processes.user_line import find_user_line


@final
class CallRunner:
    """Runs the calls of a group in their order, in the caller's thread or behind it."""

    def __init__(
        self,
        exchange: PhaseExchange,
        peers: Peers,
        work_queue: WorkQueue,
        events: CallEvents,
        close: "weakref.finalize[Any, Any]",
    ) -> None:
        self._exchange = exchange
        self._peers = peers
        self._work_queue = work_queue
        self._events = events
        self._close = close

    def start(self, call: bytes, action: Callable[[], object], tensors: Sequence[Tensor], *, is_async: bool) -> Work:
        """Begin a call that writes to `tensors`, or run it if it is not asynchronous."""
        self.check_usable()
        check_writable(tensors)
        # A rank that does not wait at once is elsewhere when its call is found to differ.
        caller = find_user_line() if is_async else threading.get_ident()

        number = self._events.take_number()

        def guarded() -> None:
            self.check_usable()
            event = self._events.begin(number, call, tensors)
            self._exchange.caller = caller
            self._peers.spins_longer = not self._work_queue.is_in_background
            try:
                action()
            except CollectiveMismatchError:
                raise  # on every rank alike, between two phases: the group is as good as before
            except GroupError:
                raise  # published by the rank that found it
            except BaseException as error:
                self._peers.fail(error, call)  # without this the others would wait for phases that never come
                raise
            finally:
                self._events.end(event)

        run = guarded
        if any(tensor.is_inference() for tensor in tensors):
            run = torch.inference_mode()(guarded)
        if is_async:
            return self._work_queue.put(run, tensors)
        return self._work_queue.run(run, tensors)

    def compare(self, call: bytes) -> None:
        """Return when every rank has made this call, which carries nothing."""
        self.start(call, lambda: self._exchange.compare_calls(call), [], is_async=False).wait()

    def check_usable(self) -> None:
        if self._peers.broken is not None:
            raise self._peers.broken.with_traceback(None)
        if not self._close.alive:
            raise GroupError("This process group was destroyed; make a new one to go on. (LS204)")
