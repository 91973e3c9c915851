"""How a wrapper averages gradients over one group: the mean, the reducer, and what the ranks compare in each backward.

It is made anew when the wrapper is connected to another group, and is not copied with the wrapper.
"""

from dataclasses import dataclass
from typing import Literal, final

from lockstep.comm import World
from lockstep.parallel.comparison import ComparisonOptions, RankComparison
from lockstep.parallel.registered_hook import RegisteredHook, leaves_ranks_equal
from lockstep.reduce import HookReduction, KeepLocalGradients, MeanReduction, Reducer, ReducerOptions, TrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions:
    """What a wrapper was given that torch's has not, and what it was made with."""

    model_number: int
    """Which of the models that were wrapped over its group it is."""
    compares_replicas: bool
    """Whether parameters, optimizers and their steps must be the same on all ranks."""
    nonfinite: Literal["stop", "skip"]
    """What becomes of optimizer steps with gradients that are not finite."""
    on_skip: Literal["error", "zeros"]
    """What becomes of a training forward without a backward on one rank."""


@final
class Averaging:
    """Averages the gradients of a model over a group.

    `reducer` is None where nothing is trained, and `comparison` for one rank too.
    """

    def __init__(self, model: TrainedModel, world: World, reducing: ReducerOptions, options: AveragingOptions) -> None:
        self._world = world
        self.mean = MeanReduction(world)
        self.reducer: Reducer | None = None
        self.comparison: RankComparison | None = None
        if not model.trained:
            return
        self.reducer = Reducer(model, world, reducing, self.mean, KeepLocalGradients(self.mean))
        if world.world_size == 1:
            return
        self.comparison = RankComparison(
            model,
            world,
            self.reducer,
            ComparisonOptions(
                model_number=options.model_number,
                compares_replicas=options.compares_replicas,
                nonfinite=options.nonfinite,
                skips_with_zeros=options.on_skip == "zeros",
                is_asynchronous=any(reducing.is_asynchronous(each.spec.device) for each in model.trained),
            ),
        )
        self.reducer.observe(self.comparison)

    def use_hook(self, hook: RegisteredHook) -> None:
        """Let a user's hook reduce the buckets from now on (each rank calls, with the same hook)."""
        if self.reducer is None:
            return
        self.reducer.use_reduction(HookReduction(hook.comm_hook(), self._world), only_gradients=True)
        if self.comparison is not None and not leaves_ranks_equal(hook.function):
            self.comparison.let_ranks_differ()

    def set_joining(self, is_joining: bool) -> None:
        """Say whether ranks may run out of inputs now, so that they are not compared (each rank calls)."""
        if self.comparison is not None:
            self.comparison.set_joining(is_joining)


def check_options(nonfinite: str, on_skip: str) -> None:
    for name, value, known in (("nonfinite", nonfinite, ("stop", "skip")), ("on_skip", on_skip, ("error", "zeros"))):
        if value not in known:
            raise ValueError(f"{name} is {value!r}, expected {' or '.join(map(repr, known))}. (LS303)")
