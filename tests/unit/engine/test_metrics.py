import pytest
import torch

from lockstep.engine.evaluation import accuracy, add_means, has_classes
from lockstep.means import Mean


def test_accuracy_counts_right_predictions() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(scores, torch.tensor([1, 0, 0])) == (2.0, 3)


@pytest.mark.parametrize("shape", [(2, 5, 4, 4), (2, 4, 4, 5)])
def test_accuracy_finds_the_class_dimension(shape: tuple[int, ...]) -> None:
    target = torch.randint(0, 5, (2, 4, 4))
    one_hot = torch.nn.functional.one_hot(target, 5).float()
    scores = one_hot if shape[-1] == 5 else one_hot.permute(0, 3, 1, 2)
    assert accuracy(scores, target) == (32.0, 32)


def test_shapes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3, 2\] and targets of shape \[4\]"):
        accuracy(torch.zeros(3, 2), torch.zeros(4, dtype=torch.long))


def test_a_class_dimension_that_could_be_two_is_not_guessed() -> None:
    scores, target = torch.zeros(2, 5, 5), torch.zeros(2, 5, dtype=torch.long)
    assert not has_classes(scores, target)
    with pytest.raises(ValueError, match="or in two ways"):
        accuracy(scores, target)


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (torch.zeros(3, 2), torch.zeros(3)),
        (torch.zeros(3, 2), torch.zeros(3, dtype=torch.bool)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.long)),
        ("text", torch.zeros(3, dtype=torch.long)),
    ],
)
def test_regression_has_no_classes(output: object, target: object) -> None:
    assert not has_classes(output, target)


def test_means_add_by_weight() -> None:
    total = add_means([Mean(total=2.0, weight=1), Mean(total=4.0, weight=3)])
    assert total.value == 1.5
    assert add_means([]).value != add_means([]).value  # NaN: the mean of nothing
