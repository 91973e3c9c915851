"""The random generators and deterministic switches on which the bits of a run depend.

[Note: states where they lie] Python needs 15 us to give and take the state of its global generator, NumPy 110. Slices
and blocks of records are loaded in random states of their own, often for 100 us. So both states, 624 words of a
Mersenne Twister and a place among them, are copied where they lie in memory, in 1 us. Whether they lie there is looked
at first: the words must be those that `getstate` returns. NumPy keeps a second normal number beside them, which only it
can tell; as long as the words are those for which it had none, it has none.
"""

import ctypes
import functools
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, final

import torch

from lockstep.processes.user_line import stacklevel_of_user
from lockstep.settings import CUBLAS_WORKSPACE, read_settings, set_determinism_variables
from lockstep.torch_private.compiler_import import set_inductor_deterministic

REPRODUCIBLE_WORKSPACES = frozenset({CUBLAS_WORKSPACE, ":16:8"})
"""The values of CUBLAS_WORKSPACE_CONFIG under which cuBLAS is reproducible."""
_ACCELERATORS: Final[tuple[Any, ...]] = (torch.cuda, torch.xpu)
"""Torch's own whose modules have a generator for each device."""
_OTHERS: Final = frozenset({"mtia", "mps"})
"""Torch's own with other functions, by their types."""
_NUM_WORDS: Final = 624
_TwisterWords: Final = ctypes.c_uint32 * (_NUM_WORDS + 1)
_SEEDING_FACTOR: Final = 1812433253
"""By what seeding a Mersenne Twister makes each word of the one before."""


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy (if it is imported) and torch, CUDA's included (local).

        ls.seed_generators(0)
        model = Net()    # the same weights in every process

    Args:
        seed: In [0, 2**63); NumPy gets it modulo 2**32.
    """
    seed_host_generators(seed)
    torch.manual_seed(seed)


def read_generator_states() -> dict[str, Any]:
    """Return the states of the global generators, of accelerators that of the present device, if it is initialized."""
    numpy_random = sys.modules.get("numpy.random")  # NumPy imports it when it is first used
    return {
        "python": random.getstate(),
        "torch": state_of_generator(torch.default_generator),
        "numpy": None if numpy_random is None else numpy_random.get_state(),
        "devices": {kind.__name__: kind.get_rng_state() for kind in _initialized()},
    }


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Give the global generators what `read_generator_states` has returned on another worker (local).

    An accelerator that only one of the two has initialized keeps its own state: each shard of a step seeds it.
    """
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and states["numpy"] is not None:
        numpy.random.set_state(states["numpy"])
    for kind in _initialized():
        if kind.__name__ in states["devices"]:
            kind.set_rng_state(states["devices"][kind.__name__])


def keep_generator_states() -> list[Callable[[], object]]:
    """Return functions that put back the states of the global generators, those of all devices included."""
    calls = keep_host_states()
    for kind in _initialized():
        if hasattr(kind, "default_generators"):
            calls += [partial(each.set_state, each.get_state()) for each in kind.default_generators]
        else:
            numbers = range(kind.device_count())
            calls += [partial(kind.set_rng_state, kind.get_rng_state(number), number) for number in numbers]
    if torch.mtia.is_initialized():
        calls.append(partial(torch.mtia.set_rng_state, torch.mtia.get_rng_state()))
    if torch.backends.mps.is_available():
        calls.append(partial(torch.mps.set_rng_state, torch.mps.get_rng_state()))
    return calls


def _initialized() -> list[Any]:
    """Return the modules of the accelerators that this process uses, and that seed by device; of a plug-in's too."""
    found = [kind for kind in _ACCELERATORS if kind.is_initialized()]
    present = torch.accelerator.current_accelerator()
    own = {kind.__name__.rpartition(".")[2] for kind in _ACCELERATORS}
    if present is not None and present.type not in own | _OTHERS:
        module = getattr(torch, present.type, None)  # torch.npu
        if hasattr(module, "manual_seed_all") and getattr(module, "is_initialized", lambda: True)():
            found.append(module)
    return found


def keep_host_states() -> list[Callable[[], object]]:
    """Return functions that put back the states of Python, torch's CPU and NumPy. [Note: states where they lie]."""
    cpu = torch.default_generator
    numpy = sys.modules.get("numpy")
    of_numpy = [] if numpy is None else [_numpy_twister(numpy.random.get_bit_generator()).keep()]
    return [_keep_python_state(), partial(cpu.set_state, state_of_generator(cpu)), *of_numpy]


def state_of_generator(generator: torch.Generator) -> torch.Tensor:
    """Return the state of a generator of torch's.

    Of one on the CPU it is that of a copy, which no other thread uses. `get_state` makes a Python object while it holds
    the generator's lock, so a garbage collection may begin there, and a finalizer in it may let another thread run. If
    that one seeds the generator, it waits for the lock with the interpreter's: both threads stand still for ever.
    """
    return (generator.clone_state() if generator.device.type == "cpu" else generator).get_state()


def seed_host_generators(seed: int) -> None:
    """Seed the global generators of Python, torch's CPU and NumPy, where somebody has imported it (local)."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
        _numpy_twister(numpy.random.get_bit_generator()).seed = seed % 2**32


def _keep_python_state() -> Callable[[], object]:
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    words = _find_python_words(generator)
    if words is None:
        return partial(random.setstate, random.getstate())
    kept, normal = bytes(words), generator.gauss_next

    def put_back() -> None:
        ctypes.memmove(words, kept, len(kept))
        generator.gauss_next = normal

    return put_back


@functools.cache
def _find_python_words(generator: random.Random) -> Any:
    """Return the place among the words, and these, where they lie in memory; None if that is not known."""
    if random.Random.__base__.__basicsize__ < object.__basicsize__ + ctypes.sizeof(_TwisterWords):  # type: ignore[union-attr]
        return None
    words = _TwisterWords.from_address(id(generator) + object.__basicsize__)
    return words if [*words[1:], words[0]] == list(generator.getstate()[1]) else None


@final
class _NumpyTwister:
    """NumPy's global generator. [Note: states where they lie]."""

    def __init__(self, generator: Any) -> None:
        self._random = sys.modules["numpy"].random
        self._words: Any = None
        self._without_normal = b""
        """A state of the words that is known to have no second normal number beside them."""
        self.seed = 0
        """With which it was seeded last: as long as nothing is drawn, there is no second normal number either."""
        if isinstance(generator, self._random.MT19937):
            words = _TwisterWords.from_address(generator.ctypes.state_address)
            expected = generator.state["state"]
            self._words = words if list(words) == [*expected["key"].tolist(), expected["pos"]] else None

    def keep(self) -> Callable[[], object]:
        now = self._read()
        if not now:
            return partial(self._random.set_state, self._random.get_state(legacy=False))
        if not self._is_without_normal(now):
            state = self._random.get_state()
            if state[3]:
                return partial(self._random.set_state, state)
            self._without_normal = now
        return partial(self._put_back, now)

    def _is_without_normal(self, now: bytes) -> bool:
        if now == self._without_normal:
            return True
        second = (_SEEDING_FACTOR * (self.seed ^ self.seed >> 30) + 1) % 2**32
        return (self._words[0], self._words[1], self._words[_NUM_WORDS]) == (self.seed, second, _NUM_WORDS)

    def _put_back(self, kept: bytes) -> None:
        if self._is_without_normal(self._read()):
            ctypes.memmove(self._words, kept, len(kept))
        else:
            *key, place = _TwisterWords.from_buffer_copy(kept)
            self._random.set_state(("MT19937", key, place))
        self._without_normal = kept

    def _read(self) -> bytes:
        """Return the words as bytes; empty if it is not known where they lie."""
        return b"" if self._words is None else bytes(self._words)


@functools.cache
def _numpy_twister(generator: Any) -> _NumpyTwister:
    return _NumpyTwister(generator)


def reseed_generators(seed: int) -> None:
    """Do what `seed_generators` does, faster, in a process whose devices are initialized already (local).

    For each device that is not initialized, `torch.manual_seed` records a traceback and a call to seed it later. That
    takes half a millisecond, for every shard of every step.
    """
    seed_host_generators(seed)
    for device in _initialized():
        device.manual_seed_all(seed)
    if torch.mtia.is_initialized():
        torch.mtia.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def set_deterministic(deterministic: bool) -> None:
    """Set torch's switches for the whole process (local).

        ls.set_deterministic(True)

    With True, operators are deterministic, or raise if they have no deterministic form, and cuDNN and cuBLAS are
    reproducible. Call it before CUDA is first used, because cuBLAS reads its setting once. With False, cuDNN measures
    which kernel is the fastest.
    See https://docs.pytorch.org/docs/stable/notes/randomness.html.
    """
    was_set = read_settings().cublas_workspace() in REPRODUCIBLE_WORKSPACES
    set_determinism_variables(deterministic)
    set_inductor_deterministic(deterministic)
    # The same as torch.use_deterministic_algorithms, which also imports the compiler; that takes a second.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # The default is to fill every torch.empty with NaN. That takes time and only finds reads of unset memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic and not was_set and torch.cuda.is_initialized():
        warn_of_late_workspace(_multiply_on_gpu)


def warn_of_late_workspace(multiply: Callable[[], object]) -> None:
    """Warn if cuBLAS was used before its workspace was set, while operators must be deterministic (local).

    When the first matrix product is computed, torch records whether CUBLAS_WORKSPACE_CONFIG is set. Later products
    raise if it was not. That CUDA is initialized is not enough: moving a model to the GPU computes no product.
    """
    try:
        multiply()
    except RuntimeError as error:
        if "CUBLAS_WORKSPACE_CONFIG" not in str(error):
            raise
        warnings.warn(
            "This process has computed matrix products on the GPU before CUBLAS_WORKSPACE_CONFIG was set, so cuBLAS "
            "is not reproducible in it, and torch refuses further matrix products while operators must be "
            f"deterministic. Set CUBLAS_WORKSPACE_CONFIG={CUBLAS_WORKSPACE} where the process is started (ls.launch, "
            "lockstep run and lockstep train do), make the trainer before the first product, or pass "
            "deterministic=False. (LS531)",
            stacklevel=stacklevel_of_user(),
        )


def _multiply_on_gpu() -> object:
    matrix = torch.ones(2, 2, device="cuda")
    return matrix @ matrix
