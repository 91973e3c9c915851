"""What the ranks of a script did, compared: across the ranks of one run, and across runs on other numbers of ranks.

A run is a list of events of each rank, in order, as `drop_in/observation.py` writes them:

    batch      number of the pass over a loader, contents of its samples as numbers, indices of a DistributedSampler
    pass_end   whether it was ended early
    draw       random generators that loading a batch has used: the process, the states before
    backward   by what the terms of the loss are divided
    step       of which optimizer, weights before it as a number, learning rates, norm of the gradients
    forward    of a wrapper
    join       of a wrapper: ranks may have other numbers of batches
    trimmed    results were gathered without the samples that were added to the last batch
    wrapped    a model in DistributedDataParallel: whether it has BatchNorm of each rank alone, and draws noise
    file       a path, what is done with it, whether it existed
    said       a message with a code, or the exception that ended the script

A *mistake* trains or writes something else than meant. A *note* may be meant. What a script seldom does in a way that
is right is a mistake; batch sizes and learning rates are notes.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any, Final

from lockstep.doctor.scripts.source import Level
from lockstep.errors import counted

Event = Mapping[str, Any]
_FEWEST_SAMPLES: Final = 8
_NEAR: Final = 0.02
_ROUNDING: Final = 1e-4
_UNLIKE: Final = re.compile(r"[0-9a-f]{8,}|\d+")
_CODE: Final = re.compile(r"\(LS(\d)\d\d\)$")
_ABOUT_SCRIPTS: Final = "23457"
"""Areas of codes whose warnings are of what the script does."""
_OF_OPTIONS: Final = "(LS325)"
"""How torch's own warnings end of options that change no result."""
_SAME_NUMBERS: Final = "All ranks draw the same random numbers in each step, from torch's generator"
_OF_INPUTS: Final = "by the first dimension of the inputs"
"""How the wrapper counts samples, which may be boxes or tokens: here the batches are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    ranks: Sequence[Sequence[Event]]
    exit_code: int | None = 0
    """None if it did not end in time."""
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class ObservedFinding:
    level: Level
    line: str
    text: str


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over a loader."""

    number: int
    batches: Sequence[Event]
    trains: bool
    is_whole: bool

    @property
    def samples(self) -> list[int]:
        return [each for batch in self.batches for each in batch["contents"]]


def judge_runs(runs: Mapping[int, ObservedRun]) -> list[ObservedFinding]:
    """Return what depends on the rank or on the number of ranks in runs of a script, by that number."""
    found = [each for size in sorted(runs) for each in _judge_one(size, runs)]
    kept: dict[tuple[Any, ...], ObservedFinding] = {}
    for each in found:  # once for each line and kind of finding
        kept.setdefault((each.line, each.level, _UNLIKE.sub("", each.text)), each)
    return sorted(kept.values(), key=lambda each: each.level is Level.NOTE)


def _judge_one(size: int, runs: Mapping[int, ObservedRun]) -> Iterator[ObservedFinding]:
    run, alone = runs[size], runs.get(1)
    yield from _said(size, run, alone)
    if size == 1:
        return
    yield from _files(run)
    if run.exit_code != 0 or not _are_replicas(run):  # what is missing after an error is a consequence
        return
    if not _of(run.ranks[0], "join"):
        yield from _weights(size, run)
        yield from _numbers_of_steps(run)
    yield from _forwards(run)
    yield from _losses(run)
    yield from _loading(run)
    yield from _training_samples(size, run, alone)
    yield from _contents(run)
    yield from _evaluation(size, run, alone)
    if alone is not None:
        yield from _against_one(size, run, alone)


def _are_replicas(run: ObservedRun) -> bool:
    """Whether all ranks train one model: not the stages or slices of one, or some only serve parameters to others."""
    steps = [_of(events, "step")[:1] for events in run.ranks]
    begin_alike = all(steps) and len({each["weights"] for first in steps for each in first}) == 1
    return begin_alike or bool(_of(run.ranks[0], "wrapped"))


def _of(events: Sequence[Event], *kinds: str) -> list[Event]:
    return [each for each in events if each["kind"] in kinds]


def passes(events: Sequence[Event]) -> list[Pass]:
    """Return the passes over loaders; one trains if a backward came after one of its batches, before another's."""
    batches: dict[int, list[Event]] = defaultdict(list)
    trains: set[int] = set()
    whole: set[int] = set()
    last = 0
    for event in events:
        if event["kind"] == "batch":
            last = event["number"]
            batches[last].append(event)
        elif event["kind"] == "backward" and last:
            trains.add(last)
        elif event["kind"] == "pass_end" and not event["is_cut"]:
            whole.add(event["number"])
    return [Pass(number, held, number in trains, number in whole) for number, held in batches.items()]


def _mistake(line: str, text: str) -> ObservedFinding:
    return ObservedFinding(Level.MISTAKE, line, text)


def _note(line: str, text: str) -> ObservedFinding:
    return ObservedFinding(Level.NOTE, line, text)


def _said(size: int, run: ObservedRun, alone: ObservedRun | None) -> Iterator[ObservedFinding]:
    said = sorted((each for events in run.ranks for each in _of(events, "said")), key=lambda each: each["at"])
    for each in said:
        area = _CODE.search(each["text"].split("\n")[0]) or _CODE.search(each["text"])
        is_about = area is not None and area[1] in _ABOUT_SCRIPTS and not each["text"].endswith(_OF_OPTIONS)
        if _OF_INPUTS in each["text"] and _has_even_batches(run):
            continue
        if is_about and not each["error"]:
            is_note = each["text"].startswith(_SAME_NUMBERS) and _only_drops(run)
            yield (_note if is_note else _mistake)(each["line"], each["text"])
    errors = [each for each in said if each["error"] not in {"", "SystemExit", "KeyboardInterrupt"}]
    works_alone = alone is None or alone.exit_code == 0
    if errors and works_alone:
        first = next((each for each in errors if not each["text"].endswith("(LS601)")), errors[0])
        yield _mistake(
            first["line"], f"With {counted(size, 'rank')} it fails: {first['error']}: {first['text']} (LS548)"
        )
    elif run.exit_code is None:
        yield _mistake("", f"With {counted(size, 'rank')} it did not end in time: {run.last_words} (LS548)")
    elif run.exit_code and works_alone:
        yield _mistake(
            "", f"With {counted(size, 'rank')} it ends with exit code {run.exit_code}. {run.last_words} (LS548)"
        )


def _only_drops(run: ObservedRun) -> bool:
    """Whether nothing but dropout draws, whose masks are the same on all ranks in most scripts that set one seed."""
    events = _of(run.ranks[0], "batch", "forward")
    pairs = [pair for pair in pairwise(events) if [each["kind"] for each in pair] == ["batch", "forward"]]
    num_drawn = sum(batch["state"] != forward["state"] for batch, forward in pairs)
    return 2 * num_drawn < len(pairs) and not any(each["draws_noise"] for each in _of(run.ranks[0], "wrapped"))


def _weights(size: int, run: ObservedRun) -> Iterator[ObservedFinding]:
    columns = [defaultdict[int, list[Event]](list) for _ in run.ranks]
    for column, events in zip(columns, run.ranks, strict=True):
        for each in _of(events, "step", "weights"):
            column[each["optimizer"]].append(each)
    for number in columns[0]:
        for step, row in enumerate(zip(*(column[number] for column in columns), strict=False)):
            if len({each["weights"] for each in row}) > 1 and step:
                yield _mistake(
                    row[0]["line"],
                    f"With {size} ranks the weights differ from rank to rank after step {step}, so each rank trains a "
                    "model of its own: its gradients are not those of all ranks. Call the wrapped model itself, not "
                    "model.module, let the last backward before a step be outside of no_sync, and do the same on every "
                    "rank. (LS540)",
                )
                return


def _forwards(run: ObservedRun) -> Iterator[ObservedFinding]:
    """Look for batches of which a backward is of no forward of a wrapper, though some wrapper is trained."""
    num_forwards, odd = 0, list[Event]()
    last: Event | None = None
    end: Event = {"kind": "batch"}
    for event in (*_of(run.ranks[0], "batch", "forward", "backward"), end):
        if event["kind"] == "batch":
            odd += [last] if last is not None and not num_forwards else []
            num_forwards, last = 0, None
        elif event["kind"] == "forward":
            num_forwards += 1
        else:
            last = event
    if len(odd) > 1 and _of(run.ranks[0], "wrapped"):
        yield _mistake(
            odd[0]["line"],
            f"The backward of {len(odd)} batches belongs to no forward of the wrapped model: model.module, or the "
            "module that was wrapped, was called itself. torch's wrapper does not average such gradients, so each rank "
            "trains a model of its own. Call the wrapped model. (LS540)",
        )


def _losses(run: ObservedRun) -> Iterator[ObservedFinding]:
    summed = next((each for events in run.ranks for each in _of(events, "backward") if each["summed"]), None)
    if summed is not None:
        yield _mistake(
            summed["summed"],
            "The loss itself is summed over the ranks in place, before its backward. Autograd does not see the sum: "
            "where it is divided by the number of ranks then, the gradient is as many times too small. Reduce "
            "loss.detach().clone(). (LS541)",
        )
    differs = [
        row
        for row in zip(*(_of(events, "backward") for events in run.ranks), strict=False)
        if len({len(each["divisors"]) for each in row}) == 1
        and any(
            max(term) - min(term) > _ROUNDING * max(map(abs, term))
            for term in zip(*(each["divisors"] for each in row), strict=True)
        )
    ]
    if differs and _has_even_batches(run):
        shown = ", ".join(f"{each['divisors'][0]:g}" for each in differs[0])
        yield _mistake(
            differs[0][0]["line"],
            f"The loss is a mean over other numbers of elements on each rank ({shown}), although the batches have the "
            "same size: the mean over ranks then weighs tokens or boxes of one rank more than those of another. Divide "
            "the sum by the count of all ranks: ls.mean_over_ranks(total, count). (LS541)",
        )


def _has_even_batches(run: ObservedRun) -> bool:
    trained = [[batch for each in passes(events) if each.trains for batch in each.batches] for events in run.ranks]
    return len({tuple(len(batch["contents"]) for batch in batches) for batches in trained}) == 1


def _files(run: ObservedRun) -> Iterator[ObservedFinding]:
    writers: dict[str, dict[int, Event]] = defaultdict(dict)
    for rank, events in enumerate(run.ranks):
        for each in _of(events, "file"):
            if each["how"] in {"write", "mkdir"}:
                writers[each["path"]].setdefault(rank, each)
    alike: dict[tuple[str, str], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    is_told: set[str] = set()
    for path, by_rank in writers.items():
        first = next(iter(by_rank.values()))
        if len(by_rank) > 1 and first["how"] == "write" and first["line"] not in is_told:
            is_told.add(first["line"])
            yield _mistake(
                first["line"],
                f"{len(by_rank)} ranks write the same file, {path}: what is in it then is of one of them, or of parts "
                "of each. Write it on rank 0 alone, or put the rank into its name. (LS545)",
            )
        if len(by_rank) == 1:
            alike[_UNLIKE.sub("#", path), first["how"]][next(iter(by_rank))].append(path)
    for (_, how), paths in alike.items():
        if len(paths) < 2 or _names_rank(paths):  # noqa: PLR2004 - two ranks
            continue
        names = [held[0] for held in paths.values()]
        line = writers[names[0]][next(iter(paths))]["line"]
        if line in is_told:
            continue
        is_told.add(line)
        what = "Each rank makes a folder" if how == "mkdir" else "Each rank writes a file"
        yield _mistake(
            line,
            f"{what} of its own, whose name depends on the time or the process: {names[0]}, {names[1]}. Let rank 0 "
            "choose the name and broadcast it, or write on rank 0 alone. (LS545)",
        )


def _names_rank(paths: Mapping[int, Sequence[str]]) -> bool:
    for row in zip(*paths.values(), strict=False):
        parts = zip(*(_UNLIKE.findall(each) for each in row), strict=True)
        shifts = [{_shift(part, rank) for part, rank in zip(column, paths, strict=True)} for column in parts]
        if any(len(each) == 1 and None not in each for each in shifts):
            return True
    return False


def _shift(part: str, rank: int) -> int | None:
    return int(part) - rank if part.isdecimal() and int(part) - rank in {0, 1} else None


def _loading(run: ObservedRun) -> Iterator[ObservedFinding]:
    """Look for random numbers that come again: in another loading process, or in the next epoch."""
    trained = [batch for each in passes(run.ranks[0]) if each.trains for batch in each.batches]
    lines = {batch["loading"]: batch["line"] for batch in trained}
    firsts: dict[tuple[str, int, int], int] = {}  # of each generator, pass and process
    for each in _of(run.ranks[0], "draw"):
        if each["loading"] in lines:
            for name, state in each["states"].items():
                firsts.setdefault((name, each["loading"], each["worker"]), state)
    seen: dict[tuple[str, int], int] = {}
    for (name, loading, _), state in firsts.items():
        if (name, state) in seen:
            where = "loading processes" if seen[name, state] == loading else "epochs"
            yield _mistake(
                lines[loading],
                f"All {where} of the DataLoader begin with the same state of {_GENERATORS[name]}: augmentations come "
                "again in each of them. Seed by torch.initial_seed() in worker_init_fn, which is another number in "
                "each process and epoch, or do not seed there at all. (LS543)",
            )
            return
        seen[name, state] = loading


_GENERATORS: Final = {
    "torch": "torch's generator",
    "python": "the generator of Python's random",
    "numpy": "NumPy's generator",
    "device": "the generator of the device",
}


def _training_samples(size: int, run: ObservedRun, alone: ObservedRun | None) -> Iterator[ObservedFinding]:
    trained = [each for each in map(_first_trained, run.ranks) if each is not None]
    parts = [set(each.samples) for each in trained]
    if len(parts) < size or _of(run.ranks[0], "draw"):  # or what is drawn is another sample each time
        return
    line, same = trained[0].batches[0]["line"], parts[0]
    if len(same) >= _FEWEST_SAMPLES and all(part == same for part in parts):
        yield _mistake(
            line,
            f"All {size} ranks train on the same {len(same)} samples, so they do the work of one. Give each its "
            "part: DataLoader(dataset, sampler=DistributedSampler(dataset)). (LS542)",
        )
        return
    first = _first_trained(alone.ranks[0]) if alone is not None else None
    if first is None or not all(each.is_whole for each in (*trained, first)):
        return
    everything, here = set(first.samples), set().union(*parts)
    if len(here - everything) > len(here) * _NEAR:
        return  # samples that are computed anew each time
    most = sum(max(len(batch["contents"]) for batch in each.batches) for each in trained)
    if len(everything - here) > most:
        yield _mistake(
            line,
            f"With {size} ranks an epoch leaves out {len(everything - here)} of the {len(everything)} samples that it "
            "has with one rank: the parts of the ranks are not all of the data. A DistributedSampler gives parts that "
            "are. (LS542)",
        )


def _contents(run: ObservedRun) -> Iterator[ObservedFinding]:
    """Look for samples that have other contents on another rank, though on each rank the same whenever they come."""
    held: list[Mapping[tuple[str, str], set[int]]] = []
    num_again = 0
    for events in run.ranks:
        found = defaultdict[tuple[str, str], set[int]](set)
        batches = [each for each in _of(events, "batch") if len(each["indices"]) == len(each["contents"])]
        samples = [
            ((batch["line"], index), content)
            for batch in batches
            for index, content in zip(batch["indices"], batch["contents"], strict=True)
        ]
        for place, content in samples:
            found[place].add(content)
        if any(len(each) > 1 for each in found.values()):
            return  # it is augmented, or padded to the longest of its batch
        num_again += len(samples) - len(found)
        held.append(found)
    first, *others = held
    for rank, here in enumerate(others, start=1):
        both = sorted(first.keys() & here.keys())
        odd = [place for place in both if first[place] != here[place]]
        if min(num_again, len(both)) >= _FEWEST_SAMPLES and len(odd) > len(both) * _NEAR:
            line, index = odd[0]
            yield _mistake(
                line,
                f"Of {len(both)} samples that ranks 0 and {rank} have both had, {len(odd)} are others on rank {rank}, "
                f"number {index} for one. Something that the ranks are to have alike has another order or another seed "
                "on each, as a vocabulary made from a set, or a list of files. Sort it, or make it with one seed. "
                "(LS542)",
            )
            return


def _first_trained(events: Sequence[Event]) -> Pass | None:
    return next((each for each in passes(events) if each.trains), None)


def _evaluated(run: ObservedRun) -> tuple[Counter[int], str, bool] | None:
    """Return how often each sample came in the first evaluation after an epoch of training; and if all did."""
    found = Counter[int]()
    ranks = [_first_evaluation(events) for events in run.ranks]
    for row in zip_longest(*ranks):
        there = [each for each in row if each is not None]
        # What every rank evaluates by itself, such as what a sampler has left over, is added to a sum once.
        is_shared = len(there) == len(row) and all(each.samples == there[0].samples for each in there)
        for each in there[:1] if is_shared else there:
            found.update(each.samples)
    line = next((each.batches[0]["line"] for passed in ranks for each in passed), "")
    return (found, line, all(each.is_whole for passed in ranks for each in passed)) if found else None


def _first_evaluation(events: Sequence[Event]) -> list[Pass]:
    """Return the passes after one that trains, up to the next one that does; of the first such that there are."""
    parts: list[list[Pass]] = [[]]
    for each in passes(events):
        if each.trains:
            parts.append([])
        else:
            parts[-1].append(each)
    return next((part for part in parts[1:] if part), [])


def _evaluation(size: int, run: ObservedRun, alone: ObservedRun | None) -> Iterator[ObservedFinding]:
    here, there = _evaluated(run), _evaluated(alone) if alone is not None else None
    if here is None or there is None or not (here[2] and there[2]):
        return
    (counts, line, _), (once, _, _) = here, there
    if len(set(counts) - set(once)) > len(counts) * _NEAR:
        return
    ratios = {counts[each] / times for each, times in once.items()}
    if len(ratios) > 1 and not _of(run.ranks[0], "trimmed"):
        missing = sum(counts[each] == 0 for each in once)
        twice = sum(counts[each] > min(ratios - {0.0}) * times for each, times in once.items())
        what = [f"{missing} of {len(once)} samples are left out"] * bool(missing)
        what += [f"{twice} of {len(once)} samples come more often than the others"] * bool(twice)
        yield _mistake(
            line,
            f"In the evaluation on {size} ranks {' and '.join(what)}, so its result depends on the number of ranks: "
            "the sampler pads or drops. Use lockstep.DistributedSampler(dataset, shuffle=False, pad=False), and add up "
            "sums and counts. (LS544)",
        )


def _numbers_of_steps(run: ObservedRun) -> Iterator[ObservedFinding]:
    steps = [_of(events, "step") for events in run.ranks]
    counts = [len(each) for each in steps]
    if len(set(counts)) > 1:
        shown = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        yield _mistake(
            max(steps, key=len)[-1]["line"],
            f"The ranks take different numbers of steps ({shown}). Batches are uneven, or one rank skips or stops by "
            "itself: give all the same number, or decide together by an all-reduce. (LS546)",
        )


def _against_one(size: int, run: ObservedRun, alone: ObservedRun) -> Iterator[ObservedFinding]:
    here, there = (_of(each.ranks[0], "step") for each in (run, alone))
    if not (here and there):
        return
    samples, ones = _samples_of_first_step(run), _samples_of_first_step(alone)
    if samples.total() > ones.total() * 1.1 and ones and here[0]["lr"] == there[0]["lr"]:
        yield _note(
            here[0]["line"],
            f"A step has {samples.total()} samples with {size} ranks and {ones.total()} with one, at the same learning "
            f"rate {here[0]['lr'][0]:g}. Keep the size of the whole batch, or choose a learning rate for the larger "
            "one. (LS546)",
        )
    norms = [each[0]["norm"] for each in (here, there)]
    is_alike = samples == ones and here[0]["weights"] == there[0]["weights"] and None not in norms
    has_norms = any(each["has_norms"] for each in _of(run.ranks[0], "wrapped"))
    if (
        is_alike
        and norms[1]
        and not has_norms
        and not _is_random(run.ranks[0])
        and abs(norms[0] / norms[1] - 1) > _NEAR
    ):
        yield _mistake(
            here[0]["line"],
            f"The same weights and the same {samples.total()} samples give a gradient of norm {norms[0]:.4g} with "
            f"{size} ranks and {norms[1]:.4g} with one. The loss or the gradient is scaled by the number of ranks, or "
            "is no mean over samples. (LS541)",
        )


def _samples_of_first_step(run: ObservedRun) -> Counter[int]:
    """Count the samples that all ranks have had from their first training pass before the first step."""
    found = Counter[int]()
    for events in run.ranks:
        end = next((place for place, each in enumerate(events) if each["kind"] == "step"), 0)
        first = _first_trained(events)
        batches = [each for each in _of(events[:end], "batch") if first and each["number"] == first.number]
        batches = batches[: len(_of(events[:end], "backward"))]  # others may be loaded ahead, as Accelerate does
        found.update(number for each in batches for number in each["contents"])
    return found


def _is_random(events: Sequence[Event]) -> bool:
    """Whether numbers were drawn between the first batch and the step."""
    batches, steps = _of(events, "batch"), _of(events, "step")
    return not batches or batches[0]["state"] != steps[0]["state"]
