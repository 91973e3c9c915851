"""The forwards of one rank: how many no backward has reached, where the last one was, and how the layers ran in it.

A probability of dropout or an activation that differs shows in no parameter. It is compared when a model is wrapped, by
what `print(model)` shows, and warned of. In which mode each layer was, and whether autocast was on, is compared in each
backward.
"""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, final

import torch
from torch import Tensor, nn

from lockstep.comm import World
from lockstep.errors import LockstepError, ReductionError, counted
from lockstep.held_objects import names_in_code
from lockstep.parallel.comparison.check import (
    SWITCH,
    Check,
    Lines,
    Reduced,
    Scope,
    others_than_first,
    warn_once,
)
from lockstep.processes.user_line import NO_LINE, CodeLine, is_of_library, user_line
from lockstep.reduce import RankStatus, TrainedModel
from lockstep.reduce.tensor_bits import sum_of_bits

_OF_THE_RANK = re.compile(r" at 0x[0-9a-f]+|(?<=cuda:)\d+|(?<=[xn]pu:)\d+")
"""What differs between ranks that are alike: an address, as functions have it when they are printed; a device."""
_MEANT = re.compile(r"rank|device|local|gpu|worker|seed|host|pid|port|time|index|idx|shard|part|main|master|(\b|_)id$")
"""In the names of numbers that belong to a rank."""
_REMEDIES: Final = {
    "Layer": (
        ". If that is not meant, build the model with the same options on every rank. (LS320)",
        "If that is meant",
    ),
    "Attribute": (
        (
            ", and its methods use it, so each rank computes something else. Set it alike on every rank; a tensor that "
            "all are to share belongs in a buffer (register_buffer), of which rank 0's is sent. (LS320)"
        ),
        "If that is meant",
    ),
    "Buffer": (
        (
            ", and with broadcast_buffers=False each rank keeps its own. Make it by the same seed on every rank, or "
            "leave broadcast_buffers out, which sends rank 0's. (LS304)"
        ),
        "If each rank is to have its own",
    ),
}
Parts = Mapping[str, dict[str, str]]
"""What the layers and buffers of a model are in words, by kind and name."""


@final
class TrainingForwards(Check):
    def __init__(self) -> None:
        self.num_unused = 0
        self.line: CodeLine = NO_LINE
        self._counts = False
        self._is_reached = False

    def begin_forward(self, *, counts: bool) -> None:
        """Note that a forward begins; `counts` whether it is one whose backward is to be reduced (local)."""
        self.line = user_line()
        self._counts = counts
        self.num_unused += counts

    def end_forward(self, outputs: Sequence[Tensor]) -> Callable[[], None] | None:
        """Note that a forward has ended; return what to call when a backward reaches it, None if none can (local)."""
        counts, self._counts = self._counts, False
        if not any(output.grad_fn is not None for output in outputs):
            self.num_unused -= counts
            return None
        return partial(self._note_reached, counts=counts)

    def fill_in(self, status: RankStatus) -> RankStatus:
        if not self._is_reached and self.num_unused > 0:
            self.num_unused -= 1  # tensors are not found in what it has returned
        self._is_reached = False
        return status

    def number(self) -> int:
        return self.num_unused

    def record(self) -> int:
        return self.num_unused

    def judge(self, found: Sequence[int], lines: Sequence[Lines]) -> LockstepError | None:
        for rank, _ in others_than_first(found):
            behind, other = (rank, 0) if found[rank] > found[0] else (0, rank)
            return ReductionError(
                f"Rank {behind} has run {counted(found[behind], 'training forward')} without a backward, and "
                f"rank {other} {found[other]}: a batch was skipped there (out of memory, a loss that is not "
                "finite, a loss that does not depend on the model), and its next backward met the one of that batch on "
                "the other ranks. It would be one batch behind from now on, and leave them waiting at the end. Its "
                f'last forward was at {lines[behind].forward}. Wrap with on_skip="zeros", or call '
                "model.skip_backward() in place of backward() where a batch is skipped; or skip it on every rank. For "
                "a forward on one rank alone use torch.no_grad() or eval(). (LS318)",
            )
        return None

    def reset(self, reduction: Reduced | None) -> None:
        if reduction is None:
            self.expect_no_backward()

    def expect_no_backward(self) -> None:
        self.num_unused = 0

    def _note_reached(self, *, counts: bool) -> None:
        self.num_unused -= counts
        self._is_reached = True


@final
class ForwardState(Check):
    """How the layers of a model ran in the last forward, on one rank."""

    scope = Scope.RUN

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self._device_type = model.trained[0].spec.device.type
        self._is_training = True
        self._precision = "off"
        self._last: tuple[bool, list[bool], str] = (True, [], "off")
        self._number = 0

    def end_forward(self, module: nn.Module, outputs: Sequence[Tensor]) -> None:
        """Note it: a forward whose backward may be reduced has ended (local)."""
        if any(output.grad_fn is not None for output in outputs):
            self._is_training = module.training
        self._precision = self._describe_precision()  # autocast may be over when the backward runs
        now = (self._is_training, self._model.modes(), self._precision)
        if now != self._last:
            self._last, self._number = now, hash((now[0], *now[1], zlib.crc32(now[2].encode())))

    def number(self) -> int:
        return self._number

    def record(self) -> tuple[bool, Mapping[str, str]]:
        """Return the model's mode, and in words the mode of each layer, and autocast."""
        root = self._model.module
        named = [] if root is None else list(root.named_modules())
        modes = {
            f"layer {name} ({type(layer).__name__})": "in training mode" if layer.training else "in evaluation mode"
            for name, layer in named
            if name
        }
        return self._is_training, {**modes, "autocast": self._precision}

    def judge(self, found: Sequence[tuple[bool, Mapping[str, str]]], lines: Sequence[Lines]) -> LockstepError | None:
        trains, expected = found[0]
        for rank, (is_training, _) in others_than_first(found):
            if is_training != trains:
                evaluating, other = (0, rank) if is_training else (rank, 0)
                return ReductionError(
                    f"Rank {evaluating} runs forward and backward in evaluation mode (its last forward was at "
                    f"{lines[evaluating].forward}), and rank {other} in training mode. "
                    f"Call model.train() on every rank after an evaluation. {SWITCH} (LS320)",
                )
        for rank, (_, state) in others_than_first(found):
            name = next((name for name, value in expected.items() if state.get(name, value) != value), "")
            if name:
                return ReductionError(
                    f"In the last forward {name} was {state[name]} on rank {rank} and {expected[name]} on rank 0. The "
                    f"forward was at {lines[rank].forward} on rank {rank}, at {lines[0].forward} on rank 0. Choose "
                    f"modes and precision alike on every rank. {SWITCH} (LS320)",
                )
        return None

    def _describe_precision(self) -> str:
        if not torch.is_autocast_enabled(self._device_type):
            return "off"
        return f"on, with {torch.get_autocast_dtype(self._device_type)}"


def describe_parts(model: TrainedModel, *, with_buffers: bool) -> Parts:
    """Return what may differ between ranks, which is warned of: layers, attributes, buffers nobody sends (local)."""
    root = model.module
    return {
        "Layer": {name: _describe(layer) for name, layer in (() if root is None else root.named_modules())},
        "Attribute": {} if root is None else dict(_describe_attributes(root)),
        "Buffer": {name: _describe_buffer(buffer) for name, buffer in model.buffers() if with_buffers},
    }


def warn_of_unlike_parts(own: Parts, world: World) -> None:
    """Warn, on every rank, of the first part of each kind that is not the same on all ranks (collective)."""
    expected, *others = world.gather_objects(own)
    for kind, (remedy, if_meant) in _REMEDIES.items():
        for rank, found in enumerate(others, start=1):
            pairs = ((name, found[kind].get(name), expected[kind].get(name)) for name in expected[kind] | found[kind])
            name, here, there = next((pair for pair in pairs if pair[1] != pair[2]), ("", None, None))
            if here != there:
                warn_once(
                    f"{kind} {name} of the wrapped model is {here or 'not there'} on rank {rank} and "
                    f"{there or 'not there'} on rank 0{remedy}",
                    f"{kind} {name} of",
                    if_meant=if_meant,
                )
                break


def _describe_attributes(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the numbers and tensors that layers hold besides parameters and buffers, where code of theirs uses them."""
    for path, layer in root.named_modules():
        members = [member for kind in type(layer).__mro__ for member in vars(kind).items()]
        code = [getattr(member, "__code__", None) for name, member in members if name != "__init__"]
        used = set(
            chain.from_iterable(names_in_code(each) for each in code if each and not is_of_library(each.co_filename))
        )
        for name in sorted(used & vars(layer).keys()):
            value = vars(layer)[name]
            if type(value) in {int, float} and not _MEANT.search(name):
                yield f"{path}.{name}".lstrip("."), repr(value)
            elif type(value) is Tensor:
                yield f"{path}.{name}".lstrip("."), _describe_buffer(value.detach())


def _describe_buffer(buffer: Tensor) -> str:
    shape = "x".join(map(str, buffer.shape)) or "scalar"
    can_be_read = type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_meta and buffer.numel()
    bits = f" with number {int(sum_of_bits([buffer])):x}" if can_be_read else ""
    return f"a tensor ({shape}, {buffer.dtype}){bits}"


def _describe(layer: nn.Module) -> str:
    try:
        options = layer.extra_repr()
    except Exception:  # noqa: BLE001 - the user's own, which may need what is not there yet
        options = ""
    return _OF_THE_RANK.sub("", f"{type(layer).__name__}({options})")
