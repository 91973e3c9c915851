"""The same bits on every x86-64 processor, for a process that was started with `Settings.portable_variables`.

Libraries choose their kernels by what the processor can do, and wider vectors add in another order. The variables have
torch, oneDNN, MKL, OpenBLAS, NumPy and glibc compute as on a processor with SSE4.2 alone, in one thread. They are read
when a process starts or imports, so another process has to set them: the launcher, or the user before torchrun.

[Note: instructions that approximate] Square roots, tangents and arcs of MKL begin with RSQRTPS or RCPPS, of which the
makers of processors have only promised how far they are off: Intel's and AMD's have other bits. No variable changes
that, so NumPy computes these functions here: its square root is the processor's exact one, the others are glibc's.
"""

import functools
import logging
import platform
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.settings import read_settings

_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "sqrt": np.sqrt,
    "tan": np.tan,
    "atan": np.arctan,
    "acos": np.arccos,
    "asin": np.arcsin,
}
_POWERS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "pow.Tensor_Scalar": torch.sqrt,
    "pow_.Scalar": torch.sqrt_,
    "pow.Tensor_Scalar_out": torch.sqrt,
}
"""Powers, which torch computes as a square root where the exponent is a half."""
_HALF: Final = 0.5
_REFUSED: Final = {"linalg_lstsq.out": "torch.linalg.lstsq"}
_LOGGER: Final = logging.getLogger("lockstep")


def make_portable(device: torch.device, *, is_compiled: bool = False) -> None:
    """Replace what no variable can make portable, for the rest of this process; raise where it cannot be (local)."""
    check_portable(device, is_compiled=is_compiled)
    replace_operators()


def check_portable(device: torch.device, *, is_compiled: bool = False) -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64" or not torch.backends.mkl.is_available():
        raise UsageError(
            f"A portable run needs Linux on x86-64 and a torch with MKL, and this is torch {torch.__version__} on "
            f"{platform.platform()}. Leave out portable. (LS128)"
        )
    if device.type != "cpu":
        raise UsageError(
            f"A portable run has the same bits on every x86-64 processor, and its device is {device.type}: each kind "
            "of GPU has kernels of its own. Train on CPUs (devices='cpu', in a config device_ids: cpu), or leave out "
            "portable. (LS128)"
        )
    if is_compiled:
        raise UsageError(
            "A portable run cannot use torch.compile, which makes kernels for the processor that it finds. Leave out "
            "compile, or portable. (LS128)"
        )
    missing = read_settings().missing_for_portable()
    if missing:
        listed = " ".join(f"{name}='{value}'" for name, value in missing.items())
        raise UsageError(
            "This process cannot be portable any more: libraries choose their kernels when it starts. `lockstep "
            "train`, `lockstep run --portable` and ls.launch start workers with the variables for that; under another "
            f"launcher, set them before it: export {listed} (LS128)"
        )
    if torch.get_num_threads() != 1:
        raise UsageError(
            "A portable run computes with 1 thread in each worker, because sums over several have other bits, and this "
            f"worker has {torch.get_num_threads()}. Leave out what sets them, and use more workers. (LS128)"
        )


@functools.cache
def replace_operators() -> torch.library.Library:
    """[Note: instructions that approximate]. They stay replaced as long as the library is kept."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, that an operator is replaced
        for name, function in _FUNCTIONS.items():
            library.impl(name, functools.partial(_compute, function), "CPU")
            for form in ("{}_", "{}.out"):
                written = form.format(name)
                kernel = torch.library.get_kernel(f"aten::{written}", "CPU")
                library.impl(written, functools.partial(_compute_into, kernel, function), "CPU", with_keyset=True)
        for name, root in _POWERS.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, functools.partial(_raise_to, kernel, root), "CPU", with_keyset=True)
        for name, called in _REFUSED.items():
            library.impl(name, functools.partial(_refuse, called), "CPU")
    torch.backends.nnpack.set_flags(_enabled=False)  # it is used where the processor has AVX2
    torch.set_num_threads = _keep_one_thread
    return library


def _compute(function: Callable[..., Any], source: Tensor) -> Tensor:
    is_exact = not (source.is_floating_point() or source.is_complex())
    dtype = torch.get_default_dtype() if is_exact else source.dtype
    result = torch.empty_like(source, dtype=dtype)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype  # which NumPy has not
    values = source.detach().to(wide).numpy()
    with np.errstate(all="ignore"):
        if wide == dtype:
            function(values, out=result.numpy())
        else:
            result.copy_(torch.from_numpy(np.asarray(function(values))))
    return result


def _compute_into(kernel: Any, function: Callable[..., Any], keys: Any, source: Tensor, **out: Tensor) -> Any:
    target, result = out.get("out", source), _compute(function, source)
    if not torch.can_cast(result.dtype, target.dtype):
        return kernel.call_boxed(keys, source, **out)  # torch's own error
    return target.resize_(result.shape).copy_(result)


def _raise_to(kernel: Any, root: Callable[..., Tensor], keys: Any, source: Tensor, exponent: Any, **out: Tensor) -> Any:
    return root(source, **out) if exponent == _HALF else kernel.call_boxed(keys, source, exponent, **out)


def _keep_one_thread(nthreads: int) -> None:
    if nthreads != 1:
        _LOGGER.warning(
            "torch.set_num_threads(%d) was left out: a portable run has 1 thread in each worker, because sums over "
            "several have other bits. Use more workers. (LS128)",
            nthreads,
        )


def _refuse(name: str, *_arguments: Any, **_options: Any) -> NoReturn:
    raise UsageError(
        f"A portable run cannot use {name}, whose result depends on where its arguments lie in memory. Use another "
        "operator for it, or leave out portable. (LS128)"
    )
