"""Backends of torch within a shared-memory group, and the calls that these make: compared if asked for, watched."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, ReduceOp, Store, Work

from lockstep.comm.calls import describe_call
from lockstep.comm.collectives import Collective, CollectiveCall
from lockstep.comm.gloo import GlooSockets, connect_gloo
from lockstep.comm.group import ExplainedWork
from lockstep.comm.hosts import Checking, FindLost
from lockstep.comm.lost_ranks import ABORT_SECONDS, DeviceWatch
from lockstep.comm.shm.arguments import check_dense
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.phases import PhaseExchange
from lockstep.comm.shm.work import CallRunner
from lockstep.errors import GroupError
from lockstep.processes.ending import start_thread_left_alone
from lockstep.processes.user_line import find_user_line
from lockstep.torch_private.groups import gloo_options, make_backend

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorBackends:
    """What carries the tensors of accelerators in a shared-memory group."""

    names: Mapping[str, str]
    """The backend for each type of accelerator that the group was made for."""
    checking: Checking = Checking.OFF
    """Of their calls; those are compared over shared memory."""
    subgroups: Checking = Checking.OFF
    """Of groups of Gloo that `new_group` makes of ranks of this group."""


NO_ACCELERATORS: Final = AcceleratorBackends(names=MappingProxyType({}))
"""Those of a group that was made for CPU tensors."""


@final
class TorchBackends:
    """Gloo for sparse CPU tensors, and the backends of accelerators, each made when it is first used."""

    def __init__(  # one for each of what a backend is made of
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        accelerators: Mapping[str, str],
        find_lost: FindLost,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._accelerators = accelerators
        self._find_lost = find_lost
        self._made: dict[str, Any] = {}
        self._sockets: dict[str, GlooSockets] = {}
        self._abort: threading.Thread | None = None

    @property
    def devices(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._accelerators]

    def call(self, device: torch.device, name: str, arguments: Sequence[Any]) -> Work:
        work: Work = getattr(self.on(device), name)(*arguments)
        return work

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        work: Work = self.on(tensors[0].device).send(tensors, dst, tag)
        return work

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        work: Work = self.on(tensors[0].device).recv(tensors, src, tag)
        return work

    def abort(self) -> None:
        """End the calls that are under way, in whatever state."""
        for backend in self._made.values():
            backend.abort()

    def end_calls(self) -> None:
        """Let the calls that are under way end, with errors (any thread)."""
        for sockets in self._sockets.values():
            sockets.shut_down()
        if self._abort is None and any(kind != "cpu" for kind in [*self._made]):
            self._abort = start_thread_left_alone(self.abort, name="lockstep-abort")  # NCCL's takes a while

    def close(self) -> None:
        if self._abort is not None:  # a device must not be in an old call when the next group is made
            self._abort.join(ABORT_SECONDS)
        for backend in self._made.values():
            backend.shutdown()
        self._made.clear()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        for backend in self._made.values():
            backend.set_timeout(timeout)

    def on(self, device: torch.device) -> Any:
        if device.type not in self._made:
            self._made[device.type] = self._make(device.type)
        return self._made[device.type]

    def _make_gloo(self, device_type: str) -> Any:
        gloo: Any = ProcessGroupGloo  # its options are not in torch's stub
        # All ranks are on this host: the loopback works without a network or a host name that resolves.
        devices = [gloo.create_device(hostname=_LOOPBACK, lazy_init=True)]
        options = gloo_options(devices=devices, timeout=self._timeout, num_threads=1)
        place = PrefixStore("gloo" if device_type == "cpu" else f"gloo/{device_type}", self._store)
        made, self._sockets[device_type] = connect_gloo(
            place, self._size, lambda: gloo(place, self._rank, self._size, options), self._find_lost
        )
        return made

    def _make(self, device_type: str) -> Any:
        if device_type == "cpu":
            return self._make_gloo(device_type)
        try:
            name = self._accelerators.get(device_type) or dist.get_default_backend_for_device(device_type)
            if name != "gloo":
                return make_backend(name, PrefixStore(name, self._store), self._rank, self._size, self._timeout)
        except (RuntimeError, ValueError) as error:
            raise GroupError(
                f"The shm backend carries CPU tensors, and this torch has no backend for {device_type} tensors "
                f"({str(error).partition(chr(10))[0]}). Move the tensor to the CPU, or make the group with a backend "
                "for its device. (LS212)"
            ) from error
        return self._make_gloo(device_type)


@final
class TorchCalls:
    def __init__(
        self,
        backends: TorchBackends,
        runner: CallRunner,
        exchange: PhaseExchange,
        peers: Peers,
        watch: DeviceWatch,
        global_ranks: Sequence[int],
        *,
        compares: bool,
    ) -> None:
        self._backends = backends
        self._runner = runner
        self._exchange = exchange
        self._peers = peers
        self._device_watch = watch
        self._global_ranks = global_ranks
        self._compares = compares

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        check_dense("send", tensors[0])
        return self._watch(self._backends.send(tensors, dst, tag), "send")

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        check_dense("recv", tensors[0])
        return self._watch(self._backends.recv(tensors, src, tag), "recv")

    def collective(self, collective: Collective, call: CollectiveCall, tensor: Tensor) -> Work:
        """Make a call of the table's, of which shared memory cannot carry `tensor`."""
        if collective.is_coalesced:
            raise ValueError(
                f"{call.name}: a tensor is {tensor.layout} on {tensor.device}, expected dense tensors on the CPU. Make "
                "a call for each tensor. (LS207)"
            )
        method = collective.methods[0]
        if tensor.device.type != "cpu":
            self._runner.check_usable()
            if self._compares:
                self._runner.compare(collective.describe(call, self._global_ranks))
            else:
                self._runner.count_call()
            return self._watch(self._backends.call(tensor.device, method, call.arguments), call.name)
        if method != "allreduce" or tensor.layout is not torch.sparse_coo:
            check_dense(call.name, tensor)  # Gloo would refuse it too, but only when the others wait
        elif call.op != ReduceOp.SUM:
            raise ValueError(f"{call.name}: sparse tensors can be summed over ranks, and {call.op} is not SUM. (LS207)")
        call.description = describe_call(call.name, ((tensor.dtype, tensor.shape),), "sparse, sum")

        def action() -> None:
            self._exchange.compare_calls(call.description)
            self._backends.call(tensor.device, method, call.arguments).wait()

        return self._runner.start(call.description, action, call.outputs, is_async=call.is_async)

    def _watch(self, work: Work, name: str) -> Work:
        """Return a call of a device's backend, watched, and with errors that name a lost rank."""
        line = find_user_line()
        self._device_watch.add(work, f"{name}{f' at {line}' if line else ''}")
        return ExplainedWork(work, self._peers.explain_error, is_on_cpu=False)
