"""Calls that shared memory cannot carry: made by torch's backends, compared where asked for, and watched."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Work

from lockstep.comm.calls import describe_call
from lockstep.comm.collective_call import CollectiveCall
from lockstep.comm.collectives import Collective
from lockstep.comm.group import ExplainedWork
from lockstep.comm.lost_ranks import DeviceWatch
from lockstep.comm.shm.arguments import check_dense
from lockstep.comm.shm.call_runner import CallRunner
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.phases import PhaseExchange
from lockstep.comm.shm.torch_beside import TorchBackends
from lockstep.processes.user_line import find_user_line


@final
class TorchCalls:
    def __init__(
        self,
        backends: TorchBackends,
        runner: CallRunner,
        exchange: PhaseExchange,
        peers: Peers,
        watch: DeviceWatch,
        names: Sequence[int],
        *,
        compares: bool,
    ) -> None:
        self._backends = backends
        self._runner = runner
        self._exchange = exchange
        self._peers = peers
        self._device_watch = watch
        self._names = names
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
                self._runner.compare(collective.describe(call, self._names))
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
