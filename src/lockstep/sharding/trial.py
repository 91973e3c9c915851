"""Which optimizers may be sharded, and how: each is tried on small parameters, and all bits are compared.

[Note: a trial] Whether an optimizer treats each element alike is not known from its class: a clipped update, a factored
moment or a trust ratio has the norm of a parameter in it. So two small parameters are updated three times, with
gradients of several magnitudes: together and whole; then one of them alone, in two pieces; and alone, whole. Where the
pieces have the bits of the whole, the optimizer is cut. Else, where one parameter has the same bits without the other,
parameters are placed whole. Else none of it can be left out on a worker, and the optimizer is refused. Random numbers
that it draws are others when it draws for other parameters, so that one of these is refused too.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_CUT: Final = 1024
_SHAPES: Final = {1: (3072,), 2: (64, 48), 3: (16, 12, 16), 4: (16, 8, 4, 6), 5: (8, 8, 4, 4, 3)}
_SCALES: Final = (1e-3, 1.0, 1e3)
_EXACT_BYTES: Final = 4


def can_be_cut(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may have pieces of parameters; if not, it may have some of the parameters.

    Raises:
        ValueError: It must have all parameters in each update.
    """
    kind = type(optimizer).__name__
    problem = _find_problem(optimizer)
    if problem:
        raise ValueError(f"shard_optimizer cannot share a {kind}: {problem} (LS535)")
    is_cut = True
    for number, group in enumerate(optimizer.param_groups):
        for sample in _samples_of(group["params"]):
            together, error = _try(optimizer, number, sample, "together")
            if error is not None:
                raise ValueError(
                    f"shard_optimizer cannot share a {kind}, whose step has failed on parameters of its own: "
                    f"{type(error).__name__}: {error}. Its step must take any parameters, and no closure. (LS535)"
                ) from error
            is_cut = is_cut and _is_same(together, _try(optimizer, number, sample, "cut")[0])
            if not is_cut and not _is_same(together, _try(optimizer, number, sample, "whole")[0]):
                raise ValueError(
                    f"shard_optimizer cannot share a {kind}: it updates a parameter otherwise where others are not "
                    "there, so no worker could update a part of them alone. Train without shard_optimizer. (LS535)"
                )
    return is_cut


def _find_problem(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    if kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict:
        return "it has a state_dict of its own, so its state is not known by parameters. Train without shard_optimizer."
    held = [value for name, value in vars(optimizer).items() if isinstance(value, Optimizer)]
    if held:
        return f"it holds another one, a {type(held[0]).__name__}, whose state would stay whole. Shard that one alone."
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if not torch.ops.aten.is_non_overlapping_and_dense(parameter.detach()):
            return f"a parameter of shape {tuple(parameter.shape)} has gaps in memory. Make it contiguous()."
        if not parameter.numel():
            return f"a parameter of shape {tuple(parameter.shape)} has no elements. Leave it out of the optimizer."
    return ""


def _samples_of(parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield a small parameter for each number of dimensions, dtype and device of a group."""
    kinds = {(each.dim(), each.dtype, each.device): each for each in parameters if each.numel()}
    for (dim, dtype, device), like in kinds.items():
        shape = _SHAPES.get(dim, (3072, *[1] * (dim - 1)) if dim else ())
        values = torch.randn(shape, generator=torch.Generator().manual_seed(dim)).to(dtype).to(device)
        yield values.requires_grad_(like.requires_grad)


def _try(optimizer: Optimizer, number: int, sample: Tensor, way: str) -> tuple[list[Tensor], Exception | None]:
    """Return the first parameter after each of three updates, and what a step has raised."""
    whole = nn.Parameter(sample.detach().clone())
    other = nn.Parameter(sample.detach().flip(0) if sample.dim() else sample.detach().clone())
    # With several threads, parts of a vector in bfloat16 have other bits, and begin elsewhere in a larger tensor.
    is_exact = sample.element_size() >= _EXACT_BYTES or torch.get_num_threads() == 1 or not sample.is_cpu
    if way == "cut" and not is_exact:
        return [], None
    flat = whole.detach().view(-1)
    cuts = [flat[:_CUT].requires_grad_(), flat[_CUT:].requires_grad_()] if sample.dim() else [flat.requires_grad_()]
    ways: dict[str, list[Tensor]] = {"together": [whole, other], "cut": cuts, "whole": [whole]}
    held = ways[way]
    tried = _copy_with(optimizer, number, held)
    generator = torch.Generator().manual_seed(number)
    found: list[Tensor] = []
    devices = [] if sample.is_cpu else [sample.device]
    with torch.random.fork_rng(devices, device_type=sample.device.type if devices else "cuda"):
        torch.manual_seed(0)
        for scale in _SCALES:
            gradient = (torch.randn(sample.shape, generator=generator) * scale).to(sample)
            pieces = [gradient.view(-1)[:_CUT], gradient.view(-1)[_CUT:]] if sample.dim() else [gradient.view(-1)]
            given = {"together": [gradient, gradient.flip(0) * 3 if sample.dim() else gradient], "cut": pieces}
            for parameter, each in zip(held, given.get(way, [gradient]), strict=True):
                parameter.grad = each.clone()
            try:
                tried.step()
            except Exception as error:  # noqa: BLE001 - it is returned
                return [], error
            found.append(whole.detach().clone())
    return found, None


def _copy_with(optimizer: Optimizer, number: int, parameters: Sequence[Tensor]) -> Any:
    """Return an optimizer with the options of one group and other parameters, which shares nothing with the given."""
    group = optimizer.param_groups[number]
    tried = object.__new__(type(optimizer))
    own = {"param_groups", "state", "step"}  # a scheduler has put a `step` there that calls the given one
    memo = {id(each): each for every in optimizer.param_groups for each in every["params"]}
    memo[id(optimizer)] = tried
    kept = {name: value for name, value in vars(optimizer).items() if name not in own and not name.endswith("hooks")}
    tried.__dict__.update({name: copy.deepcopy(value, memo) for name, value in kept.items()})
    tried.__dict__.update({name: OrderedDict() for name in vars(optimizer) if name.endswith("hooks")})
    options = {name: copy.deepcopy(value) for name, value in group.items() if name not in {"params", "param_names"}}
    tried.param_groups = [{**options, "params": list(parameters)}]
    tried.state = defaultdict(dict)
    made = next(((each, optimizer.state[each]) for each in group["params"] if optimizer.state.get(each)), None)
    if made is None:
        return tried
    like, state = made
    for parameter in parameters:  # Adagrad makes its state when it is constructed
        tried.state[parameter] = {
            name: torch.full_like(parameter, value.reshape(-1)[0].item(), dtype=value.dtype, requires_grad=False)
            if isinstance(value, Tensor) and value.shape == like.shape and like.dim()
            else copy.deepcopy(value)
            for name, value in state.items()
        }
    return tried


def _is_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True)
    )
