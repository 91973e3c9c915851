"""The states of the global random generators, which a step seeds and a step that fails puts back.

[Note: the state of NumPy's generator] Asking NumPy for the state of its global generator takes 36 us, more than all
else that a step records. The step seeds that generator, so its state is known until something draws from it. Whether
something has is seen by comparing the bytes of the state, in 0.5 us; only then is NumPy asked.
"""

import ctypes
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch

from lockstep.data.generators import OwnGenerators
from lockstep.engine.step_table import CurrentStep, StepPart
from lockstep.processes.reproducibility import reseed_generators

_ACCELERATORS: tuple[Any, ...] = (torch.cuda, torch.xpu)
_NUM_MT19937_WORDS = 625
"""Words of 32 bits in the state of a Mersenne Twister: 624 numbers, and the position among them."""


def read_device_states() -> list[torch.Tensor]:
    """Return the state of the present device's generator, for each kind of accelerator that this process uses."""
    return [kind.get_rng_state() for kind in _ACCELERATORS if kind.is_initialized()]


def set_device_states(states: Sequence[torch.Tensor]) -> None:
    """Give the present devices' generators what `read_device_states` has returned on another worker (local)."""
    for kind, state in zip((each for each in _ACCELERATORS if each.is_initialized()), states, strict=True):
        kind.set_rng_state(state)


@final
class RandomStates(StepPart):
    """Seeds the global generators of Python, NumPy (if it is imported) and torch, and puts earlier states back.

    As a part of a step it records the states, and puts them back if the step fails. `own` are those of the model and
    the loss function.
    """

    def __init__(self, own: OwnGenerators) -> None:
        self.own = own
        self._restore_calls: list[Callable[[], object]] = []
        self._numpy: _NumpyGenerator | None = None

    def begin(self, _step: CurrentStep) -> None:
        self.save()

    def commit(self, _step: CurrentStep) -> None:
        self._restore_calls = []

    def undo(self, _step: CurrentStep) -> None:
        self.restore()

    def save(self) -> None:
        cpu = torch.default_generator
        calls: list[Callable[[], object]] = [
            partial(random.setstate, random.getstate()),
            partial(cpu.set_state, cpu.get_state()),
        ]
        if "numpy" in sys.modules:
            if self._numpy is None:
                self._numpy = _NumpyGenerator()
            calls.append(self._numpy.save())
        for device in _ACCELERATORS:
            if device.is_initialized():
                generators = device.default_generators
                calls.extend(partial(each.set_state, each.get_state()) for each in generators)
        if torch.mtia.is_initialized():
            calls.append(partial(torch.mtia.set_rng_state, torch.mtia.get_rng_state()))
        if torch.backends.mps.is_available():
            calls.append(partial(torch.mps.set_rng_state, torch.mps.get_rng_state()))
        self.own.save()
        calls.append(self.own.restore)
        self._restore_calls = calls

    def restore(self) -> None:
        for restore in self._restore_calls:
            restore()
        self._restore_calls = []

    def seed(self, seed: int) -> None:
        """Seed all generators for what is drawn from here until the next step begins (local)."""
        reseed_generators(seed)
        if self._numpy is not None:
            self._numpy.note_seed(seed)
        self.own.seed_as_global()


@final
class _NumpyGenerator:
    """The global generator of NumPy. [Note: the state of NumPy's generator]."""

    def __init__(self) -> None:
        self._random = sys.modules["numpy"].random
        self._generator: Any = None
        self._words: Any = None
        self._seed = 0
        self._bytes_when_seeded = b""

    def save(self) -> Callable[[], object]:
        """Return what puts the present state back."""
        if self._bytes_when_seeded and self._read_bytes() == self._bytes_when_seeded:
            return partial(self._random.seed, self._seed)
        return partial(self._random.set_state, self._random.get_state())

    def note_seed(self, seed: int) -> None:
        """Note that the generator has just been seeded with `seed`, modulo 2**32."""
        self._seed = seed % 2**32
        self._bytes_when_seeded = self._read_bytes()

    def _read_bytes(self) -> bytes:
        """Return the state as bytes; empty if its place in memory is not known."""
        generator = self._random.get_bit_generator()
        if generator is not self._generator:
            self._generator, self._words = generator, self._find_words(generator)
        return b"" if self._words is None else bytes(self._words)

    def _find_words(self, generator: Any) -> Any:
        if not isinstance(generator, self._random.MT19937):
            return None
        words = (ctypes.c_uint32 * _NUM_MT19937_WORDS).from_address(generator.ctypes.state_address)
        expected = generator.state["state"]
        # A later NumPy may arrange the state otherwise. Then it is asked for each time.
        is_known = list(words) == [*expected["key"].tolist(), expected["pos"]]
        return words if is_known else None
