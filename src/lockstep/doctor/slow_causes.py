"""Why a worker is slow, with a number in each sentence: from what the system says that it used. A pure module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

_MATTERS: Final = 0.05
_WAITS_FOR_CORE: Final = 0.15
_WAITS_FOR_DISK: Final = 0.2
_FAULTS_PER_SECOND: Final = 20.0
_EXCESS: Final = 1.2
_SWAPPED_BYTES: Final = 64 << 20
_FEWEST_SAMPLES: Final = 2
_MOST_OF_THE_CORES: Final = 0.75
"""Workers that use this part of the cores have them nearly to themselves."""

Usage = Mapping[str, int]
"""As `read_usage` returns it."""


@dataclass(frozen=True, slots=True)
class UsageSample:
    moment_ns: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class _Used:
    """What was used between the first and the last sample."""

    samples: Sequence[UsageSample]

    def rate(self, name: str) -> float:
        """Return how much of what grows was used in each second."""
        first, last = self.samples[0], self.samples[-1]
        used = last.usage.get(name, 0) - first.usage.get(name, 0)
        return max(used, 0) * 1e9 / (last.moment_ns - first.moment_ns)

    def part(self, name: str) -> float:
        """Return the mean of what is so at a moment."""
        return sum(sample.usage.get(name, 0) for sample in self.samples) / len(self.samples)


def cores_used_together(workers: Sequence[Sequence[UsageSample]]) -> dict[int, float]:
    """Return how many cores workers have used together: those that may use one core, those that may use two, ..."""
    found: dict[int, float] = {}
    for samples in workers:
        if len(samples) >= _FEWEST_SAMPLES and samples[-1].moment_ns > samples[0].moment_ns:
            used = _Used(samples)
            cores = round(used.part("num_cores"))
            found[cores] = found.get(cores, 0.0) + used.rate("cpu_ns") / 1e9
    return found


def explain_slowness(
    samples: Sequence[UsageSample],
    load: float,
    in_collectives: float = 0.0,
    used_by_job: Mapping[int, float] = MappingProxyType({}),
) -> list[str]:
    """Return what the system says of a worker that could make it slow, the heaviest first; empty for nothing.

    A `load` of 0 is not known, `in_collectives` is a part of its time, `used_by_job` is of `cores_used_together`.
    """
    if len(samples) < _FEWEST_SAMPLES or samples[-1].moment_ns <= samples[0].moment_ns:
        return []
    used = _Used(samples)
    found: list[tuple[float, str]] = []
    stopped = used.part("is_stopped")
    if stopped > _MATTERS:
        found.append((stopped + 1, f"it was stopped in {stopped:.0%} of the looks (SIGSTOP, Ctrl-Z, or a scheduler)"))
    throttled = used.rate("throttled_ns") / 1e9
    if throttled > _MATTERS:
        found.append((throttled + 1, f"its control group was throttled for {throttled:.0%} of the time: a CPU limit"))
    found += _about_cores(used, load, in_collectives, used_by_job)
    sleeping = max(used.part("is_in_disk_sleep"), used.rate("disk_wait_ns") / 1e9)
    if sleeping > _WAITS_FOR_DISK:
        speed = used.rate("read_bytes") / 1e6
        found.append((sleeping, f"it waited for the disk {sleeping:.0%} of the time, at {speed:.1f} MB/s"))
    swapped = samples[-1].usage.get("swapped_bytes", 0)
    if swapped > _SWAPPED_BYTES:
        found.append((0.5, f"{swapped / 2**30:.2f} GiB of its memory are swapped out: the host has too little memory"))
    elif used.rate("major_faults") > _FAULTS_PER_SECOND:
        found.append((0.4, f"it read {used.rate('major_faults'):.0f} pages of its memory from disk each second"))
    return [text for _, text in sorted(found, reverse=True)]


def _about_cores(
    used: _Used, load: float, in_collectives: float, used_by_job: Mapping[int, float]
) -> list[tuple[float, str]]:
    waited, computed = used.rate("core_wait_ns") / 1e9, used.rate("cpu_ns") / 1e9
    slept_by_itself = 1 - computed - waited - in_collectives
    if waited <= _WAITS_FOR_CORE or slept_by_itself > waited:  # it would be slow on a core of its own, too
        return []
    cores, running = round(used.part("num_cores")), used.part("num_running")
    known = f"; {load:.1f} processes want the host's cores" if load else ""
    if running > cores + 0.5:
        text = (
            f"its {running:.0f} busy threads share {cores} cores: they waited {waited:.1f} s for a core in each second"
        )
        return [(waited, text)]
    together = used_by_job.get(cores, 0.0)
    if together > max(cores * _MOST_OF_THE_CORES, _EXCESS * computed):
        text = (
            f"the workers of this job use {together:.1f} of {cores} cores with all their threads, so they wait for one "
            f"another: this one for {waited:.2f} s in each second"
        )
        return [(waited, text)]
    text = (
        f"another process was on its core: in each second it waited {waited:.2f} s for a core, used "
        f"{computed:.2f} s, and was interrupted {used.rate('forced_switches'):.0f} times{known}"
    )
    return [(waited, text)]
