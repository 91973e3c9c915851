"""Groups of other backends within a shared-memory group, for what has no form in shared memory."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

from lockstep.errors import GroupError
from lockstep.torch_private import gloo_options, set_timeout

_LOOPBACK = "127.0.0.1"


@final
class TorchBackends:
    """Gloo for sparse CPU tensors and NCCL for CUDA tensors, each made when it is first used."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._made: dict[str, Any] = {}

    def call(self, device: torch.device, name: str, arguments: Sequence[Any]) -> Work:
        """Do the collective `name` on the backend for `device`."""
        work: Work = getattr(self._on(device), name)(*(value for value in arguments if value is not None))
        return work

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        """Send by the backend for the tensor's device."""
        work: Work = self._on(tensors[0].device).send(tensors, dst, tag)
        return work

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        """Receive by the backend for the tensor's device."""
        work: Work = self._on(tensors[0].device).recv(tensors, src, tag)
        return work

    def close(self) -> None:
        """Let go of them."""
        for backend in self._made.values():
            backend.shutdown()
        self._made.clear()

    def _on(self, device: torch.device) -> Any:
        makers = {"cpu": self._make_gloo, "cuda": self._make_nccl}
        if device.type not in makers:
            raise GroupError(f"The shm backend carries CPU tensors; make the group with a backend for {device}.")
        if device.type not in self._made:
            self._made[device.type] = makers[device.type]()
        return self._made[device.type]

    def _make_gloo(self) -> Any:
        gloo: Any = ProcessGroupGloo  # its options are not in torch's stub
        # All ranks are on this host: the loopback works without a network or a host name that resolves.
        devices = [gloo.create_device(hostname=_LOOPBACK, lazy_init=True)]
        options = gloo_options(devices=devices, timeout=self._timeout, num_threads=1)
        return gloo(PrefixStore("gloo", self._store), self._rank, self._size, options)

    def _make_nccl(self) -> Any:
        if not dist.is_nccl_available():
            raise GroupError(
                "The shm backend carries CPU tensors, and this torch has no NCCL for CUDA tensors. Move the tensor to "
                "the CPU, or make the group with a backend for its device."
            )
        options = dist.ProcessGroupNCCL.Options()
        set_timeout(options, self._timeout)
        return dist.ProcessGroupNCCL(PrefixStore("nccl", self._store), self._rank, self._size, options)
