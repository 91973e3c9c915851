"""What `DataParallel` does with nested inputs and outputs, and what it refuses because torch would lose samples."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.parallel.replicas.replicated import CPU, parallel
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from lockstep.parallel.replicas.data_parallel import DataParallel
from lockstep.parallel.replicas.scatter import _move_and_concatenate, join_outputs, scatter_arguments


class Pair(NamedTuple):
    left: Any
    right: Any


@given(num_samples=st.integers(0, 20), num_replicas=st.integers(2, 5), dim=st.sampled_from([0, 1, -1]))
def test_parts_are_those_of_torch_chunk(num_samples: int, num_replicas: int, dim: int) -> None:
    x = torch.randn(3, 3).new_empty([num_samples if n == dim % 2 else 3 for n in range(2)]).normal_()
    parts = parallel(lambda part: part, num_replicas, dim=dim, gather_output=False)(x)
    assert [part.tolist() for part in parts] == [part.tolist() for part in x.chunk(num_replicas, dim)]
    assert torch.equal(parallel(lambda part: part, num_replicas, dim=dim)(x), x)


def test_nested_inputs_keep_their_kinds() -> None:
    x = torch.arange(4.0)
    marker = object()
    value = {
        "tuple": (x, [x, "text", None]),
        "pair": Pair(x, 3),
        "ordered": OrderedDict(a=x),
        "default": defaultdict(list, b=x),
        "user": UserDict(c=x),
        "empty": [(), [], {}],
        "marker": marker,
    }
    parts, named = scatter_arguments((value,), {"named": [x]}, [CPU, CPU], 0)
    assert [part["named"][0].tolist() for part in named] == [[0, 1], [2, 3]]
    second = parts[1][0]
    assert second["tuple"][0].tolist() == second["tuple"][1][0].tolist() == [2, 3]
    assert second["tuple"][1][1:] == ["text", None]
    assert isinstance(second["pair"], Pair)
    assert (second["pair"].left.tolist(), second["pair"].right) == ([2, 3], 3)
    assert {key: type(second[key]) for key in ("ordered", "default", "user")} == {
        "ordered": OrderedDict,
        "default": defaultdict,
        "user": UserDict,
    }
    assert second["default"].default_factory is list
    assert second["user"]["c"].tolist() == [2, 3]
    assert second["empty"] == [(), [], {}]
    assert second["marker"] is marker
    assert value["user"]["c"] is x


class Batch(MutableMapping[str, Any]):
    """A mapping of a kind of its own, which makes its values when it is asked for them."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values_by_name = values

    def __getitem__(self, name: str) -> Any:
        return self.values_by_name[name] * 1

    def __setitem__(self, name: str, value: Any) -> None:
        self.values_by_name[name] = value

    def __delitem__(self, name: str) -> None:
        del self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)


class Indexed(Batch):
    """One that cannot be made from a dict alone."""

    def __init__(self, values: dict[str, Any], index: int) -> None:
        super().__init__(values)
        self.index = index


def test_mappings_of_other_kinds_are_cut_and_joined() -> None:
    # Their copies had one dict in common: a replica's part was written into the user's batch, and into the others'.
    x = torch.arange(4.0)
    batch = Batch({"x": x, "y": x + 10})
    joined = parallel(lambda batch: Batch({"sum": batch["x"] + batch["y"]}))(batch)
    assert joined["sum"].tolist() == [10, 12, 14, 16]
    assert isinstance(joined, Batch)
    assert batch.values_by_name["x"] is x


def test_a_mapping_that_cannot_be_made_anew_goes_to_each_replica_as_it_is() -> None:
    batch = Indexed({"x": torch.arange(4.0)}, index=3)
    seen: list[Any] = []
    parallel(lambda _x, batch: seen.append(batch))(torch.zeros(2), batch)
    assert all(each is batch for each in seen)
    assert len(seen) == 2
    with pytest.raises(TypeError, match=r"returned Indexed at output, which cannot be joined"):
        parallel(lambda x: Indexed({"x": x}, 0))(torch.zeros(2))


def test_a_user_dict_keeps_what_else_it_holds() -> None:
    class Encoded(UserDict[str, Any]):
        language = ""

    batch = Encoded(x=torch.arange(4.0))
    batch.language = "Dutch"
    parts, _ = scatter_arguments((batch,), {}, [CPU, CPU], 0)
    assert [(part[0]["x"].tolist(), part[0].language) for part in parts] == [([0, 1], "Dutch"), ([2, 3], "Dutch")]
    assert len(batch["x"]) == 4


def test_a_tensor_that_comes_twice_is_one_tensor_in_a_replica() -> None:
    x = torch.arange(4.0)
    parts, named = scatter_arguments((x, [x]), {"x": x}, [CPU, CPU], 0)
    assert all(part[0] is part[1][0] is same["x"] for part, same in zip(parts, named, strict=True))


def test_replicas_may_write_into_their_inputs() -> None:
    # Parts of one tensor count their versions together, so the last replica's write spoilt the first one's backward;
    # and a part of a tensor with a gradient may not be written into at all.
    layer = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))
    x = torch.randn(6, 3, requires_grad=True)
    [expected] = torch.autograd.grad(layer(x * 2).square().sum(), x)
    for devices in (["cpu"], ["cpu", "cpu"]):
        [found] = torch.autograd.grad(DataParallel(layer, devices)(x * 2).square().sum(), x)
        torch.testing.assert_close(found, expected)
        DataParallel(layer, devices)(x.detach().clone()).square().sum().backward()


def test_for_one_device_nothing_is_cut() -> None:
    x = torch.randn(3)
    assert parallel(lambda x, _scalar: x, 1)(x, torch.tensor(2.0)) is x


def test_nested_outputs_keep_their_kinds() -> None:
    def outputs(x: Tensor) -> list[Any]:
        return [x, (x.sin(), [x + 1]), Pair(x, None), OrderedDict(a=x), defaultdict(list, b=x), None]

    x = torch.randn(5, 2)
    joined = parallel(outputs, 3)(x)
    torch.testing.assert_close(joined, outputs(x))
    assert [type(value) for value in joined] == [type(value) for value in outputs(x)]


def test_kwargs_only_and_no_inputs_at_all() -> None:
    x = torch.randn(4)
    assert torch.equal(parallel(lambda data, unused: data)(data=x, unused={}), x)
    assert parallel(lambda: torch.ones(2))().tolist() == [1, 1]


def test_inputs_without_a_tensor_go_to_one_replica() -> None:
    assert parallel(lambda number, texts: torch.full((number,), len(texts)))(3, texts=["a"]).tolist() == [1, 1, 1]


def test_scalars_become_a_vector() -> None:
    for num_samples, expected in ((4, [1.0, 5.0]), (1, [0.0])):
        x = torch.arange(float(num_samples), requires_grad=True)
        losses = parallel(lambda part: part.sum())(x)
        assert losses.tolist() == expected
        losses.sum().backward()
        assert x.grad.tolist() == [1] * num_samples


def test_joining_across_devices_is_differentiable_twice() -> None:
    parts = [torch.randn(n, 2, requires_grad=True, dtype=torch.float64) for n in (2, 0, 3)]

    def join(*parts: Tensor) -> Tensor:
        return _move_and_concatenate(CPU, 0, *parts) ** 2

    assert torch.equal(join(*parts), torch.cat(parts) ** 2)
    assert torch.autograd.gradcheck(join, parts)
    assert torch.autograd.gradgradcheck(join, parts)


def test_output_device() -> None:
    module = parallel(lambda x: x)
    module.output_device = torch.device("meta")  # the one other device that every machine has
    with pytest.raises(RuntimeError, match="meta"):
        module(torch.ones(4))
    assert join_outputs([torch.ones(1), torch.ones(2)], torch.device("meta"), 0).shape == (3,)


@pytest.mark.parametrize("num_rows", [8, 16, 0])
def test_a_tensor_with_several_rows_for_each_sample_is_split_beside_the_samples(num_rows: int) -> None:
    parts = parallel(lambda x, rows: (x, rows), 3, gather_output=False)(torch.arange(8), torch.zeros(num_rows))
    assert [len(rows) * 8 for _, rows in parts] == [len(x) * num_rows for x, _ in parts]


def pair(x: Tensor, y: Tensor) -> Tensor:
    return x.mean() * y


@pytest.mark.parametrize(
    ("module", "inputs", "error", "words"),
    [
        (parallel(pair, 4), (torch.zeros(8), torch.zeros(3)), ValueError, "sizes 8 and 3 .*samples would be lost"),
        (parallel(pair, 4), (torch.zeros(8), torch.zeros(1)), ValueError, "sizes 8 and 1"),
        # 9 samples on two replicas are 5 and 4, and 8 are 4 and 4: replica 1 paired samples 5 to 8 with 4 to 7.
        (parallel(pair), (torch.zeros(9), torch.zeros(8)), ValueError, "split into parts of 5, 4 and 4, 4 for 2"),
        (parallel(pair, 3), (torch.zeros(9), torch.zeros(8)), ValueError, "parts of 3, 3, 3 and 3, 3, 2"),
        (parallel(abs), (torch.tensor(1.0),), ValueError, r"shape \(\) among the inputs has no dim 0"),
        (parallel(abs, dim=1), (torch.zeros(3),), ValueError, r"shape \(3,\) among the inputs has no dim 1"),
        (
            parallel(abs),
            (pack_sequence([torch.zeros(2), torch.zeros(1)]),),
            TypeError,
            "PackedSequence cannot be split",
        ),
        (parallel(torch.sum, dim=1), (torch.zeros(2, 2),), RuntimeError, r"shape \(\) at output, without a dim 1"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    module: DataParallel, inputs: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        module(*inputs)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda x: 1.5, TypeError, "returned float at output.*gather_output=False"),
        (lambda x: {"a": [None if x[0] else x]}, TypeError, r"Tensor and NoneType at output\['a'\]\[0\]"),
        (lambda x: {str(x[0].item()): x}, ValueError, "All dicts must have the same number of keys"),
        (lambda x: [x] * (1 + int(x[0])), ValueError, r"returned \[1, 2\] values at output"),
        (lambda x: torch.zeros(1, 1 + int(x[0])), RuntimeError, r"shapes \[\(1, 1\), \(1, 2\)\].*Pad them"),
        (lambda x: torch.zeros([1] * (1 + int(x[0]))), RuntimeError, r"shapes \[\(1,\), \(1, 1\)\]"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(function: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        parallel(function)(torch.tensor([0, 1]))
