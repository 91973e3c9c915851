"""Objects of torch's wrapper become ours in place, for libraries that construct torch's class."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from lockstep.parallel.ddp import convert_wrapper


@pytest.mark.usefixtures("alone_in_a_group")
def test_an_object_of_torchs_class_becomes_ours_and_keeps_its_arguments() -> None:
    wrapper = DistributedDataParallel(nn.Linear(2, 1), find_unused_parameters=True, bucket_cap_mb=3).eval()
    seen = []
    wrapper.register_forward_hook(lambda *_: seen.append("forward"))
    assert convert_wrapper(wrapper) is wrapper
    assert type(wrapper) is ls.DistributedDataParallel
    assert wrapper.find_unused_parameters
    assert wrapper.bucket_bytes_cap == 3 << 20
    assert not wrapper.training
    assert convert_wrapper(wrapper) is wrapper
    wrapper.train()(torch.ones(1, 2)).sum().backward()
    assert wrapper.module.weight.grad.tolist() == [[1.0, 1.0]]
    assert seen == ["forward"]
    assert wrapper.reducer.num_reductions == 1


@pytest.mark.usefixtures("alone_in_a_group")
def test_what_would_be_lost_is_refused() -> None:
    wrapper = DistributedDataParallel(nn.Linear(1, 1))
    wrapper.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match=r"Convert it before register_comm_hook\."):
        convert_wrapper(wrapper)


class Mine(DistributedDataParallel):
    pass


@pytest.mark.usefixtures("alone_in_a_group")
def test_a_subclass_or_another_module_is_refused() -> None:
    with pytest.raises(TypeError, match="A Mine cannot become"):
        convert_wrapper(Mine(nn.Linear(1, 1)))
    with pytest.raises(TypeError, match="A Linear cannot become"):
        convert_wrapper(nn.Linear(1, 1))
