"""The state of one optimizer in pieces, of which this worker holds some; see `lockstep.sharding`.

Between two updates the optimizer has its parameters and no state. In an update it has pieces in their place: flat views
of the parameters, with their gradients and state. So the optimizer's own `step` runs, whatever it is, and schedulers,
options and hooks are those of an optimizer that is not sharded.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm import World, calls_for
from lockstep.comm.messages import TensorBroadcast
from lockstep.errors import UnusableStateError
from lockstep.sharding.pieces import Move, Piece, cut_evenly, find_moves, held_by_ranks, place_whole
from lockstep.sharding.transfer import receive_state, send_state
from lockstep.sharding.trial import can_be_cut

_MULTIPLE: Final = 1 << 8
"""Elements: a whole number of vectors of any processor, and of lines of its cache."""

_MIN_BYTES: Final = 1 << 16
"""Pieces of this size are messages of their own."""
_PURPOSE = "gathering the parameters that each worker has updated"

States = dict[Piece, dict[str, Any]]
_SHARED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""All that were ever shared: between two updates they have no state."""


@final
class OptimizerParts:
    """Made with the whole state, if the optimizer has one already, on a worker that is `rank` of `world_size`."""

    def __init__(self, optimizer: Optimizer, world: World, neighbours: int) -> None:
        self._optimizer = optimizer
        self._neighbours = neighbours
        self._is_cut = can_be_cut(optimizer)
        self._parameters = _parameters_of(optimizer)
        self._rank = world.rank
        self._held = self._plan(world.world_size)
        self._moves: list[Move] | None = None
        self._states: States = {}
        self._collected: dict[str, dict[str, Any]] | None = None
        self._broadcasts: list[TensorBroadcast] = []
        self._is_loaded, self._saves_states = True, True
        self.is_complete = True
        """Whether the parameters are those after the last update, here."""
        if optimizer in _SHARED:
            raise ValueError(
                "The optimizer was given to another trainer with shard_optimizer, which has its state. Make another "
                "optimizer for this one, and load the state: trainer.load(path). (LS535)"
            )
        _SHARED.add(optimizer)
        mine = weakref.ref(self)
        optimizer.register_state_dict_post_hook(lambda _, state: _call(mine(), OptimizerParts._add_states, state))
        optimizer.register_load_state_dict_post_hook(lambda _: _call(mine(), OptimizerParts._note_load))

    @property
    def num_bytes(self) -> int:
        """How much state this worker holds."""
        values = chain.from_iterable(state.values() for state in self._states.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    def describe(self) -> str:
        """Return how the optimizer is shared, which depends on the number of threads too (local)."""
        return f"pieces, each held {self._neighbours + 1} times" if self._is_cut else "whole parameters"

    # -- An update -----------------------------------------------------------------------------------------------------

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let the optimizer have the pieces that this worker holds in place of its parameters (local)."""
        self._take_loaded()
        self._collected = None
        optimizer, mine = self._optimizer, self._held[self._rank]
        whole = [group["params"] for group in optimizer.param_groups]
        views = {piece: self._view(piece) for piece in mine}
        by_parameter: dict[str, list[Tensor]] = {}
        for piece, view in views.items():
            by_parameter.setdefault(piece.name, []).append(view)
        names = {id(parameter): str(number) for number, parameter in enumerate(self._parameters)}
        for group in optimizer.param_groups:
            group["params"] = [view for each in group["params"] for view in by_parameter.get(names[id(each)], ())]
        optimizer.state.update({view: self._states[piece] for piece, view in views.items() if piece in self._states})
        try:
            yield
        finally:
            for group, parameters in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = parameters
            found = {piece: optimizer.state.pop(view, None) for piece, view in views.items()}
            self._states = {piece: state for piece, state in found.items() if state}

    def gather(self, world: World, *, has_failed: bool = False) -> None:
        """Let all workers have the parameters that each has updated (collective).

        Raises:
            GroupError: A worker is lost; `is_complete` is false then.
            UnusableStateError: The update of another worker has failed.
        """
        moves = self._find_missing()
        if not moves or world.group is None:
            return
        self.is_complete = False
        if not self._broadcasts:
            self._broadcasts = [TensorBroadcast(world.group) for _ in range(world.world_size)]
        device = self._parameters[0].device  # for which the group has a backend
        failed = [torch.tensor([int(has_failed)], device=device) for _ in range(world.world_size)]
        small: list[list[tuple[str, Tensor]]] = [[] for _ in self._broadcasts]
        large: list[Move] = []
        for move in moves:
            values = self._values(move.piece)
            if values.nbytes < _MIN_BYTES:
                small[move.source].append((str(move.piece), values))
            else:
                large.append(move)
        for source, (broadcast, sent) in enumerate(zip(self._broadcasts, small, strict=True)):
            broadcast.start([("has failed", failed[source]), *sent], source, waits=True)
        odd = next((rank for rank, each in enumerate(failed) if int(each) and rank != world.rank), None)
        if odd is not None and not has_failed:
            raise UnusableStateError(
                f"The update has failed on rank {odd}, whose part of the parameters is missing; its own error says "
                "why. Load a checkpoint on every rank: trainer.load(path). (LS524)"
            )
        if not any(map(int, failed)):
            with calls_for(_PURPOSE):
                for move in large:  # where it lies, without a message that it is copied to
                    dist.broadcast(self._values(move.piece), group=world.group, group_src=move.source)
        received = {move.piece.name for move in moves if move.source != world.rank}
        torch.autograd.graph.increment_version([self._parameters[int(name)] for name in received])
        self.is_complete = True

    def _find_missing(self) -> list[Move]:
        if self._moves is None:
            everything = [Piece(str(number), 0, each.numel()) for number, each in enumerate(self._parameters)]
            self._moves = find_moves(self._held, [everything] * len(self._held))
        return self._moves

    # -- Other workers -------------------------------------------------------------------------------------------------

    @property
    def has_other_parameters(self) -> bool:
        now = _parameters_of(self._optimizer)
        return len(now) != len(self._parameters) or any(a is not b for a, b in zip(now, self._parameters, strict=True))

    def settle(self, world: World, staying: Sequence[int] | None = None) -> None:
        """Share the state among these workers, or those of them that stay (collective); complete the parameters.

        What is here is replaced at the end: if it fails, it may be done again, with other workers.

        Raises:
            CheckpointError: No worker has some piece.
        """
        self._take_loaded()
        now = _parameters_of(self._optimizer)
        numbers = {id(parameter): str(number) for number, parameter in enumerate(now)}
        known = set(map(id, self._parameters))  # what is new has no state, on any worker
        mine: States = {Piece(numbers[id(each)], 0, each.numel()): {} for each in now if id(each) not in known}
        for piece in self._held[self._rank]:
            name = numbers.get(id(self._parameters[int(piece.name)]))
            if name is not None:
                mine[Piece(name, piece.start, piece.stop)] = self._states.get(piece, {})
        held = [(piece.name, piece.start, piece.stop) for piece in mine]
        found = world.gather_objects((held, self.is_complete))
        have = [[Piece(*each) for each in pieces] for pieces, _ in found]
        self._parameters = now
        if not all(is_complete for _, is_complete in found):
            self._held, self._moves, self._rank, self._states = have, None, world.rank, mine
            self._broadcasts = []
            self.gather(world)
        staying = range(world.world_size) if staying is None else staying
        planned = self._plan(len(staying))
        want: list[list[Piece]] = [[] for _ in range(world.world_size)]
        for rank, pieces in zip(staying, planned, strict=True):
            want[rank] = pieces
        received = self._exchange(world, mine, find_moves(have, want))
        parts = sorted({**mine, **received}.items(), key=lambda item: item[0].start)
        states = {piece: self._joined(piece, parts) for piece in want[world.rank]}
        self._states = {piece: state for piece, state in states.items() if state}
        self._held, self._moves, self._rank, self._broadcasts = want, None, world.rank, []

    def forget(self) -> None:
        """Hold nothing, on a worker that joins: it has the parameters of another one (local)."""
        self._take_loaded()
        self._held, self._states, self._rank = [[]], {}, 0

    def forget_group(self) -> None:
        self._broadcasts = []

    def collect(self, world: World, targets: Sequence[int]) -> None:
        """Let some workers have the whole state for `state_dict`, until `drop` or the next update (collective)."""
        self._take_loaded()
        everything = [Piece(str(number), 0, each.numel()) for number, each in enumerate(self._parameters)]
        want = [everything if rank in targets else [] for rank in range(world.world_size)]
        received = self._exchange(world, self._states, find_moves(self._held, want))
        if world.rank in targets:
            self._collected = self._whole({**self._states, **received})

    def drop(self) -> None:
        self._collected = None

    def _exchange(self, world: World, mine: States, moves: Sequence[Move]) -> States:
        """Send pieces of state, and return those that are received (collective)."""
        received: States = {}
        pairs = sorted({(move.source, target) for move in moves for target in move.targets})
        for source, target in pairs:
            if world.rank not in {source, target}:
                continue
            pieces = [move.piece for move in moves if move.source == source and target in move.targets]
            if world.rank == source:
                parts = sorted(mine.items(), key=lambda item: item[0].start)
                send_state(world, [self._joined(piece, parts) for piece in pieces], [target])
            else:
                found = receive_state(world, source, None)
                received.update(zip(pieces, found, strict=True))
        return received

    # -- States of pieces ----------------------------------------------------------------------------------------------

    def keep(self, *, is_stepped: bool) -> Callable[[], None]:
        """Return what puts the state back as it is now; `is_stepped` says that steps may write to it (local)."""
        self._take_loaded()
        states = copy.deepcopy(self._states) if is_stepped else dict(self._states)

        def put_back() -> None:
            self._is_loaded = True
            self._take_loaded()
            self._states = states

        return put_back

    @contextmanager
    def without_states(self) -> Iterator[None]:
        """Let `state_dict` return options alone (local)."""
        self._saves_states = False
        try:
            yield
        finally:
            self._saves_states = True

    def _plan(self, world_size: int) -> list[list[Piece]]:
        sizes = {str(number): each.numel() for number, each in enumerate(self._parameters)}
        parts = cut_evenly(sizes, world_size, _MULTIPLE) if self._is_cut else place_whole(sizes, world_size)
        return held_by_ranks(parts, self._neighbours)

    def _values(self, piece: Piece) -> Tensor:
        return _as_it_lies(self._parameters[int(piece.name)].detach())[piece.start : piece.stop]

    def _view(self, piece: Piece) -> Tensor:
        """Return a piece of a parameter as a parameter, with its gradient."""
        parameter = self._parameters[int(piece.name)]
        if not self._is_cut:
            return parameter
        view = self._values(piece).requires_grad_(parameter.requires_grad)
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ValueError(
                f"A parameter of shape {tuple(parameter.shape)} has a sparse gradient, which cannot be cut. "
                "Make the embedding with sparse=False, or train without sharding the optimizer. (LS535)"
            )
        if parameter.grad is not None:
            view.grad = _as_it_lies(_laid_out_as(parameter, parameter.grad))[piece.start : piece.stop]
        return view

    def _note_load(self) -> None:
        self._is_loaded, self._collected = True, None

    def _take_loaded(self) -> None:
        """Take of a state that the optimizer has loaded the pieces that this worker holds (local)."""
        if not self._is_loaded:
            return
        self._is_loaded = False
        state = self._optimizer.state
        whole = {str(number): state.pop(each, None) for number, each in enumerate(self._parameters)}
        self._states = {
            piece: self._cut(values, piece) for piece in self._held[self._rank] if (values := whole.get(piece.name))
        }

    def _cut(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        parameter = self._parameters[int(piece.name)]
        return {
            key: _as_it_lies(_laid_out_as(parameter, value))[piece.start : piece.stop].clone()
            if self._is_cut and isinstance(value, Tensor) and value.shape == parameter.shape
            else copy.deepcopy(value)
            for key, value in state.items()
        }

    def _joined(self, piece: Piece, parts: Sequence[tuple[Piece, dict[str, Any]]]) -> dict[str, Any]:
        """Return the state of a piece from those of pieces that cover it, in the order of their elements."""
        found = [
            (each, max(each.start, piece.start) - each.start, min(each.stop, piece.stop) - each.start, state)
            for each, state in parts
            if each.name == piece.name and each.start < piece.stop and piece.start < each.stop
        ]
        if not self._is_cut:
            return found[0][-1] if found else {}
        joined: dict[str, Any] = {}
        for key, value in found[0][-1].items() if found else ():
            if isinstance(value, Tensor) and value.shape == (found[0][0].num_elements,):
                cuts = [state[key][start:stop] for _, start, stop, state in found]
                is_whole = len(cuts) == 1 and len(cuts[0]) == len(value)
                joined[key] = value if is_whole else torch.cat(cuts)  # a cut would keep the memory of the rest
            else:
                joined[key] = copy.deepcopy(value)  # two pieces of one would count their steps together
        return joined

    def _whole(self, states: States) -> dict[str, dict[str, Any]]:
        parts = sorted(states.items(), key=lambda item: item[0].start)
        whole: dict[str, dict[str, Any]] = {}
        for number, parameter in enumerate(self._parameters):
            state = self._joined(Piece(str(number), 0, parameter.numel()), parts)
            if state and self._is_cut:
                state = {
                    key: value.as_strided(parameter.shape, parameter.stride())
                    if isinstance(value, Tensor) and value.shape == (parameter.numel(),)
                    else value
                    for key, value in state.items()
                }
            if state:
                whole[str(number)] = state
        return whole

    def _add_states(self, state_dict: dict[str, Any]) -> None:
        """Complete what `Optimizer.state_dict` returns with the whole state (local)."""
        if self._is_loaded or not self._saves_states:
            return
        whole = self._collected
        if whole is None:
            if any(self._rank in move.targets for move in self._find_missing()):
                raise ValueError(
                    "The state of the optimizer lies in parts on the workers (shard_optimizer), and this one does not "
                    "have all of them. Call trainer.state_dict() or trainer.save(path), on every rank; with "
                    "ls.ShardedOptimizer, consolidate_state_dict() on every rank first. (LS535)"
                )
            whole = self._whole(self._states)
        groups = zip(self._optimizer.param_groups, state_dict["param_groups"], strict=True)
        numbers = {id(each): str(number) for number, each in enumerate(self._parameters)}
        for group, packed in groups:
            for parameter, place in zip(group["params"], packed["params"], strict=True):
                if numbers[id(parameter)] in whole:
                    state_dict["state"][place] = whole[numbers[id(parameter)]]


def _call(parts: OptimizerParts | None, method: Callable[..., None], *args: Any) -> None:
    if parts is not None:
        method(parts, *args)


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return list({id(each): each for group in optimizer.param_groups for each in group["params"]}.values())


def _as_it_lies(tensor: Tensor) -> Tensor:
    """Return all elements in the order in which they lie in memory, which they fill without holes."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _laid_out_as(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a tensor of a parameter's shape with its strides."""
    if value.stride() == parameter.stride():
        return value
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device).copy_(value)
