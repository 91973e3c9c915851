"""A call of one of torch's backends, whose errors name the rank that was lost."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, final

from torch.distributed import Work

from lockstep.errors import GroupError
from lockstep.torch_private.compiler import keep_compiler_out_of_methods

_CHECK_TIMEOUT: Final = timedelta(seconds=0.2)
"""How often a wait checks whether the call will end."""


@final
@keep_compiler_out_of_methods
class ExplainedWork(Work):
    """A call that runs in a backend of torch.

    Gloo reports a lost rank as "Connection reset by peer". `explain` returns the error for a lost rank if that is
    the cause. `check`, called from time to time during a wait, raises if the call will not end. `wait_for_message`
    makes the waits of a message that must be ended from outside.
    """

    def __init__(
        self,
        inner: Work,
        explain: Callable[[RuntimeError], GroupError | None],
        check: Callable[[], None] | None = None,
        after_wait: Callable[[], None] | None = None,
        wait_for_message: Callable[[Work], bool] | None = None,
        *,
        is_on_cpu: bool = True,
    ) -> None:
        super().__init__()
        self._is_on_cpu = is_on_cpu
        self._wait_for_message = wait_for_message
        self._after_wait = after_wait
        self._inner: Any = inner
        self._explain = explain
        self._check = check

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            return self._wait(timeout)
        finally:
            if self._after_wait is not None:
                self._after_wait()

    def _wait(self, timeout: timedelta) -> bool:
        while self._check is not None and not timeout:
            began = time.monotonic()
            try:
                done: bool = self._inner.wait(_CHECK_TIMEOUT)
            except RuntimeError as error:
                is_timeout = time.monotonic() - began > _CHECK_TIMEOUT.total_seconds() / 2
                if not is_timeout:
                    raise (self._explain(error) or error) from error
                if self._inner.is_completed():
                    break  # since the limit of this wait: below it returns, or raises its own error
                self._check()
            else:
                return done
        try:
            # Without a timeout where there is none: messages of Gloo take zero for a limit.
            if self._wait_for_message is not None and not timeout:
                done = self._wait_for_message(self._inner)
            else:
                done = self._inner.wait(timeout) if timeout else self._inner.wait()
        except GroupError:
            raise
        except RuntimeError as error:
            explained = self._explain(error)
            if explained is None:
                raise
            raise explained from error
        return done

    def is_completed(self) -> bool:
        """Return whether it is done, with or without an error."""
        done: bool = self._inner.is_completed()
        return done

    def is_success(self) -> bool:
        succeeded: bool = self._inner.is_success()
        return succeeded

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> Any:
        """Return the tensors that it filled."""
        return self._inner.result()

    def synchronize(self) -> None:
        """Wait until it is done; on a GPU the current stream waits."""
        self._inner.synchronize()

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()

    def source_rank(self) -> int:
        """Return the rank that sent the received message."""
        rank: int = self._inner._source_rank()  # noqa: SLF001 - torch's own name for it
        return rank

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """Return a future of the tensors; on the CPU its errors are those of `wait`."""
        future = self._inner.get_future()
        return future.then(self._deliver) if self._is_on_cpu else future

    def _deliver(self, future: Any) -> Any:
        try:
            return future.value()
        except RuntimeError as error:
            explained = self._explain(error)
            if explained is None:
                raise
            raise explained from error
