"""What we rely on of what modules and optimizers keep inside; each assertion says what breaks without it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import parallel
from torch.nn.utils import parametrizations
from torch.optim import Optimizer

from lockstep.parallel.comparison.optimizers import listen_to_steps
from lockstep.torch_private.modules import (
    AnyBatchNorm,
    buffer_registry,
    check_comm_hook,
    find_tensors,
    forget_scaling,
    former_parameters_of,
    forward_pre_hooks,
    has_forward_or_backward_hooks,
    has_step_on_device,
    has_torchs_comm_hook,
    ignored_names,
    make_replica_shell,
    module_registry,
    non_persistent_buffer_names,
    optimizer_step_pre_hooks,
    parameter_registry,
    remember_tensors,
    separate_registries,
    set_precision_attributes,
    set_state_dict_versions,
    step_unless,
    stop_torchs_reducer,
    warn_of_unequal_devices,
)

CHANGES = "the reducer: a model that was changed after wrapping would go unseen"
REPLICAS = "DataParallel: a replica would share tensors or children with the module"
STATISTICS = "the trainer: shards would start from each other's BatchNorm statistics"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_parameter("absent", None)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + 1
        return self.layer(x)


def change_nothing(_net: nn.Linear) -> None:
    pass


def assign(net: nn.Linear) -> None:
    net.weight = nn.Parameter(torch.zeros(2, 2))


def cast(net: nn.Linear) -> None:
    net.to(torch.float64)


def load_by_assigning(net: nn.Linear) -> None:
    net.load_state_dict({name: torch.zeros_like(value) for name, value in net.state_dict().items()}, assign=True)


def parametrize(net: nn.Linear) -> None:
    parametrizations.weight_norm(net)


def use_again(net: nn.Linear) -> None:
    net.twin = net.weight


@pytest.mark.parametrize("change", [assign, load_by_assigning, parametrize, use_again])
def test_changes_show_in_the_registry_that_was_taken_before(change: Callable[[nn.Linear], None]) -> None:
    net = nn.Linear(2, 2)
    registry = parameter_registry(net)
    before = list(registry.values())
    change(net)
    assert parameter_registry(net) is registry, CHANGES
    assert list(map(id, registry.values())) != list(map(id, before)), CHANGES


@pytest.mark.parametrize("change", [change_nothing, cast])
def test_what_keeps_parameters_keeps_the_registry(change: Callable[[nn.Linear], None]) -> None:
    net = nn.Linear(2, 2)
    registry, before = parameter_registry(net), [net.weight, net.bias]
    change(net)
    assert [id(each) for each in parameter_registry(net).values()] == list(map(id, before)), "plans are made anew"
    assert parameter_registry(net) is registry


def test_registries_show_what_names_hide() -> None:
    net = Net()
    net.twin = net.layer
    assert parameter_registry(net) == {"absent": None}, REPLICAS
    assert list(buffer_registry(net)) == ["mean", "count"]
    assert module_registry(net) == {"layer": net.layer, "twin": net.layer}, "convert_sync_batchnorm: a name is lost"


def test_a_new_module_shows_in_the_registry_that_was_taken_before() -> None:
    net = Net()
    registry = module_registry(net)
    net.more = nn.Linear(2, 2)
    del net.layer
    assert registry == {"more": net.more}, CHANGES


def test_a_buffer_that_a_forward_assigns_takes_the_place_of_the_old_one() -> None:
    net = Net()
    registry, old = buffer_registry(net), net.mean
    net(torch.ones(1, 2))
    assert registry["mean"] is net.mean, STATISTICS
    assert net.mean is not old
    registry["mean"] = old
    assert net.mean is old, STATISTICS


def test_buffers_outside_the_state_are_named() -> None:
    net = Net()
    assert set(non_persistent_buffer_names(net)) == {"count"}, "checkpoints: no warning of what they leave out"
    assert "count" not in net.state_dict()
    assert "mean" in net.state_dict()


def test_forward_pre_hooks_are_listed_until_they_are_removed() -> None:
    net = nn.Linear(2, 2)

    def hook(_module: nn.Module, _inputs: Any, _kwargs: Any) -> None:
        pass

    handle = net.register_forward_pre_hook(hook, with_kwargs=True)
    assert list(forward_pre_hooks(net).values()) == [hook], "DDP: hooks of a wrapper that is gone would go on"
    handle.remove()
    assert not forward_pre_hooks(net)


@pytest.mark.parametrize(
    "register",
    [
        nn.Module.register_forward_hook,
        nn.Module.register_forward_pre_hook,
        nn.Module.register_full_backward_hook,
        nn.Module.register_full_backward_pre_hook,
    ],
)
def test_hooks_that_a_call_runs_are_seen(register: Any) -> None:
    net = nn.Linear(2, 2)
    assert not has_forward_or_backward_hooks(net)
    handle = register(net, lambda *_: None)
    assert has_forward_or_backward_hooks(net), "DataParallel: hooks on a compiled module would be lost without a word"
    handle.remove()
    assert not has_forward_or_backward_hooks(net)


def test_hooks_on_a_state_do_not_count() -> None:
    net = nn.Linear(2, 2)
    net.register_state_dict_post_hook(lambda *_: None)
    assert not has_forward_or_backward_hooks(net), "DataParallel: such a module would be refused"


def test_a_copy_with_registries_of_its_own_leaves_the_module_alone() -> None:
    net = Net()
    twin = Net.__new__(Net)
    state = dict(net.__dict__)
    separate_registries(state)
    twin.__dict__.update(state)
    twin.add_module("layer", nn.Identity())
    twin.mean = torch.ones(2)
    twin.register_parameter("absent", nn.Parameter(torch.ones(1)))
    assert isinstance(net.layer, nn.Linear), "convert_sync_batchnorm would change the layer that it replaces"
    assert net.mean.tolist() == [0.0, 0.0]
    assert net.absent is None


@pytest.mark.parametrize("make", [Net, lambda: nn.LSTM(2, 2), lambda: nn.BatchNorm1d(2), lambda: nn.Linear(2, 2)])
def test_a_shell_has_registries_of_its_own(make: Callable[[], nn.Module]) -> None:
    module = make()
    parameters, buffers = dict(parameter_registry(module)), dict(buffer_registry(module))
    children = dict(module_registry(module))
    shell = make_replica_shell(module)
    assert type(shell) is type(module), "DataParallel: a replica of another class"
    assert former_parameters_of(shell) == {}
    for name, parameter in parameters.items():
        assert parameter_registry(shell).get(name) is None, "a parameter of the module would be a replica's too"
        parameter_registry(shell)[name] = None
        if parameter is not None:
            object.__setattr__(shell, name, parameter + 1)
            assert getattr(shell, name) is not parameter, "DataParallel: a replica would use the module's parameter"
    for name in buffers:
        buffer_registry(shell)[name] = torch.ones(1)
    for name in children:
        module_registry(shell)[name] = nn.Identity()
    vars(shell)["anything"] = 1
    assert list(map(id, parameter_registry(module).values())) == list(map(id, parameters.values())), REPLICAS
    assert list(map(id, buffer_registry(module).values())) == list(map(id, buffers.values())), REPLICAS
    assert module_registry(module) == children, REPLICAS
    assert not hasattr(module, "anything"), REPLICAS


def test_parameters_have_the_names_of_either_precision() -> None:
    parameter = nn.Parameter(torch.ones(3))
    set_precision_attributes(parameter, torch.bfloat16)
    named: Any = parameter
    assert named._fp_param.data_ptr() == parameter.data_ptr()
    assert named._mp_param.dtype is torch.bfloat16
    assert named._mp_param.numel() == 0


@pytest.mark.parametrize(("version", "missing"), [(1, []), (2, ["num_batches_tracked"])])
def test_a_module_converts_what_an_earlier_version_wrote(version: int, missing: list[str]) -> None:
    layer = nn.BatchNorm1d(2)
    state = nn.BatchNorm1d(2).state_dict()
    del state["num_batches_tracked"]
    set_state_dict_versions(state, {"": {"version": version}})
    found = layer.load_state_dict(state, strict=False)
    assert found.missing_keys == missing, "load_weights: files that an older torch wrote would be refused"


def test_names_that_torch_was_told_to_ignore_are_read() -> None:
    net = nn.Linear(2, 2)
    assert ignored_names(net) == ()
    parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["bias"])
    assert ignored_names(net) == ("bias",), "DDP: parameters that another system trains would be averaged"


def good_hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    raise NotImplementedError


def hook_with_another_name(_state: object, _mine: dist.GradBucket) -> torch.futures.Future[Tensor]:
    raise NotImplementedError


def hook_of_another_type(_state: object, bucket: int) -> torch.futures.Future[Tensor]:
    raise NotImplementedError


def hook_with_another_result(_state: object, bucket: dist.GradBucket) -> int:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        (good_hook, None),
        (hook_with_another_name, KeyError),
        (hook_of_another_type, ValueError),
        (hook_with_another_result, ValueError),
    ],
)
def test_the_signature_of_a_hook_is_checked(hook: Callable[..., Any], error: type[Exception] | None) -> None:
    wrapper = parallel.DistributedDataParallel.__new__(parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.logger = None  # all that a wrapper needs for it
    if error is None:
        check_comm_hook(wrapper, hook)
    else:
        with pytest.raises(error):
            check_comm_hook(wrapper, hook)


@pytest.mark.usefixtures("alone_in_a_group")
def test_a_stopped_reducer_of_torchs_wrapper_reduces_no_more() -> None:
    # For: converting objects of torch's wrapper, where a library constructs its class.
    calls = []

    def hook(_state, bucket):
        calls.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapper = parallel.DistributedDataParallel(nn.Linear(2, 1))
    assert not has_torchs_comm_hook(wrapper)
    wrapper.register_comm_hook(None, hook)
    assert has_torchs_comm_hook(wrapper), "a hook would be lost when a wrapper is converted"
    stop_torchs_reducer(wrapper)
    wrapper.module(torch.ones(1, 2)).sum().backward()
    assert calls == []


@dataclass
class Output:
    scores: Tensor
    hidden: tuple[Tensor, ...]
    name: str = "x"


def test_tensors_are_found_in_every_output_that_torch_knows() -> None:
    one, two, three, four = (torch.zeros(1) for _ in range(4))
    found = find_tensors({"a": Output(one, (two,)), "b": [three, 1, None], "c": {"d": four}})
    assert list(map(id, found)) == list(map(id, [one, two, three, four])), "DDP: a backward would not be seen to begin"


def test_step_pre_hooks_are_listed_and_called() -> None:
    called: list[str] = []

    def hook(*_arguments: Any) -> None:
        called.append("hook")

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    handle = optimizer.register_step_pre_hook(hook)
    assert hook in optimizer_step_pre_hooks(optimizer).values(), "Trainer: a second one would guard a second time"
    optimizer.step()
    assert called == ["hook"]
    handle.remove()
    assert hook not in optimizer_step_pre_hooks(optimizer).values()


FUSED: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.1, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.1, weight_decay=0.1, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_step_of_a_fused_optimizer_is_left_out_by_a_truth_value(name: str) -> None:
    parameter = nn.Parameter(torch.arange(4.0))
    optimizer = FUSED[name]([parameter])
    if name == "Adagrad" and not hasattr(optimizer, "_step_supports_amp_scaling"):
        pytest.skip("torch 2.11's Adagrad does not offer this: its steps wait for the device")
    assert has_step_on_device(optimizer), "Trainer: every step would wait for the device"
    parameter.grad = torch.ones(4)
    step_unless(optimizer, torch.tensor(False))
    assert parameter[0] != 0.0
    before = copy.deepcopy((optimizer.state_dict(), parameter.data))
    parameter.grad = torch.full((4,), float("nan"))
    step_unless(optimizer, torch.tensor(True))
    after = optimizer.state_dict(), parameter.data
    assert str(after) == str(before), "Trainer: a step that is not finite would change the parameters"
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert not torch.equal(parameter.data, before[1]), "Trainer: later steps of the user's would be left out too"


class Onlooker:
    def before_step(self, optimizer: Optimizer) -> None:
        pass

    def after_step(self, optimizer: Optimizer) -> None:
        pass


def test_an_optimizer_that_does_more_than_torchs_is_not_left_out_on_a_device() -> None:
    class Derived(torch.optim.SGD):
        pass

    parameters = [nn.Parameter(torch.ones(1))]
    assert not has_step_on_device(Derived(parameters, 0.1, fused=True))
    assert not has_step_on_device(torch.optim.SGD(parameters, 0.1))
    optimizer = torch.optim.SGD(parameters, 0.1, fused=True)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    assert not has_step_on_device(optimizer)
    handle.remove()
    assert has_step_on_device(optimizer)
    end = listen_to_steps(Onlooker())  # a wrapper that is gone leaves such hooks until the next one is made
    assert has_step_on_device(optimizer)
    end()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "fused": False})
    assert not has_step_on_device(optimizer)


def test_every_batch_norm_is_one() -> None:
    kinds = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d]
    assert all(issubclass(kind, AnyBatchNorm) for kind in kinds), "convert_sync_batchnorm: a layer stays local"
    assert not issubclass(nn.InstanceNorm1d, AnyBatchNorm), "its statistics are one sample's"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks GPUs for their memory")
@pytest.mark.filterwarnings("error")
def test_a_gpu_is_as_large_as_itself() -> None:
    warn_of_unequal_devices([0, 0])


def test_a_scaler_that_forgets_an_optimizer_can_unscale_its_gradients_again() -> None:
    # Breaks: taking a step again whose optimizer has raised, with a GradScaler.
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        assert str(weight.grad) == "tensor([1.])"
        forget_scaling(scaler, optimizer)


def test_tensors_are_remembered_without_what_training_changes() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 3)) for _ in range(2)]
    are_as_before = remember_tensors(parameters)
    with torch.no_grad():
        parameters[0].add_(1)
        assert are_as_before(*parameters), CHANGES
        parameters[1].requires_grad_(False)
        assert not are_as_before(*parameters), CHANGES
    parameters[1].requires_grad_(True)
    parameters[1].data = torch.ones(2, 3)
    assert are_as_before(*parameters), CHANGES
    for other in (torch.zeros(3, 2), torch.zeros(6), torch.zeros(2, 3, dtype=torch.float64)):
        parameters[1].data = other
        assert not are_as_before(*parameters), CHANGES
