"""The plan that is in use, and how it follows the model.

[Note: order of arrival] The plan is made anew once, after the first reduction, in the order in which gradients arrived
on rank 0: modules are often used in another order than they were registered in.

[Note: a changed model] A rank that finds other parameters than the plan has says so in a note, and then all ranks,
at the same point, compare their models, plan anew and reduce what the old plan had no place for.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import World
from lockstep.errors import ParameterMismatchError
from lockstep.reduce.agreement import check_same_model, check_same_values
from lockstep.reduce.layout import AnySlot, Bucket, Layout, empty_layout, lay_out
from lockstep.reduce.model import TrainedModel, TrainedParameter
from lockstep.reduce.notes import Notes, num_notes
from lockstep.reduce.options import ReducerOptions
from lockstep.reduce.plan import Plan, plan_buckets


@final
class LivePlan:
    """The buckets of a model, kept up to date.

    Args:
        model: The model.
        world: The workers.
        options: How gradients are reduced.
        let_go: Lets go of all that others hold of the layout, before there is memory for a new one.

    Attributes:
        layout: The buckets.
        has_changed: Whether this rank's model was found to differ from the plan.
        is_in_order: Whether the plan is that of the order of arrival.
    """

    def __init__(self, model: TrainedModel, world: World, options: ReducerOptions, let_go: Callable[[], None]) -> None:
        assert world.group is not None
        self._let_go = let_go
        self.has_changed = False
        self.is_in_order = False
        self._model = model
        self._world = world
        self._group = world.group
        self._options = options
        self._only_gradients = False
        self._arrived: list[AnySlot] = []
        self._order: list[int] = []
        self._plan = self._make()
        self.layout = self._lay_out()

    @property
    def slots(self) -> list[AnySlot]:
        """All places, in the order in which they travel."""
        return [slot for bucket in self.layout.buckets for slot in bucket.slots]

    def slot_of(self, parameter: nn.Parameter) -> tuple[AnySlot, Bucket]:
        """Return the place of a parameter of the plan, and its bucket."""
        places = ((slot, bucket) for bucket in self.layout.buckets for slot in bucket.slots)
        return next((slot, bucket) for slot, bucket in places if slot.parameter is parameter)

    def use_only_gradients(self) -> None:
        """Plan anew, for a communication hook."""
        self._only_gradients = True
        self._begin_anew()

    # -- Order of arrival ----------------------------------------------------------------------------------------------

    @property
    def wants_order(self) -> bool:
        """Whether the order of arrival is still to be learnt."""
        return self._options.follows_arrival and not self.is_in_order

    def note_arrival(self, slot: AnySlot) -> None:
        """Note that a gradient has arrived; called while the order is wanted."""
        self._arrived.append(slot)

    def learn_order(self) -> None:
        """Take rank 0's order of arrival for the next plan (collective). [Note: order of arrival]."""
        self.is_in_order = True
        index = {id(each.parameter): number for number, each in enumerate(self._model.trained)}
        order = [index[id(slot.parameter)] for slot in self._arrived]
        seen = set(order)
        order += [number for number in reversed(range(len(index))) if number not in seen]
        told = torch.tensor(order, device=self._model.trained[0].parameter.device)
        dist.broadcast(told, group=self._group, group_src=0)
        self._order = told.tolist()
        self._arrived = []

    def use_order(self) -> bool:
        """Use the order that was learnt, if one was since; return whether there is a new layout.

        Called when the next backward begins: until then gradients may lie in the old buckets.
        """
        if not self._order or self.has_changed:
            return False
        plan, self._order = self._make(), []
        is_new = plan != self._plan
        if is_new:
            self._plan = plan
            self._replace()
        return is_new

    # -- A model that changes ------------------------------------------------------------------------------------------

    def look(self) -> list[nn.Parameter]:
        """See whether the model has changed; return the parameters that the plan does not have.

        What no longer fits the plan is left out of it until all ranks have been told. [Note: a changed model]
        """
        if self.has_changed or not self._model.has_changed():
            return []
        self.has_changed = True
        current = TrainedModel(self._model.module, self._model.ignored)
        planned = {id(each.parameter): each.spec for each in self._model.trained}
        found = {id(each.parameter): each for each in current.trained}
        for slot in self.slots:
            now = found.get(id(slot.parameter))
            slot.fits = now is not None and now.spec == planned[id(slot.parameter)]
        return [each.parameter for key, each in found.items() if key not in planned]

    def follow(self, notes: Notes, scale: float) -> None:
        """Compare models, plan anew, and reduce what the old plan had no place for (collective).

        Args:
            notes: What the ranks said, of which one at least has changed.
            scale: By what gradients are multiplied before they are added.

        Raises:
            ParameterMismatchError: The ranks' models differ, or new parameters have different values.
        """
        if notes.num_changed < self._world.world_size and self.layout.notes.device.type != "cpu":
            # The others hear of it a step later, so there is no comparing. [Note: notes on a GPU]
            raise ParameterMismatchError(
                f"The model has changed on {notes.num_changed} of {self._world.world_size} ranks, "
                f"{'this one included' if self.has_changed else 'not on this one'}. Change it alike on every rank."
            )
        before = {id(each.parameter): each.spec for each in self._model.trained}
        self._model.look()
        check_same_model(self._model, self._world)
        late = [each for each in self._model.trained if before.get(id(each.parameter)) != each.spec]
        check_same_values(late, self._world)
        if late:
            self._reduce_late(late, scale)
        self._begin_anew()

    def _reduce_late(self, late: Sequence[TrainedParameter], scale: float) -> None:
        plan = plan_buckets([each.spec for each in late], self._options.limits)
        layout = lay_out(plan, late, self._group, as_view=self._options.as_view)
        for bucket in layout.buckets:
            for slot in bucket.slots:
                slot.has_arrived = slot.parameter.grad is not None
            bucket.prepare(scale)
            dist.all_reduce(bucket.message, group=self._group)
        if layout.last_message is not None:
            dist.all_reduce(layout.last_message, group=self._group)
        for bucket in layout.buckets:
            bucket.settle()

    # -- Making plans --------------------------------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        self.has_changed = False
        self.is_in_order = False
        self._order, self._arrived = [], []
        if self._model.trained:  # else all is frozen, for a while
            self._plan = self._make()
            self._replace()

    def _replace(self) -> None:
        unsynced = {id(slot.parameter) for slot in self.slots if slot.is_unsynced}
        self.layout = empty_layout()
        self._let_go()
        self.layout = self._lay_out()
        for slot in self.slots:
            slot.is_unsynced = id(slot.parameter) in unsynced

    def _make(self) -> Plan:
        dtype = self._options.dtype
        specs = [each.spec if dtype is None else replace(each.spec, dtype=dtype) for each in self._model.trained]
        if self._options.num_shards is not None:
            specs = [replace(spec, is_sparse=False) for spec in specs]
        return plan_buckets(
            specs,
            self._options.limits,
            order=self._order,
            num_notes=num_notes(self._world.world_size),
            only_gradients=self._only_gradients,
            notes_apart=self._options.skips_unused,
        )

    def _lay_out(self) -> Layout:
        return lay_out(
            self._plan,
            self._model.trained,
            self._group,
            as_view=self._options.as_view,
            takes_sparse=self._options.num_shards is not None,
        )
