"""Models and losses that keep something from one shard to the next, each in another place.

`PLACES` makes of each name a layer, behind a model, and a loss function. What a shard computes depends on what was
computed before it.
"""

import dataclasses
import functools
import itertools
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]
Place = Callable[[], tuple[nn.Module, Loss]]


def mean_loss(net: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1])


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


class Meter:
    """An object with a running mean."""

    def __init__(self) -> None:
        self.mean: Any = 0.0

    def shift(self, inputs: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean()
        return inputs - self.mean

    def hook(self, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return self.shift(output)

    def before(self, _module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (self.shift(inputs[0]),)


class Slots:
    __slots__ = ("_count", "mean")

    def __init__(self) -> None:
        self.mean = 0.0
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    @count.setter
    def count(self, value: int) -> None:
        self._count = value


@dataclasses.dataclass
class Record:
    count: int = 0
    inner: Meter = dataclasses.field(default_factory=Meter)


@dataclasses.dataclass(slots=True)
class SlottedRecord:
    count: int = 0


class Pair(NamedTuple):
    first: int
    second: Meter


GLOBAL_COUNT = 0
GLOBAL_METER = Meter()
GLOBAL_LIST: list[float] = []
LOCAL = threading.local()
CONTEXT: ContextVar[int] = ContextVar("CONTEXT", default=0)
MODULE: Any = types.ModuleType("module_of_the_user")


def hooked(register: Callable[[nn.Module], object]) -> tuple[nn.Module, Loss]:
    layer = nn.Identity()
    register(layer)
    return layer, mean_loss


def calling(function: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Loss]:
    return Calls(function), mean_loss


def attribute_of_a_hooks_object() -> tuple[nn.Module, Loss]:
    return hooked(lambda layer: layer.register_forward_hook(Meter().hook))


def attribute_of_a_pre_hooks_object() -> tuple[nn.Module, Loss]:
    return hooked(lambda layer: layer.register_forward_pre_hook(Meter().before))


def closure_of_a_hook() -> tuple[nn.Module, Loss]:
    means: list[Any] = [0.0]

    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        means[0] = 0.9 * means[0] + 0.1 * output.detach().mean()
        return output - means[0]

    return hooked(lambda layer: layer.register_forward_hook(hook))


def hook_of_a_backward() -> tuple[nn.Module, Loss]:
    meter = Meter()

    def hook(_module: nn.Module, gradients: Any, _outputs: Any) -> Any:
        meter.mean = 0.5 * meter.mean + gradients[0].abs().mean()
        return (gradients[0] * (1 + meter.mean),)

    return hooked(lambda layer: layer.register_full_backward_hook(hook))


def list_in_a_closure() -> tuple[nn.Module, Loss]:
    seen: list[Tensor] = []

    def shift(inputs: Tensor) -> Tensor:
        seen.append(inputs.detach().mean())
        return inputs - torch.stack(seen).mean()

    return calling(shift)


def list_in_a_dictionary_in_a_closure() -> tuple[nn.Module, Loss]:
    state: dict[str, Any] = {"inner": {"seen": [0.0]}}

    def shift(inputs: Tensor) -> Tensor:
        state["inner"]["seen"][0] += inputs.detach().mean()
        return inputs - state["inner"]["seen"][0]

    return calling(shift)


def variable_of_a_closure_of_the_forward() -> tuple[nn.Module, Loss]:
    count = 0

    def scale(inputs: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return inputs / count

    return calling(scale)


def slots_of_an_object() -> tuple[nn.Module, Loss]:
    slots = Slots()

    def shift(inputs: Tensor) -> Tensor:
        slots.mean = 0.9 * slots.mean + float(inputs.detach().mean())
        return inputs - slots.mean

    return calling(shift)


def property_over_slots() -> tuple[nn.Module, Loss]:
    slots = Slots()

    def scale(inputs: Tensor) -> Tensor:
        slots.count += 1
        return inputs / slots.count

    return calling(scale)


class CountsInClass(nn.Module):
    count: ClassVar[int] = 0

    def forward(self, inputs: Tensor) -> Tensor:
        type(self).count += 1
        return inputs / type(self).count


def class_attribute_of_a_module() -> tuple[nn.Module, Loss]:
    CountsInClass.count = 0
    return CountsInClass(), mean_loss


class Totals:
    total: ClassVar[Any] = 0.0
    seen: ClassVar[dict[str, Any]] = {}


def class_attribute_of_a_helper() -> tuple[nn.Module, Loss]:
    Totals.total = 0.0

    def shift(inputs: Tensor) -> Tensor:
        Totals.total = Totals.total + inputs.detach().mean()
        return inputs - Totals.total

    return calling(shift)


def dictionary_of_a_class() -> tuple[nn.Module, Loss]:
    Totals.seen.clear()

    def shift(inputs: Tensor) -> Tensor:
        Totals.seen["mean"] = Totals.seen.get("mean", 0.0) + inputs.detach().mean()
        return inputs - Totals.seen["mean"]

    return calling(shift)


class Counted(torch.autograd.Function):
    calls: ClassVar[int] = 0

    @staticmethod
    def forward(_ctx: Any, inputs: Tensor) -> Tensor:
        Counted.calls += 1
        return inputs / Counted.calls

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def class_of_an_autograd_function() -> tuple[nn.Module, Loss]:
    Counted.calls = 0
    return calling(lambda inputs: Counted.apply(inputs))  # type: ignore[no-untyped-call]  # noqa: PLW0108 - by its global name


def cache_of_a_function() -> tuple[nn.Module, Loss]:
    @functools.cache
    def shift_of(_shape: Any) -> list[Tensor]:
        return []

    def shift(inputs: Tensor) -> Tensor:
        kept = shift_of(tuple(inputs.shape[1:]))
        kept.append(inputs.detach().mean())
        return inputs - torch.stack(kept).mean()

    return calling(shift)


def cache_of_what_the_first_shard_has() -> tuple[nn.Module, Loss]:
    cache: dict[str, Tensor] = {}

    def shift(inputs: Tensor) -> Tensor:
        if "mean" not in cache:
            cache["mean"] = inputs.detach().mean()
        return inputs - cache["mean"]

    return calling(shift)


class Lazy(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = inputs.detach().std()
        return inputs / self.scale


def attribute_that_the_first_shard_makes() -> tuple[nn.Module, Loss]:
    return Lazy(), mean_loss


def lru_cache_of_the_first_shards_mean() -> tuple[nn.Module, Loss]:
    latest: list[Tensor] = [torch.zeros(())]

    @functools.lru_cache(maxsize=4)
    def first_mean() -> Tensor:
        return latest[0]

    def shift(inputs: Tensor) -> Tensor:
        latest[0] = inputs.detach().mean()
        return inputs - first_mean()

    return calling(shift)


def default_argument() -> tuple[nn.Module, Loss]:
    def shift(inputs: Tensor, seen: list[Any] = []) -> Tensor:  # noqa: B006 - the mistake
        seen.append(inputs.detach().mean())
        return inputs - sum(seen)

    return calling(shift)


def default_of_a_keyword() -> tuple[nn.Module, Loss]:
    def shift(inputs: Tensor, *, seen: dict[str, Any] = {}) -> Tensor:  # noqa: B006 - the mistake
        seen["sum"] = seen.get("sum", 0) + inputs.detach().mean()
        return inputs - seen["sum"]

    return calling(shift)


def default_of_a_loss() -> tuple[nn.Module, Loss]:
    def loss(net: nn.Module, batch: Any, seen: list[float] = []) -> Tensor:  # noqa: B006 - the mistake
        seen.append(1.0)
        return mean_loss(net, batch) * len(seen)

    return nn.Identity(), loss


def argument_of_a_partial() -> tuple[nn.Module, Loss]:
    return calling(functools.partial(lambda meter, inputs: meter.shift(inputs), Meter()))


def keyword_of_a_partial() -> tuple[nn.Module, Loss]:
    def loss(net: nn.Module, batch: Any, *, meter: Meter) -> Tensor:
        return nn.functional.mse_loss(meter.shift(net(batch[0])), batch[1])

    return nn.Identity(), functools.partial(loss, meter=Meter())


def bound_method() -> tuple[nn.Module, Loss]:
    return calling(Meter().shift)


class Below(nn.Module):
    def __init__(self, held: Any, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.held = held
        self.call = call

    def forward(self, inputs: Tensor) -> Tensor:
        return self.call(self.held, inputs)


def holding(held: Any, call: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, Loss]:
    return Below(held, call), mean_loss


def count_up(record: Any, inputs: Tensor) -> Tensor:
    record.count += 1
    return inputs / record.count


def append(seen: Any, inputs: Tensor) -> Tensor:
    seen.append(inputs.detach().mean())
    return inputs - torch.stack(list(seen)).mean()


def add_to(table: Any, inputs: Tensor) -> Tensor:
    table["sum"] = table.get("sum", 0.0) + inputs.detach().mean()
    return inputs - table["sum"]


def add_in_place(value: Any, inputs: Tensor) -> Tensor:
    value += 1.0
    return inputs / float(value.sum())


def nested_shift(record: Any, inputs: Tensor) -> Tensor:
    return record.inner.shift(inputs)


def dereference(reference: Any, inputs: Tensor) -> Tensor:
    return reference().shift(inputs)


def draw_next(numbers: Iterator[Any], inputs: Tensor) -> Tensor:
    return inputs / next(numbers)


def counting() -> Iterator[float]:
    number = 0.0
    while True:
        number += 1
        yield number


KEPT_ALIVE = Meter()


def global_number() -> tuple[nn.Module, Loss]:
    def scale(inputs: Tensor) -> Tensor:
        global GLOBAL_COUNT  # noqa: PLW0603 - the mistake
        GLOBAL_COUNT += 1
        return inputs / GLOBAL_COUNT

    return calling(scale)


def count_globally() -> int:
    global GLOBAL_COUNT  # noqa: PLW0603 - the mistake
    GLOBAL_COUNT += 1
    return GLOBAL_COUNT


def global_of_a_helper() -> tuple[nn.Module, Loss]:
    return calling(lambda inputs: inputs / count_globally())


def global_object() -> tuple[nn.Module, Loss]:
    return calling(lambda inputs: GLOBAL_METER.shift(inputs))  # noqa: PLW0108 - by its global name


def global_list() -> tuple[nn.Module, Loss]:
    GLOBAL_LIST.clear()

    def scale(inputs: Tensor) -> Tensor:
        GLOBAL_LIST.append(1.0)
        return inputs / len(GLOBAL_LIST)

    return calling(scale)


def attribute_of_a_module_of_python() -> tuple[nn.Module, Loss]:
    MODULE.count = 0

    def scale(inputs: Tensor) -> Tensor:
        MODULE.count += 1
        return inputs / MODULE.count

    return calling(scale)


def attribute_of_a_function() -> tuple[nn.Module, Loss]:
    def scale(inputs: Tensor) -> Tensor:
        scale.count += 1  # type: ignore[attr-defined]
        return inputs / scale.count  # type: ignore[attr-defined]

    scale.count = 0  # type: ignore[attr-defined]
    return calling(scale)


def attribute_of_a_thread() -> tuple[nn.Module, Loss]:
    LOCAL.count = 0
    return calling(lambda inputs: count_up(LOCAL, inputs))


def context_variable() -> tuple[nn.Module, Loss]:
    def scale(inputs: Tensor) -> Tensor:
        CONTEXT.set(CONTEXT.get() + 1)
        return inputs / CONTEXT.get()

    return calling(scale)


def decorated_forward() -> tuple[nn.Module, Loss]:
    meter = Meter()

    @torch.enable_grad()
    def shift(inputs: Tensor) -> Tensor:
        return meter.shift(inputs)

    return calling(shift)


def attribute_of_a_parameter() -> tuple[nn.Module, Loss]:
    layer = nn.PReLU(dtype=torch.float64)
    layer.weight.count = 0  # type: ignore[attr-defined]

    def loss(net: nn.Module, batch: Any) -> Tensor:
        (parameter,) = layer.parameters()
        parameter.count += 1  # type: ignore[attr-defined]
        return mean_loss(net, batch) * parameter.count  # type: ignore[attr-defined]

    return layer, loss


def object_of_a_network_of_the_loss() -> tuple[nn.Module, Loss]:
    teacher = Below(Record(), count_up)
    teacher.register_buffer("unused", torch.zeros(1))

    def loss(net: nn.Module, batch: Any) -> Tensor:
        return mean_loss(net, [batch[0], teacher(batch[1])])

    return nn.Identity(), loss


def two_of_one_name() -> tuple[nn.Module, Loss]:
    """Both functions have a variable `count`, and only the second writes it."""

    def make(by: int) -> Callable[[Tensor], Tensor]:
        count = 0

        def scale(inputs: Tensor) -> Tensor:
            nonlocal count
            count += by
            return inputs / (1 + count)

        return scale

    layer = nn.Sequential(Calls(make(0)), Calls(make(1)))
    return layer, mean_loss


PLACES: dict[str, Place] = {
    each.__name__: each
    for each in (
        attribute_of_a_hooks_object,
        attribute_of_a_pre_hooks_object,
        closure_of_a_hook,
        hook_of_a_backward,
        list_in_a_closure,
        list_in_a_dictionary_in_a_closure,
        variable_of_a_closure_of_the_forward,
        slots_of_an_object,
        property_over_slots,
        class_attribute_of_a_module,
        class_attribute_of_a_helper,
        dictionary_of_a_class,
        class_of_an_autograd_function,
        cache_of_a_function,
        cache_of_what_the_first_shard_has,
        attribute_that_the_first_shard_makes,
        lru_cache_of_the_first_shards_mean,
        default_argument,
        default_of_a_keyword,
        default_of_a_loss,
        argument_of_a_partial,
        keyword_of_a_partial,
        bound_method,
        global_number,
        global_of_a_helper,
        global_object,
        global_list,
        attribute_of_a_module_of_python,
        attribute_of_a_function,
        attribute_of_a_thread,
        context_variable,
        decorated_forward,
        attribute_of_a_parameter,
        object_of_a_network_of_the_loss,
        two_of_one_name,
    )
}
PLACES |= {
    "object below a module": lambda: holding(Meter(), Meter.shift),
    "data class": lambda: holding(Record(), count_up),
    "object of a data class": lambda: holding(Record(), nested_shift),
    "data class with slots": lambda: holding(SlottedRecord(), count_up),
    "object in a list": lambda: holding([Meter()], lambda held, inputs: held[0].shift(inputs)),
    "object in a named tuple": lambda: holding(Pair(1, Meter()), lambda held, inputs: held.second.shift(inputs)),
    "list in a tuple": lambda: holding(([],), lambda held, inputs: append(held[0], inputs)),
    "tensor in a list": lambda: holding([torch.zeros(2)], lambda held, inputs: add_in_place(held[0], inputs)),
    "tensor in a tuple": lambda: holding((torch.zeros(2),), lambda held, inputs: add_in_place(held[0], inputs)),
    "tensor in a dictionary of dictionaries": lambda: holding(
        {"a": {"b": torch.zeros(2)}}, lambda held, inputs: add_in_place(held["a"]["b"], inputs)
    ),
    "array in a dictionary": lambda: holding({"a": np.zeros(2)}, lambda held, inputs: add_in_place(held["a"], inputs)),
    "deque": lambda: holding(deque(maxlen=3), append),
    "default dictionary": lambda: holding(defaultdict(list), lambda held, inputs: append(held["seen"], inputs)),
    "ordered dictionary": lambda: holding(OrderedDict(), add_to),
    "simple namespace": lambda: holding(types.SimpleNamespace(count=0), count_up),
    "weak reference": lambda: holding(weakref.ref(KEPT_ALIVE), dereference),
    "weak dictionary": lambda: holding(
        weakref.WeakValueDictionary({"meter": KEPT_ALIVE}), lambda held, inputs: held["meter"].shift(inputs)
    ),
    "count": lambda: holding(itertools.count(1), draw_next),
    "generator": lambda: holding(counting(), draw_next),
    "iterator of a list": lambda: holding(iter([1.0 + number for number in range(100)]), draw_next),
    "cycle": lambda: holding(itertools.cycle([1.0, 2.0, 3.0]), draw_next),
    "map": lambda: holding(map(float, iter(range(1, 100))), draw_next),
}
