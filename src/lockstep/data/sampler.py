"""`DistributedSampler`: gives each rank its indices of a data set, in torch's order.

It is a subclass of torch's: accelerate and Lightning check with `isinstance` before they call `set_epoch`, and torch's
code computes the order. The subclass adds a mode without padding, and a warning when `set_epoch` was not called.
"""

import warnings
from collections.abc import Iterator, Sized
from typing import Any, Self

import torch
from torch.utils.data import Dataset

from lockstep.comm import current_world
from lockstep.errors import GroupError
from lockstep.processes.user_line import stacklevel_of_user
from lockstep.torch_private.autograd import BACKWARDS
from lockstep.torch_private.loaders import note_sampler

_Order = tuple[int, int, int]
"""What the order of an epoch is identified by: calls of `set_epoch`, epoch, seed."""


class DistributedSampler(torch.utils.data.DistributedSampler[int]):
    """Give each rank its own indices of a data set.

    Signature, attributes and order of `torch.utils.data.distributed.DistributedSampler`: a permutation seeded with
    `seed + epoch`, made a multiple of `num_replicas` long, of which rank r takes every `num_replicas`-th.

    torch makes it longer by repeating samples, which counts some of them twice: harmless in training, wrong in
    evaluation. `pad=False` is for evaluation: each index goes to exactly one rank, and ranks may differ in length by
    one. It is not for training with DistributedDataParallel, where every rank needs as many batches.

        DataLoader(test_set, batch_size=64, sampler=ls.DistributedSampler(test_set, shuffle=False, pad=False))

    A second epoch without `set_epoch` has the order of the first; each sampler warns of it once, at the end of that
    epoch, in training: not with `shuffle=False` or `pad=False`, nor for an epoch without a backward, as one that
    measures the accuracy on the training data. An epoch that is left before its end is never warned of: it may only
    have inspected a batch, as `next(iter(loader))` before `set_epoch` does. If the data set grows or shrinks, the next
    epoch uses its new length.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; None for the world of the default group.
        rank: This rank; None for the rank in the default group.
        shuffle: Permute anew for every epoch set with `set_epoch`; else the order of the data set.
        seed: The same on every rank.
        drop_last: Leave out the tail that does not divide, instead of padding.
        pad: False to neither repeat nor leave out; excludes `drop_last`.

    Raises:
        GroupError: `num_replicas` or `rank` is left to the default group, and there is none.
        ValueError: A rank outside the world, or `drop_last` together with `pad=False`.
    """

    def __init__(
        self,
        dataset: Dataset[object] | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
    ) -> None:
        if drop_last and not pad:
            raise ValueError("drop_last leaves samples out and pad=False keeps all of them: choose one. (LS408)")
        world = current_world()
        if world.group is None and (num_replicas is None or rank is None):
            # With a default of one rank, every rank would get the whole data set.
            raise GroupError(
                "DistributedSampler takes the number of ranks from the process group, and this process has none. Call "
                "ls.init_process_group() first, start the function with ls.launch, or give num_replicas and "
                "rank. (LS127)"
            )
        num_replicas = world.world_size if num_replicas is None else num_replicas
        super().__init__(dataset, num_replicas, world.rank if rank is None else rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.pad = pad
        self._length = -1
        self.num_epochs_set = 0
        """How often `set_epoch` was called: 0 in a first epoch that was not told."""
        self._finished: _Order | None = None
        self._read_ahead: tuple[_Order, int] | None = None
        """The last epoch, and the backwards before it, if all its indices were taken before a first backward."""
        self.is_order_told = False
        """Whether this rank was warned that two epochs had the same order: here or by a wrapper."""
        self._follow_dataset()

    def __class_getitem__(cls, _item: Any) -> type[Self]:
        """Return the class: torch's is generic, and `class Mine(DistributedSampler[T])` is common."""
        return cls

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation; call before each epoch, on every rank, or every epoch has the same order."""
        super().set_epoch(epoch)
        self.num_epochs_set += 1

    def __len__(self) -> int:
        self._follow_dataset()
        return super().__len__()

    def __iter__(self) -> Iterator[int]:
        note_sampler(self)
        self._follow_dataset()
        order = (self.num_epochs_set, self.epoch, self.seed)
        num_backwards = BACKWARDS.read() if self._order_matters() else 0
        if self._read_ahead is not None and num_backwards > self._read_ahead[1]:
            self._finish(self._read_ahead[0])
        self._read_ahead = None
        return self._hand_out(super().__iter__(), order, num_backwards)

    def _follow_dataset(self) -> None:
        """Set torch's attributes for the length that the data set has now."""
        length = len(self.dataset)  # type: ignore[arg-type]
        if length == self._length:
            return  # and a subclass keeps what it has set
        self._length = length
        if self.pad:
            whole, rest = divmod(length, self.num_replicas)
            self.num_samples = whole + (rest > 0 and not self.drop_last)
            self.total_size = self.num_samples * self.num_replicas
        else:
            self.num_samples = len(range(self.rank, length, self.num_replicas))
            self.total_size = length

    def _hand_out(self, indices: Iterator[int], order: _Order, num_backwards: int) -> Iterator[int]:
        yield from indices
        # Reached only when the epoch was iterated to its end.
        if not self._order_matters():
            return
        # Data-loading processes are sent indices ahead of the batches: with few batches, all of them before the first
        # backward. Then the beginning of the next epoch shows whether this one was trained on.
        if BACKWARDS.read() > num_backwards:
            self._finish(order)
        else:
            self._read_ahead = (order, num_backwards)

    def _finish(self, order: _Order) -> None:
        """Note that an epoch was trained on; warn if one before it had the same order."""
        if order == self._finished:
            self._warn_of_repeated_order()
        self._finished = order

    def _order_matters(self) -> bool:
        """Return whether this may be training: shuffled, padded, with gradients, not in a data-loading process.

        A copy in a data-loading process does not receive calls of `set_epoch`, and counts its own epochs.
        """
        return self.shuffle and self.pad and torch.is_grad_enabled() and torch.utils.data.get_worker_info() is None

    def _warn_of_repeated_order(self) -> None:
        if self.is_order_told:
            return
        self.is_order_told = True
        warnings.warn(
            "Two epochs of this DistributedSampler had the same order, because set_epoch was not called between them: "
            f"it shuffles by seed and epoch, and epoch is still {self.epoch}. Call sampler.set_epoch(epoch) before "
            "each epoch, on every rank, or use ls.ShardedLoader, whose epochs have their number. For evaluation say "
            "shuffle=False, pad=False. This warning is shown once. (LS316)",
            stacklevel=stacklevel_of_user(),
        )
