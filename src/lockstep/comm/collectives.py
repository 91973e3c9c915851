"""The table of collectives: everything about each one of torch.distributed, described once.

The methods of groups are made from it, and calls are read and described by it; how shared memory makes each is in
`shm/collectives.py`. `send`, `recv` and `monitored_barrier` are not in it: not all ranks make them alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Final, Protocol, TypeVar, final

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Work

from lockstep.comm.calls import describe_call

_Tensors = tuple[Sequence[Tensor], Sequence[Tensor]]
_PLAIN_OPTIONS: Final = (ReduceOp, ReduceOp.RedOpType, int, timedelta)
"""What torch's methods take one by one, instead of an options object."""
_MOST_PLAIN_OPTIONS: Final = 3
_ONE: Final = torch.Size([1])
_Group = TypeVar("_Group", bound=type)


@final
class CollectiveCall:
    """What one call of a collective is about; `Collective.read` makes it.

    Not a frozen dataclass: one is made for each call, and a frozen one costs a microsecond more.
    `inputs` is `outputs` where the call works in place; `options` are the arguments after the tensors: torch's options
    object, or reduce operation, root and timeout.
    """

    __slots__ = ("arguments", "description", "inputs", "name", "options", "outputs", "reductions", "root")

    def __init__(
        self,
        name: str,
        arguments: Sequence[Any],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        options: Sequence[Any],
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.outputs = outputs
        self.inputs = inputs
        self.options = options
        self.description = b""
        """What is compared with the calls of the other ranks, and what messages say."""
        self.reductions: Sequence[Any] = ()
        """How the shm backend reduces each output."""
        self.root = 0
        """The rank of the group that all send to or receive from, where the collective has one."""

    @property
    def is_async(self) -> bool:
        """Whether the caller does not wait at once."""
        return bool(getattr(self.options[0], "asyncOp", True)) if self.options else True

    @property
    def op(self) -> Any:
        """The reduce operation; SUM if none was given."""
        for option in self.options:
            found = getattr(option, "reduceOp", None)
            if found is not None:
                return found
            if isinstance(option, ReduceOp):
                return option
        return ReduceOp.SUM


def _read_root(options: Sequence[Any]) -> int:
    """Return the rank of the group that all send to or receive from; 0 if none was given."""
    for option in options:
        found = option if isinstance(option, int) else getattr(option, "rootRank", None)
        if found is not None:
            return int(found)
    return 0


def split_operation(op: ReduceOp | ReduceOp.RedOpType) -> tuple[ReduceOp.RedOpType, Any]:
    """Return the kind of a reduce operation, and the factor of PREMUL_SUM or None."""
    # How torch pickles it: kind and factor for a `ReduceOp`, a number for what is a kind already. `isinstance` cannot
    # distinguish them: in torch each is an instance of the other.
    state: Any = op.__getstate__()
    return state if isinstance(state, tuple) else (op, None)


def operation_name(op: ReduceOp | ReduceOp.RedOpType) -> str:
    return str(split_operation(op)[0]).rpartition(".")[2].lower()


class Compared(Enum):
    """What must agree between ranks about the tensors of a call."""

    INPUTS = "dtype and shape of the inputs"
    OUTPUTS = "dtype and shape of the outputs"
    DTYPE = "dtype of the first input"
    ROWS = "dtype of the input, and the shape of a row"


def refuse_one_output_twice(call: CollectiveCall) -> None:
    """Refuse `[torch.zeros(2)] * world_size`: what one rank has sent would overwrite what another has."""
    outputs = call.outputs
    if len(outputs) > 1 and outputs is not call.inputs and len(set(map(id, outputs))) < len(outputs):
        raise ValueError(
            f"{call.name}: the list of outputs holds one tensor several times, so only the last rank's values would be "
            "left in it. Make a tensor for each rank: [torch.zeros(2) for _ in range(world_size)]. (LS209)"
        )


@dataclass(frozen=True, slots=True)
class Form:
    """What the method takes."""

    parameters: tuple[str, ...]
    """Their names: first those with tensors and splits, then the options."""
    tensors: Callable[[Sequence[Any]], _Tensors]
    """Returns outputs and inputs, given the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    name: str
    """Its name in torch.distributed, for messages."""
    methods: tuple[str, ...]
    """Names of the group's method. The first is the oldest, which torch's groups and backends have."""
    form: Form
    compared: Compared = Compared.INPUTS
    """What must agree between ranks, beside the name."""
    reduces: bool = False
    """Whether the reduce operation must agree too."""
    root: str = ""
    """Whether the root must agree too, and how to name it: `"from"` or `"to"`; empty if there is none."""
    is_coalesced: bool = False
    """Whether one call stands for one call per tensor."""

    def read(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> CollectiveCall:
        num_tensors = len(self.form.parameters) - 1
        if keywords or len(arguments) < num_tensors:
            arguments = self._bind(arguments, keywords)
        if len(arguments) > num_tensors:
            arguments = self._without_absent_options(arguments, num_tensors)
        outputs, inputs = self.form.tensors(arguments)
        call = CollectiveCall(self.name, arguments, outputs, inputs, arguments[num_tensors:])
        if self.root:
            call.root = _read_root(call.options)
        return call

    def compared_tensors(self, call: CollectiveCall) -> Sequence[Tensor]:
        """Return the tensors of which something must agree; they also decide which backend carries the call."""
        return call.outputs if self.compared is Compared.OUTPUTS else call.inputs

    def describe(self, call: CollectiveCall, global_ranks: Sequence[int]) -> bytes:
        """Describe a call by all that must agree between ranks; `global_ranks` has the ranks in the default group."""
        details: list[str] = []
        if self.reduces:
            details.append(operation_name(call.op))
        if self.root:
            root = call.root
            # A root that does not exist is refused by the backend.
            details.append(f"{self.root} rank {global_ranks[root] if 0 <= root < len(global_ranks) else root}")
        tensors = self.compared_tensors(call)
        if self.compared is Compared.DTYPE or self.compared is Compared.ROWS:
            kinds = tuple([(tensor.dtype, torch.Size([])) for tensor in tensors[:1]])
            if self.compared is Compared.ROWS:
                details.append(f"rows of {list(tensors[0].shape[1:])}")
        else:
            # () and (1,) hold the same, and torch's backends take them together.
            kinds = tuple([(each.dtype, _ONE if each.numel() == 1 else each.shape) for each in tensors])
        return describe_call(self.name, kinds, ", ".join(details))

    def _bind(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
        rest = self.form.parameters[len(arguments) :]
        missing = [name for name in rest[:-1] if name not in keywords]
        unknown = [name for name in keywords if name not in rest]
        if missing or unknown:
            raise TypeError(f"{self.name}: missing arguments {missing}, unknown arguments {unknown}. (LS209)")
        return [*arguments, *(keywords.get(name) for name in rest)]

    def _without_absent_options(self, arguments: Sequence[Any], num_tensors: int) -> Sequence[Any]:
        options = arguments[num_tensors:]
        is_object = [hasattr(option, "timeout") for option in options]
        if is_object == [True]:
            return arguments
        unknown = [option for option in options if option is not None and not isinstance(option, _PLAIN_OPTIONS)]
        if any(is_object) or unknown or len(options) > _MOST_PLAIN_OPTIONS:
            raise TypeError(
                f"{self.name}: got {[*options]} after {', '.join(self.form.parameters[:-1]) or 'no tensors'}, expected "
                "one options object of torch, or a reduce operation, a root and a timeout. (LS209)"
            )
        while options and options[-1] is None:
            options = options[:-1]
        return [*arguments[:num_tensors], *options]


class MakesCollectives(Protocol):
    """A group whose methods `add_collectives` makes."""

    def make_call(self, collective: Collective, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Work | None:
        """Make one call (collective); None, as from torch's groups, if it has ended by now."""


def add_collectives(group: _Group) -> _Group:
    """Give a class the methods that torch calls by name, and that it lacks, as a decorator; each calls `make_call`."""
    for collective in COLLECTIVES:
        for name in collective.methods:
            if name in vars(group):
                continue
            method = _method_for(collective)
            method.__name__ = name
            method.__qualname__ = f"{group.__name__}.{name}"
            setattr(group, name, method)
    return group


def _method_for(collective: Collective) -> Callable[..., Work | None]:
    def method(self: MakesCollectives, *arguments: Any, **keywords: Any) -> Work | None:
        return self.make_call(collective, arguments, keywords)

    return method


# -- Where the tensors are among the arguments -------------------------------------------------------------------------


def _in_place(arguments: Sequence[Any]) -> _Tensors:
    tensors = _as_list(arguments[0])
    return tensors, tensors


def _outputs_and_inputs(arguments: Sequence[Any]) -> _Tensors:
    return _as_list(arguments[0]), _as_list(arguments[1])


def _list_of_outputs(arguments: Sequence[Any]) -> _Tensors:
    return _read_list(arguments[0]), _as_list(arguments[1])


def _list_of_inputs(arguments: Sequence[Any]) -> _Tensors:
    return _as_list(arguments[0]), _read_list(arguments[1])


def _rows_of_outputs(arguments: Sequence[Any]) -> _Tensors:
    return [tensor for row in arguments[0] for tensor in row], arguments[1]


def _none(_: Sequence[Any]) -> _Tensors:
    return (), ()


def _read_list(tensors: Any) -> list[Tensor]:
    """Return the tensors of a list that torch may have put into another list."""
    return list(tensors[0]) if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else list(tensors)


def _as_list(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


_OF_LISTS = ("output_tensors", "input_tensors", "opts")
_ONE_LIST = Form(("tensors", "opts"), _in_place)
_PAIR = Form(("output", "input", "opts"), _outputs_and_inputs)
_LISTS = Form(_OF_LISTS, _outputs_and_inputs)
_MANY_FROM_ONE = Form(_OF_LISTS, _list_of_outputs)
_ONE_FROM_MANY = Form(_OF_LISTS, _list_of_inputs)
_ROWS = Form(_OF_LISTS, _rows_of_outputs)

ALL_REDUCE: Final = Collective(name="all_reduce", methods=("allreduce",), form=_ONE_LIST, reduces=True)
COLLECTIVES: Final = (
    ALL_REDUCE,
    Collective(
        name="all_reduce_coalesced", methods=("allreduce_coalesced",), form=_ONE_LIST, reduces=True, is_coalesced=True
    ),
    Collective(name="broadcast", methods=("broadcast",), form=_ONE_LIST, root="from"),
    Collective(name="reduce", methods=("reduce",), form=_ONE_LIST, reduces=True, root="to"),
    Collective(name="all_gather", methods=("allgather",), form=_MANY_FROM_ONE),
    Collective(name="all_gather_into_tensor", methods=("_allgather_base", "all_gather_single"), form=_PAIR),
    Collective(name="all_gather_coalesced", methods=("allgather_coalesced",), form=_ROWS, is_coalesced=True),
    Collective(
        name="all_gather_into_tensor_coalesced",
        methods=("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        form=_LISTS,
        is_coalesced=True,
    ),
    Collective(
        name="reduce_scatter", methods=("reduce_scatter",), form=_ONE_FROM_MANY, compared=Compared.OUTPUTS, reduces=True
    ),
    Collective(
        name="reduce_scatter_tensor",
        methods=("_reduce_scatter_base", "reduce_scatter_single"),
        form=_PAIR,
        compared=Compared.OUTPUTS,
        reduces=True,
    ),
    Collective(
        name="reduce_scatter_tensor_coalesced",
        methods=("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        form=_LISTS,
        compared=Compared.OUTPUTS,
        reduces=True,
        is_coalesced=True,
    ),
    Collective(name="all_to_all", methods=("alltoall",), form=_LISTS, compared=Compared.DTYPE),
    Collective(
        name="all_to_all_single",
        methods=("alltoall_base", "all_to_all_single"),
        form=Form(("output", "input", "output_split_sizes", "input_split_sizes", "opts"), _outputs_and_inputs),
        compared=Compared.ROWS,
    ),
    Collective(name="gather", methods=("gather",), form=_MANY_FROM_ONE, root="to"),
    # Of torch 2.15.
    Collective(name="gather_single", methods=("gather_single", "gather_into_tensor"), form=_PAIR, root="to"),
    Collective(name="scatter", methods=("scatter",), form=_ONE_FROM_MANY, compared=Compared.OUTPUTS, root="from"),
    Collective(name="barrier", methods=("barrier",), form=Form(("opts",), _none)),
)
