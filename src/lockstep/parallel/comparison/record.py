"""What the ranks of a wrapper compare, and what is said where they differ. Pure: records in, a finding out.

When the ranks exchange their records: [Note: one number to compare] in `lockstep.reduce.status`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from lockstep.errors import counted
from lockstep.parallel.comparison.outside import OutsideValue
from lockstep.parallel.comparison.values import SWITCH
from lockstep.parallel.comparison.wrap_order import NamesByModel, find_other_order
from lockstep.reduce.model import Description, describe_differences


class Kind(Enum):
    REPLICAS = auto()
    """The ranks' parameters, or what updates them, are no longer the same."""
    CALLS = auto()
    """The ranks make other calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank has done since the last reduction, and what it has."""

    model: str
    """Which wrapped model's backward this is, in words."""
    is_training: bool
    """Whether the last forward was in training mode."""
    num_unused_forwards: int
    """Training forwards so far that no backward has reached."""
    keeps_gradients: bool
    """Whether the backward began with the gradients of an earlier reduction in `.grad`."""
    num_steps: int
    options: tuple[Description, ...]
    """Options of the optimizers that have stepped since, in the order of their steps."""
    gradients: int
    """A number for the gradients that were given to these steps; 0 where nobody has changed them."""
    values: Mapping[str, tuple[int, float]]
    """The sum of each parameter's bits, which decides, and that of its numbers, which is shown."""
    states: tuple[Mapping[str, int], ...]
    """A number for each entry of the state of these optimizers, summed up over parameters."""
    outside: tuple[OutsideValue, ...]
    names: NamesByModel
    samplers: tuple[Description, ...]
    """What the samplers of this process were made with, and the epochs that they are in."""
    loaders: tuple[int, ...]
    """How many batches the DataLoaders have yielded from which it draws."""
    state: Mapping[str, str]
    """How each layer ran in the last forward, and in which precision."""
    instructions: str
    """Which instructions of the processor torch uses."""
    forward_line: str
    step_line: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference that makes what the ranks train wrong."""

    kind: Kind
    text: str


def find_difference(records: Sequence[RankRecord]) -> Finding | None:
    """Return the first difference of another rank from rank 0 that matters; None where none does."""
    other_order = find_other_order([each.names for each in records])
    if other_order:
        return Finding(
            Kind.CALLS, f"{other_order} The last forward was at {records[0].forward_line} on rank 0. (LS304)"
        )
    first = records[0]
    for look in _LOOKS:
        for rank, record in enumerate(records[1:], start=1):
            finding = look(rank, record, first)
            if finding is not None:
                return finding
    return None


def _compare_models(rank: int, record: RankRecord, first: RankRecord) -> Finding | None:
    if record.model == first.model:
        return None
    return Finding(
        Kind.CALLS,
        f"Rank {rank} runs the backward of {record.model}, and rank 0 that of {first.model}: they would have got each "
        f"other's gradients. The forward was at {record.forward_line} on rank {rank}, at {first.forward_line} on rank "
        "0. Make wrapped models in the same order on every rank, and run their backwards in the same order. (LS304)",
    )


def _compare_options(rank: int, record: RankRecord, first: RankRecord) -> Finding | None:
    if len(record.options) != len(first.options):
        return None
    for found, expected in zip(record.options, first.options, strict=True):
        if found != expected:
            return Finding(
                Kind.REPLICAS,
                f"The optimizers of ranks {rank} and 0 differ: {describe_differences(found, expected)}. The last step "
                f"was at {first.step_line}. Give optimizers the same options on every rank, and step schedulers "
                "alike: a scheduler that follows a loss needs the mean over the ranks, not each rank's own. "
                f"{SWITCH} (LS313)",
            )
    return None


def _compare_samplers(rank: int, record: RankRecord, first: RankRecord) -> Finding | None:
    if len(record.samplers) != len(first.samplers):
        return None
    for found, expected in zip(record.samplers, first.samplers, strict=True):
        if found != expected:
            return Finding(
                Kind.CALLS,
                f"The DistributedSamplers of ranks {rank} and 0 differ: {describe_differences(found, expected)}. So "
                "some samples would be seen by several ranks, and others by none, or a rank is ahead of the other by "
                "batches that it has skipped or not had. Make samplers alike on every rank, over the same data in one "
                f"order (sort what lists files), and call set_epoch with the same number on all. {SWITCH} (LS317)",
            )
    return None


def _compare_steps(rank: int, record: RankRecord, first: RankRecord) -> Finding | None:
    odd = _odd_parameter(record, first)
    if record.num_steps == first.num_steps:
        return None
    more, fewer = (rank, 0) if record.num_steps > first.num_steps else (0, rank)
    line = record.step_line if more == rank else first.step_line
    return Finding(
        Kind.REPLICAS,
        f"Since the last backward, rank {rank} has taken {counted(record.num_steps, 'optimizer step')} and rank 0 "
        f"{first.num_steps}{f', so their parameters differ, {odd} for one' if odd else ''}. Rank {more} stepped at "
        f"{line}, and rank {fewer} did not, or rank {more} stepped without a backward for a batch that it has skipped. "
        "Step the optimizer on every rank or on none: decide by a number that is the same on all, such as the sum of "
        "a flag over the ranks. Where a rank skips a batch, call model.skip_backward() in place of backward(). "
        f"{SWITCH} (LS321)",
    )


def _compare_gradients(rank: int, record: RankRecord, first: RankRecord) -> Finding | None:
    odd = _odd_parameter(record, first)
    if record.gradients == first.gradients or not odd:
        return None
    return Finding(
        Kind.REPLICAS,
        f"The gradients with which rank {rank} stepped its optimizer at {record.step_line} were not those of rank 0: "
        "the backward had left the same on both, and then .grad was changed on one rank, or otherwise. Parameter "
        f"{odd} differs since. Clip, scale and clear gradients alike on every rank, by numbers that are the same on "
        f"all. {SWITCH} (LS313)",
    )


def _compare_values(rank: int, record: RankRecord, first: RankRecord) -> Finding | None:
    odd = _odd_parameter(record, first)
    if not odd:
        return None
    states = [
        name
        for found, expected in zip(record.states, first.states, strict=False)
        for name in {**expected, **found}
        if found.get(name) != expected.get(name)
    ]
    if states and len(record.states) == len(first.states) and record.instructions == first.instructions:
        cause = (
            f"The state of their optimizers differs too ({', '.join(states[:3])}): a state that was loaded on one rank "
            f"only gives other steps there. The last step was at {first.step_line}. Load the optimizer's state on "
            f"every rank. {SWITCH}"
        )
    elif record.instructions != first.instructions:
        cause = (
            f"torch computes with other instructions of the processor on rank {rank} ({record.instructions}) than on "
            f"rank 0 ({first.instructions}), so an optimizer's step rounds otherwise. Set ATEN_CPU_CAPABILITY to what "
            "all processors have, as ATEN_CPU_CAPABILITY=avx2, on every rank; or wrap with compare=False, and the "
            "replicas drift apart slowly, as they do with torch's wrapper."
        )
    else:
        cause = (
            "It was written on one rank, or with other values on each: by a checkpoint that was loaded, an "
            "initialisation, or averaged weights that were swapped in, after wrapping; or the ranks began with other "
            "values and init_sync=False. Write the same values on every rank, or on rank 0 before wrapping, which "
            f"sends rank 0's to all. {SWITCH}"
        )
    return Finding(
        Kind.REPLICAS,
        f"Parameter {odd} has other values on rank {rank} than on rank 0: they add up to {record.values[odd][1]!r} and "
        f"{first.values[odd][1]!r}. {cause} The last forward was at {record.forward_line} on rank {rank}. (LS313)",
    )


def _compare_forwards(rank: int, record: RankRecord, first: RankRecord) -> Finding | None:
    if record.num_unused_forwards == first.num_unused_forwards:
        return None
    behind, other = (rank, 0) if record.num_unused_forwards > first.num_unused_forwards else (0, rank)
    line = record.forward_line if behind == rank else first.forward_line
    counts = (record, first) if behind == rank else (first, record)
    return Finding(
        Kind.CALLS,
        f"Rank {behind} has run {counted(counts[0].num_unused_forwards, 'training forward')} without a backward, and "
        f"rank {other} {counts[1].num_unused_forwards}: a batch was skipped there (out of memory, a loss that is not "
        "finite, a loss that does not depend on the model), and its next backward met the one of that batch on the "
        f"other ranks. It would be one batch behind from now on, and leave them waiting at the end. Its last forward "
        f'was at {line}. Wrap with on_skip="zeros", or call model.skip_backward() in place of backward() where a batch '
        "is skipped; or skip it on every rank. For a forward on one rank alone use torch.no_grad() or eval(). (LS318)",
    )


def _compare_modes(rank: int, record: RankRecord, first: RankRecord) -> Finding | None:
    if record.is_training == first.is_training:
        return None
    evaluating = 0 if record.is_training else rank
    line = first.forward_line if evaluating == 0 else record.forward_line
    return Finding(
        Kind.CALLS,
        f"Rank {evaluating} runs forward and backward in evaluation mode (its last forward was at {line}), and rank "
        f"{rank if evaluating == 0 else 0} in training mode. "
        f"Call model.train() on every rank after an evaluation. {SWITCH} (LS320)",
    )


def _compare_states(rank: int, record: RankRecord, first: RankRecord) -> Finding | None:
    name = next((name for name, state in first.state.items() if record.state.get(name, state) != state), "")
    if not name:
        return None
    return Finding(
        Kind.CALLS,
        f"In the last forward {name} was {record.state[name]} on rank {rank} and {first.state[name]} on rank 0. The "
        f"forward was at {record.forward_line} on rank {rank}, at {first.forward_line} on rank 0. Choose modes and "
        f"precision alike on every rank. {SWITCH} (LS320)",
    )


def _compare_clearing(rank: int, record: RankRecord, first: RankRecord) -> Finding | None:
    if record.keeps_gradients == first.keeps_gradients:
        return None
    keeping, other = (rank, 0) if record.keeps_gradients else (0, rank)
    return Finding(
        Kind.CALLS,
        f"The backward of rank {keeping} has added to the gradients of an earlier step, and on rank {other} they had "
        f"been cleared, so the mean would have been of other things. The last forward was at {first.forward_line}. "
        f"Call optimizer.zero_grad() on every rank alike. {SWITCH} (LS313)",
    )


_LOOKS: tuple[Callable[[int, RankRecord, RankRecord], Finding | None], ...] = (
    _compare_models,
    _compare_options,
    _compare_samplers,
    _compare_steps,
    _compare_gradients,
    _compare_values,
    _compare_forwards,
    _compare_modes,
    _compare_states,
    _compare_clearing,
)


def _odd_parameter(record: RankRecord, first: RankRecord) -> str:
    return next((name for name, value in first.values.items() if record.values.get(name, value) != value), "")
