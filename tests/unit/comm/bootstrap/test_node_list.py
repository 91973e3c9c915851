"""Slurm's lists, as `scontrol show hostnames` expands them."""

import pytest

from lockstep.comm.bootstrap.identity import expand_node_list, expand_tasks_per_node


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu7", ["gpu7"]),
        ("login,gpu7", ["login", "gpu7"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[1-2,007,10]", ["gpu1", "gpu2", "gpu007", "gpu10"]),
        ("a[1-2],b[3],c", ["a1", "a2", "b3", "c"]),
        ("rack[1-2]n[01-02]-ib", ["rack1n01-ib", "rack1n02-ib", "rack2n01-ib", "rack2n02-ib"]),
    ],
)
def test_a_list_of_nodes_is_expanded_in_its_order(text: str, names: list[str]) -> None:
    assert expand_node_list(text) == names


@pytest.mark.parametrize("text", ["", "gpu[1-", "gpu1]", "gpu[a-b]", "gpu[[1]]", "gpu1,", "gpu[]"])
def test_what_is_no_list_of_nodes_is_shown(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of nodes"):
        expand_node_list(text)


def test_tasks_per_node_are_expanded() -> None:
    assert expand_tasks_per_node("4(x2),1") == [4, 4, 1]
    with pytest.raises(ValueError, match="is not a list of tasks"):
        expand_tasks_per_node("4x2")
