"""Buffers of a wrapped module; ranks are threads."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.support.threaded_ranks import run_ranks
from torch import Tensor, nn

import lockstep as ls
from lockstep.comm import World
from lockstep.processes.loaded_states import warn_of_missed_states


def rows(rank: int) -> Tensor:
    return torch.full((4, 3), float(rank + 1))


def add_a_norm_after_wrapping(world: World) -> list[float]:
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    model = ls.DistributedDataParallel(net)
    model(rows(world.rank)).sum().backward()
    torch.manual_seed(0)
    net[1] = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model(rows(world.rank)).sum().backward()
    found: list[float] = net[1][1].running_mean.tolist()
    return found


def add_a_buffer_after_wrapping(world: World) -> list[float]:
    net = nn.Linear(3, 3)
    model = ls.DistributedDataParallel(net)
    net.register_buffer("scale", torch.full((2,), float(world.rank)))
    model(rows(world.rank))
    return net.scale.tolist()


@pytest.mark.parametrize("script", [add_a_norm_after_wrapping, add_a_buffer_after_wrapping])
def test_buffers_that_come_after_wrapping_are_rank_0s(script: Callable[[World], list[float]]) -> None:
    first, second = run_ranks(2, script, has_default_group=True)
    assert first == second


def wrap_with(world: World, buffer: Tensor, **options: bool) -> None:
    net = nn.Linear(3, 3)
    net.register_buffer("projection", buffer)
    ls.DistributedDataParallel(net, **options)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_local", [True, False])
def test_buffers_that_are_not_sent_and_differ_are_warned_of(size: int, is_local: bool) -> None:
    def wrap(world: World) -> None:
        wrap_with(
            world, torch.full((2 if world.rank == 0 else size,), float(world.rank)), broadcast_buffers=not is_local
        )

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if is_local or size == 2:
            run_ranks(2, wrap, has_default_group=True)
    texts = [str(each.message) for each in warned if "projection" in str(each.message)]
    assert len(texts) == 2 * is_local
    assert all("filterwarnings" in text for text in texts)


# -- Keys of checkpoints that fit a module, or not ---------------------------------------------------------------------


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return OrderedDict((prefix + key, value) for key, value in state.items())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.", "net.backbone."])
def test_a_state_with_a_prefix_that_was_not_loaded_is_warned_of_once(prefix: str) -> None:
    module = network()
    module.load_state_dict(prefixed(module.state_dict(), prefix), strict=False)
    with pytest.warns(UserWarning, match=rf"{prefix}0\.weight.*here they are such as '0\.weight'"):
        warn_of_missed_states(module)
    warn_of_missed_states(module)


def test_a_state_without_the_prefix_of_the_wrapper_is_warned_of() -> None:
    module = network()
    wrapper = Wrapper(module)
    wrapper.load_state_dict(module.state_dict(), strict=False)
    with pytest.warns(UserWarning, match=r"here they are such as 'module\.0\.weight'"):
        warn_of_missed_states(wrapper)


def test_a_whole_checkpoint_in_place_of_its_weights_is_warned_of() -> None:
    module = network()
    module.load_state_dict({"model": module.state_dict(), "epoch": 3}, strict=False)
    with pytest.warns(UserWarning, match="its keys are such as 'model'"):
        warn_of_missed_states(module)


def test_a_part_of_a_model_that_nothing_was_loaded_into_is_warned_of() -> None:
    module = nn.Sequential(network(), nn.Linear(2, 2))
    module[0].load_state_dict(prefixed(module[0].state_dict(), "module."), strict=False)
    with pytest.warns(UserWarning, match=r"LS727"):
        warn_of_missed_states(module)


def test_weights_that_were_written_by_hand_after_all_are_not_warned_of() -> None:
    module = network()
    module.load_state_dict(prefixed(module.state_dict(), "module."), strict=False)
    module[0].load_state_dict(module[0].state_dict())
    warn_of_missed_states(module)
    module.load_state_dict(prefixed(module.state_dict(), "module."), strict=False)
    module[0].weight.data.copy_(torch.ones(2, 2))  # which leaves its version
    warn_of_missed_states(module)


def test_a_state_of_which_a_few_percent_were_loaded_is_warned_of() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(16)))
    state = module.state_dict()
    missed = {name: state[name] for name in list(state)[1:]}
    module.load_state_dict(state | {"0.weight": state["0.weight"]} | prefixed(missed, "encoder."), strict=False)
    warn_of_missed_states(module)  # all was there
    module.load_state_dict({"0.weight": state["0.weight"]} | prefixed(missed, "encoder."), strict=False)
    with pytest.warns(UserWarning, match=r"1 of 16 parameters of the checkpoint .* such as 'encoder\.1\.weight'"):
        warn_of_missed_states(module)
    module.load_state_dict({"0.weight": state["0.weight"], "other": state["1.weight"]}, strict=False)  # a new head
    warn_of_missed_states(module)


def test_a_state_that_is_loaded_with_other_keys_after_all_is_not_warned_of() -> None:
    module = network()
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict(prefixed(module.state_dict(), "module."))
    module.load_state_dict(module.state_dict())
    warn_of_missed_states(module)


def test_a_model_is_gone_through_once_for_each_state_that_was_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[nn.Module] = []
    walk = nn.Module.modules

    def walk_and_note(module: nn.Module) -> Iterator[nn.Module]:
        walks.append(module)
        return walk(module)

    monkeypatch.setattr(nn.Module, "modules", walk_and_note)
    teacher, module = network(), network()
    for number in (1, 2):
        teacher.load_state_dict(prefixed(teacher.state_dict(), "module."), strict=False)
        for _ in range(3):
            warn_of_missed_states(module)
        assert walks == [module] * number
    module.load_state_dict(prefixed(module.state_dict(), "module."), strict=False)
    with pytest.warns(UserWarning, match="LS727"):
        warn_of_missed_states(module)


class Comparable(nn.Module):  # noqa: PLW1641 - so it has no hash
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Comparable)


def test_modules_that_cannot_be_noted_are_loaded_as_torch_loads_them() -> None:
    noted = network()
    noted.load_state_dict(prefixed(noted.state_dict(), "module."), strict=False)
    with torch.inference_mode():
        inferring = nn.Linear(2, 2)
    for module in (Comparable(), inferring):
        state = module.state_dict()
        assert module.load_state_dict(prefixed(state, "module."), strict=False).missing_keys
    assert not Comparable().load_state_dict({"weight": torch.zeros(2)}).missing_keys


@pytest.mark.parametrize("kept", [["0.weight"], []])
def test_a_part_of_a_state_and_a_state_of_another_model_are_not_warned_of(kept: list[str]) -> None:
    module = network()
    state = {key: value for key, value in module.state_dict().items() if key in kept}
    module.load_state_dict({**state, "head.weight": module[0].weight.detach()}, strict=False)
    warn_of_missed_states(module)
