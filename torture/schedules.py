"""Random schedules of the phases of shared memory: `schedules.c`, with `native/shm.c` and programs of `programs.py`.

`make sanitize` runs it under the sanitizers. Whatever is wrong is printed with its seed.
"""

import itertools
import os
import random
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import hatch_build

from lockstep.comm.shm import programs
from lockstep.comm.shm.arithmetic import Step, schedule, schedule_nodes
from lockstep.comm.shm.programs import HeldParts, Program, Ranks
from lockstep.shards import partial_nodes, shard_range
from torture.row import Row

_SOURCE = Path(__file__).with_name("schedules.c")
_NATIVE = Path(hatch_build.__file__).parent / hatch_build.FOLDER
_WIDTHS = (4, 8, 2, 2, 1, 2, 4, 8)  # of the kinds of shm.c
_BYTES = 4
_BUFFERS = (4096, 80 << 10)  # many phases; more than a block in one reduction
_NUM_CASES = 28 * 14
_SANITIZERS = {
    "address, undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}

Part = tuple[int, int, int]
"""Rank, number of the tensor, offset in bytes."""


@dataclass(slots=True)
class _Case:
    """A call: what every rank gives, its programs, and what must come out."""

    ranks: Sequence[Ranks]
    kind: int
    given: Callable[[int], list[int]]
    """Bytes of the tensors of a rank."""
    programs: Sequence[Callable[[Ranks], Program]]
    compares: bool = True
    results: list[tuple[Part, int, list[Part], Sequence[Step]]] = field(default_factory=list)
    """Where, how many elements, of what, added how."""

    def numbers(self) -> Iterator[int]:
        """Yield what `read_cases` reads."""
        yield from (len(self.ranks), self.ranks[0].buffer_bytes, self.kind, self.compares)
        for view in self.ranks:
            given = self.given(view.rank)
            yield from (len(given), *given)
            made = [make(view) for make in self.programs]
            yield max(program.num_scratch for program in made)
            for program in made:
                yield from (len(program.rows), *program.rows)
            yield from [0] * (4 - len(made))
        yield len(self.results)
        for (rank, number, offset), count, parts, steps in self.results:
            rest = [number for part in parts for number in part]
            rest += [number for step in steps for number in (step.left, step.right, step.target)]
            yield from (7 + len(rest), rank, number, offset, count, len(parts), len(steps), *rest)


def _draw_length(draw: random.Random, most: int) -> int:
    return draw.choice((0, 1, 3, 64, draw.randrange(most), draw.randrange(max(most // 8, 1))))


def _one_part_each(draw: random.Random, ranks: Sequence[Ranks]) -> _Case:
    """Draw an all-reduce of one tensor, short or in one of the ways of a long one."""
    kind, size, buffer = draw.randrange(len(_WIDTHS)), len(ranks), ranks[0].buffer_bytes
    width, parts = _WIDTHS[kind], programs.one_part_each(size, kind, _WIDTHS[kind])
    if draw.random() < 0.5:  # not in the order of the ranks
        parts = replace(parts, holders=tuple(draw.sample(parts.holders, size)))
    count = draw.choice((_draw_length(draw, buffer // size // width), draw.randrange(3 * buffer // width)))
    if programs.is_short(ranks[0], parts, count):
        made: list[Callable[[Ranks], Program]] = [lambda view: programs.reduce_short(view, parts, count)]
        given = [count * width] * 2
    else:
        made = [
            lambda view: programs.reduce_long(view, parts, count),
            lambda view: programs.reduce_long(view, parts, count, lies_in_group=True),
            lambda view: programs.reduce_in_place(view, parts, count),
            lambda view: programs.reduce_long(view, parts, count, is_compared=True),
        ]
        given = [count * width]
    case = _Case(ranks, kind, lambda _: given, made)
    operands = [(rank, len(given) - 1, 0) for rank, _ in parts.holders]
    case.results = [((rank, 0, 0), count, operands, schedule(size)) for rank in range(size)]
    return case


def _several_parts(draw: random.Random, ranks: Sequence[Ranks]) -> _Case:
    """Draw an ordered all-reduce of several parts on each rank; the last ranks may have none."""
    kind, size, buffer = draw.randrange(len(_WIDTHS)), len(ranks), ranks[0].buffer_bytes
    num_shards = draw.randrange(1, 3 * size)
    holders, width = min(size, num_shards), _WIDTHS[kind]
    owned = [shard_range(rank, holders, num_shards) for rank in range(holders)]
    layout = [partial_nodes(each.start, each.stop, num_shards) for each in owned]
    placed = sorted((node, (rank, slot)) for rank, nodes in enumerate(layout) for slot, node in enumerate(nodes))
    parts = HeldParts(
        kind=kind,
        element_bytes=width,
        holders=tuple(holder for _, holder in placed),
        steps=schedule_nodes(tuple(node for node, _ in placed), num_shards),
        num_slots=max(len(nodes) for nodes in layout),
    )
    count = draw.choice((_draw_length(draw, buffer // size // width), draw.randrange(2 * buffer // width)))
    make = programs.reduce_short if programs.is_short(ranks[0], parts, count) else programs.reduce_long
    case = _Case(
        ranks,
        kind,
        lambda rank: [count * width] * (1 + parts.count_of(rank)),
        [lambda view: make(view, parts, count)],
    )
    operands = [(rank, 1 + slot, 0) for rank, slot in parts.holders]
    case.results = [((rank, 0, 0), count, operands, parts.steps) for rank in range(size)]
    return case


def _reduce(draw: random.Random, ranks: Sequence[Ranks]) -> _Case:
    kind, size, root = draw.randrange(len(_WIDTHS)), len(ranks), draw.randrange(len(ranks))
    width, parts = _WIDTHS[kind], programs.one_part_each(size, kind, _WIDTHS[kind])
    count = _draw_length(draw, 2 * ranks[0].buffer_bytes // width)
    make = [lambda view: programs.reduce_to(view, parts, count, root)]
    case = _Case(ranks, kind, lambda _: [count * width], make)
    case.results = [((root, 0, 0), count, [(rank, 0, 0) for rank in range(size)], parts.steps)]
    return case


def _reduce_scatter(draw: random.Random, ranks: Sequence[Ranks]) -> _Case:
    kind, size = draw.randrange(len(_WIDTHS)), len(ranks)
    width, parts = _WIDTHS[kind], programs.one_part_each(size, kind, _WIDTHS[kind])
    count = _draw_length(draw, 2 * ranks[0].buffer_bytes // size // width)
    make = [lambda view: programs.reduce_scatter(view, parts, count)]
    case = _Case(ranks, kind, lambda _: [count * width] * (1 + size), make)
    for target in range(size):
        operands = [(rank, 1 + target, 0) for rank in range(size)]
        case.results.append(((target, 0, 0), count, operands, parts.steps))
    return case


def _copies(draw: random.Random, ranks: Sequence[Ranks]) -> _Case:
    """Draw a broadcast, gather or scatter, of bytes."""
    size, root = len(ranks), draw.randrange(len(ranks))
    everyone, name = range(size), draw.choice(("broadcast", "gather", "gather to all", "scatter"))
    length = _draw_length(draw, 2 * ranks[0].buffer_bytes // size)
    takers = [root] if name == "gather" else [*everyone]
    make: Callable[[Ranks], Program]
    if name == "broadcast":
        make = lambda view: programs.broadcast(view, length, root)  # noqa: E731
        copies: list[tuple[Part, Part]] = [((rank, 0, 0), (root, 0, 0)) for rank in everyone]
    elif name == "scatter":
        make = lambda view: programs.scatter(view, length, root)  # noqa: E731
        copies = [((rank, 0, 0), (root, 1 + rank, 0)) for rank in everyone]
    else:
        make = lambda view: programs.gather(view, length, takes=view.rank in takers)  # noqa: E731
        copies = [((taker, 1 + rank, 0), (rank, 0, 0)) for taker in takers for rank in everyone]
    case = _Case(ranks, _BYTES, lambda _: [length] * (1 + size), [make])
    case.results = [(target, length, [source], ()) for target, source in copies]
    return case


def _all_to_all(draw: random.Random, ranks: Sequence[Ranks]) -> _Case:
    size = len(ranks)
    table = [[_draw_length(draw, 2 * ranks[0].buffer_bytes // size) for _ in ranks] for _ in ranks]
    columns, longest = [*zip(*table, strict=True)], max(map(max, table))
    made = [lambda view: programs.all_to_all(view, table[view.rank], columns[view.rank], longest)]
    case = _Case(ranks, _BYTES, lambda rank: [*table[rank], *columns[rank]], made, compares=False)
    for source, target in itertools.product(range(size), repeat=2):
        place = target, size + source, 0
        case.results.append((place, table[source][target], [(source, target, 0)], ()))
    return case


_DRAWS = (_one_part_each, _several_parts, _reduce, _reduce_scatter, _copies, _all_to_all)


def write_cases(path: Path, seed: int) -> None:
    """Write random calls, for 2 to 8 ranks."""
    draw, numbers = random.Random(seed), array("q", [_NUM_CASES])
    for number in range(_NUM_CASES):
        size, buffer = 2 + number % 7, _BUFFERS[number // 7 % 4 == 0]
        ranks = [Ranks(size, rank, buffer) for rank in range(size)]
        numbers.extend(_DRAWS[number // 28 % len(_DRAWS)](draw, ranks).numbers())
    path.write_bytes(numbers.tobytes())


def build(path: Path, options: Sequence[str] = (), source: Path = _NATIVE) -> None:
    """Compile `schedules.c` with the shm.c of a folder."""
    command = [*hatch_build.find_compiler(), "-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-pthread", *options]
    subprocess.run([*command, f"-I{source}", "-o", str(path), str(_SOURCE)], check=True)


def execute(path: Path, cases: Path, seed: int, seconds: int) -> tuple[bool, str]:
    """Run it; return whether all was right, and what it says of it."""
    command = [str(path), str(cases), str(seed), str(seconds)]
    options = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", env=options)
    if "unexpected memory mapping" in done.stderr:  # gcc's library, where the kernel spreads addresses further
        command = ["setarch", "-R", *command]
        done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", env=options)
    if done.returncode == 0:
        return True, done.stdout.strip()
    said = (done.stderr + done.stdout).splitlines()
    where = next((line for line in said if any(word in line for word in ("wrong:", "error:", "WARNING:"))), "")
    return False, where or f"exit code {done.returncode}"


def run(row: Row, seed: int) -> None:
    """Run without a sanitizer, then with each, with other programs and schedules each time."""
    with tempfile.TemporaryDirectory() as folder:
        built = {}
        for name, options in {"none": (), **_SANITIZERS}.items():
            built[name] = Path(folder, name.replace(", ", "-"))
            build(built[name], options)
        while row.has_time:
            name = [*built][row.num_tried % len(built)]
            write_cases(Path(folder, "cases"), seed + row.num_tried)
            is_right, said = execute(built[name], Path(folder, "cases"), seed + row.num_tried, 20)
            row.note("" if is_right else f"seed {seed + row.num_tried}, sanitizer {name}: {said}")


def sanitize(seed: int = 0, seconds: int = 20) -> bool:
    """Run under each sanitizer, and print a line each."""
    all_right = True
    with tempfile.TemporaryDirectory() as folder:
        write_cases(Path(folder, "cases"), seed)
        for name, options in _SANITIZERS.items():
            build(Path(folder, "program"), options)
            is_right, said = execute(Path(folder, "program"), Path(folder, "cases"), seed, seconds)
            print(f"{name}: {said}", flush=True)
            all_right &= is_right
    return all_right


if __name__ == "__main__":
    sys.exit(not sanitize())
