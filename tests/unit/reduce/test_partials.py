import pytest
import torch
from torch import Tensor, nn

from lockstep.reduce.partials import Gradients, Partials, take_gradients


def parameters(*gradients: float | None) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros(())) for _ in gradients]
    for parameter, gradient in zip(found, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    return found


def bits(gradients: Gradients, found: list[nn.Parameter]) -> list[str | None]:
    return [None if each not in gradients else gradients[each].item().hex() for each in found]


def test_gradients_are_taken_away() -> None:
    found = parameters(1.0, None)
    assert bits(take_gradients(found), found) == [(1.0).hex(), None]
    assert [parameter.grad for parameter in found] == [None, None]


def test_a_sparse_gradient_becomes_dense() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    (gradient,) = take_gradients(embedding.parameters()).values()
    assert gradient.tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]


def test_gradients_that_share_memory_are_taken_apart() -> None:
    # What is added to one of them in place would be added to the other as well.
    position, kind = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    (position[None] + kind[None]).square().sum().backward()
    assert position.grad is not None
    assert kind.grad is not None
    assert position.grad.data_ptr() == kind.grad.data_ptr()
    taken = take_gradients([position, kind])
    taken[position].add_(1)
    assert (taken[kind] == 4).all()


def test_partials_are_added_as_the_turns_say() -> None:
    found = parameters(None)

    def shard(value: float) -> Gradients:
        return {found[0]: torch.tensor(value)}

    # (1e8 + 1) + -1e8 is not 1e8 + (1 + -1e8) in float32.
    stack = Partials()
    for value, num_sums in ((1e8, 0), (1.0, 1), (-1e8, 1)):
        stack.push(shard(value), num_sums)
    assert bits(stack.kept[0], found) == [(0.0).hex()]
    stack = Partials()
    for value, num_sums in ((1.0, 0), (1e8, 0), (-1e8, 2)):
        stack.push(shard(value), num_sums)
    assert bits(stack.kept[0], found) == [(1.0).hex()]


def test_an_absent_gradient_counts_as_zero() -> None:
    # Elsewhere its place in a bucket is filled with zeros, and -0.0 + 0.0 is 0.0.
    found = parameters(None, None, None)
    stack = Partials()
    stack.push({found[0]: torch.tensor(-0.0)}, 0)
    stack.push({found[1]: torch.tensor(-0.0)}, 1)
    assert bits(stack.kept[0], found) == [(0.0).hex(), (0.0).hex(), None]


def test_what_gradients_are_to_be_added_to_is_set_apart_the_top_first() -> None:
    found = parameters(None)
    stack = Partials()
    for value in (1.0, 2.0, 3.0):
        stack.push({found[0]: torch.tensor(value)}, 0)
    stack.set_aside(2)

    def values(partials: list[Gradients]) -> list[Tensor]:
        return [float(each[found[0]]) for each in partials]  # type: ignore[misc]

    assert values(stack.kept) == [1.0]
    assert values([merge.gradients for merge in stack.merged]) == [3.0, 2.0]
    assert stack.has(found[0])
    stack.clear()
    assert not stack.has(found[0])


def test_outputs_of_the_compilers_cuda_graphs_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    # The next run of the graph overwrites them, with the gradients of the next shard.
    monkeypatch.setattr("lockstep.reduce.partials.has_cuda_graphs_of_compiler", lambda: True)
    parameter = nn.Parameter(torch.ones(3))
    output_of_graph = parameter.grad = torch.full((3,), 2.0)
    taken = take_gradients([parameter])
    output_of_graph.fill_(9.0)
    assert taken[parameter].tolist() == [2.0] * 3
