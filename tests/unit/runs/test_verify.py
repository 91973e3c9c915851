"""What `lockstep verify` says of two states."""

import torch
from torch import Tensor

from lockstep.engine.fingerprint import take_fingerprint
from lockstep.runs.verify import ShortRun, find_deviating_rank, find_difference

FIRST = {"a": torch.zeros(2), "b": torch.ones(3)}


def said(found: dict[str, Tensor]) -> str:
    return str(find_difference(FIRST, found, 4))


def test_a_difference_is_named_with_its_size() -> None:
    assert find_difference(FIRST, {name: tensor.clone() for name, tensor in FIRST.items()}, 4) is None
    assert said({**FIRST, "b": torch.tensor([1.0, 1.5, 1.0])}) == (
        "the first difference is after step 4, in b: by up to 0.5, where values are up to 1"
    )


def test_names_and_shapes_may_depend_on_the_number_of_workers() -> None:
    # A buffer that is called after the number of workers ended the command with a KeyError.
    assert "in c (and 1 more): it exists in this run only" in said({"a": FIRST["a"], "c": FIRST["b"]})
    assert "in b: it exists in the first run only" in said({"a": FIRST["a"]})
    assert "in b: it is float32 [2], and float32 [3] in the first run" in said({**FIRST, "b": torch.ones(2)})


def test_the_rank_that_is_the_first_to_differ_is_found() -> None:
    fingerprint = take_fingerprint(torch.device("cpu"), num_shards=1, seed=0)
    runs = [ShortRun(digests=tuple(each), fingerprint=fingerprint, difference=None) for each in ("abc", "abx", "axx")]
    assert find_deviating_rank(runs) == 2
    assert find_deviating_rank(runs[:1] * 3) is None
