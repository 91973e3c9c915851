"""Keys of checkpoints that fit a module, or have the prefix of a wrapper or lack it."""

import copy
import pickle
import warnings
from collections import OrderedDict

import pytest
from torch import Tensor, nn

from lockstep.parallel.buffers import LoadedKeys


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def listened() -> tuple[nn.Module, LoadedKeys]:
    module, keys = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), LoadedKeys()
    module.register_load_state_dict_post_hook(keys)
    return module, keys


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return OrderedDict((prefix + key, value) for key, value in state.items())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_state_with_a_prefix_that_was_not_loaded_is_warned_of_once(prefix: str) -> None:
    module, keys = listened()
    module.load_state_dict(prefixed(module.state_dict(), prefix), strict=False)
    with pytest.warns(UserWarning, match=rf"{prefix}0\.bias.*here they are such as '0\.bias'"):
        keys.warn()
    keys.warn()


def test_a_state_without_the_prefix_of_the_wrapper_is_warned_of() -> None:
    module, keys = listened()
    Wrapper(module).load_state_dict(module.state_dict(), strict=False)
    with pytest.warns(UserWarning, match=r"here they are such as 'module\.0\.bias'"):
        keys.warn()


def test_a_state_that_is_loaded_with_other_keys_after_all_is_not_warned_of() -> None:
    module, keys = listened()
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict(prefixed(module.state_dict(), "module."))
    module.load_state_dict(module.state_dict())
    keys.warn()


@pytest.mark.parametrize("kept", [["0.weight"], []])
def test_a_part_of_a_state_and_a_state_of_another_model_are_not_warned_of(kept: list[str]) -> None:
    module, keys = listened()
    state = {key: value for key, value in module.state_dict().items() if key in kept}
    module.load_state_dict({**state, "head.weight": module[0].weight.detach()}, strict=False)
    keys.warn()


def test_a_copy_of_the_module_sees_nothing() -> None:
    module, keys = listened()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other.load_state_dict(prefixed(other.state_dict(), "module."), strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keys.warn()
