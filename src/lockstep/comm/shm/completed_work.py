"""A call that is complete when its method returns, as torch's `Work`."""

from collections.abc import Sequence
from datetime import timedelta
from typing import final

import torch
from torch import Tensor
from torch.distributed import Work

from lockstep.torch_private.compiler import keep_compiler_out_of_methods


@final
@keep_compiler_out_of_methods
class CompletedWork(Work):
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002 - torch's signature
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        """Return at once."""

    def block_current_stream(self) -> None:
        """Return at once."""

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future
