import pytest
import torch
from torch import nn

from lockstep.reduce.partials import Gradients, Partials, take_gradients


def parameters(*gradients: float | None) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros(())) for _ in gradients]
    for parameter, gradient in zip(found, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    return found


def bits(gradients: Gradients, found: list[nn.Parameter]) -> list[str | None]:
    return [None if each not in gradients else gradients[each].item().hex() for each in found]


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


def test_an_absent_gradient_counts_as_zero() -> None:
    # Elsewhere its place in a bucket is filled with zeros, and -0.0 + 0.0 is 0.0.
    found = parameters(None, None, None)
    stack = Partials()
    stack.push({found[0]: torch.tensor(-0.0)}, 0)
    stack.push({found[1]: torch.tensor(-0.0)}, 1)
    assert bits(stack.kept[0], found) == [(0.0).hex(), (0.0).hex(), None]


def test_outputs_of_the_compilers_cuda_graphs_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    # The next run of the graph overwrites them, with the gradients of the next shard.
    monkeypatch.setattr("lockstep.reduce.partials.has_cuda_graphs_of_compiler", lambda: True)
    parameter = nn.Parameter(torch.ones(3))
    output_of_graph = parameter.grad = torch.full((3,), 2.0)
    taken = take_gradients([parameter])
    output_of_graph.fill_(9.0)
    assert taken[parameter].tolist() == [2.0] * 3
