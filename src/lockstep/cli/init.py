"""`lockstep init KIND`: write a config and a module that train at once, to be changed step by step."""

import csv
import sys
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.main import command
from lockstep.devices import take_inventory
from lockstep.devices.choose import NUM_CPU_WORKERS
from lockstep.errors import UsageError

_NUM_PICTURES = 40
_SIZE = 24
_NUM_ROWS = 400
_NUM_TEXTS = 200
_SHARDS = 4
"""The number in the configs that are copied."""


_KINDS = ("blank", "images", "table", "text")
_SAMPLES = {"images": "images", "table": "table.csv", "text": "texts.csv"}


def _complete_kind(incomplete: str) -> list[str]:
    return [name for name in _KINDS if name.startswith(incomplete)]


def init(
    kind: Annotated[
        str, typer.Argument(metavar=f"[{'|'.join(_KINDS)}]", help="What the data are.", autocompletion=_complete_kind)
    ] = "blank",
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to write.")] = Path(),
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="On how many cards, or processes of a CPU, it will train at most.  [default: asks]"),
    ] = None,
) -> None:
    """Write mine.yaml and mine.py, which train at once, and a few sample data.

    KIND is blank, images (a folder per class), table (a .csv) or text (texts and their classes).
    """
    if kind not in _KINDS:
        near = get_close_matches(kind, _KINDS, n=1)
        suggestion = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(f"{kind!r} is no kind of data. {suggestion}The kinds are {', '.join(_KINDS)}. (LS815)")
    names = ["mine.py", "mine.yaml", *([_SAMPLES[kind]] if kind in _SAMPLES else [])]
    there = [name for name in names if (folder / name).exists()]
    if {"mine.py", "mine.yaml"} & set(there):
        raise UsageError(f"{folder / there[0]} exists already, and is not overwritten. Name another folder. (LS815)")
    if workers is None and sys.stdin.isatty():
        found = len(take_inventory().gpus) or NUM_CPU_WORKERS
        workers = typer.prompt("On how many cards, or processes of a CPU, will it train at most?", found, type=int)
    starter = files("lockstep.cli.starter")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if kind in _SAMPLES and not there:  # else they are the user's own data
            _WRITERS[kind](folder / _SAMPLES[kind])
        for suffix in ("py", "yaml"):
            text = starter.joinpath(f"{kind}.{suffix}").read_text("utf-8")
            text = _with_shards(_with_own_classes(text, kind, folder), workers)
            (folder / f"mine.{suffix}").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be written: {error}. (LS815)") from error
    typer.echo(f"wrote {', '.join(str(folder / name) for name in names if name not in there)}")
    typer.echo(f"train:    lockstep train {folder / 'mine.yaml'}")
    typer.echo("evaluate: lockstep evaluate runs/mine")
    typer.echo("predict:  lockstep predict runs/mine --data mine:new -o predictions.csv")


def _with_shards(text: str, workers: int | None) -> str:
    """Return a config with a number of shards that its workers share evenly: a multiple of them, 4 or more."""
    workers = max(workers or 1, 1)
    return text.replace(f"num_shards: {_SHARDS} ", f"num_shards: {workers * -(-_SHARDS // workers)} ")


def _with_own_classes(text: str, kind: str, folder: Path) -> str:
    if kind != "images":
        return text
    found = [path for path in (folder / _SAMPLES[kind]).iterdir() if path.is_dir() and not path.name.startswith(".")]
    return text.replace("num_classes: 3}", f"num_classes: {len(found)}}}")


def _draw_pictures(folder: Path) -> None:
    import numpy as np
    from PIL import Image, ImageDraw

    random = np.random.default_rng(0)
    for name in ("circles", "crosses", "squares"):
        (folder / name).mkdir(parents=True)
        for number in range(_NUM_PICTURES):
            noise = random.integers(0, 60, (_SIZE, _SIZE, 3), dtype=np.uint8)
            picture = Image.fromarray(noise)
            draw = ImageDraw.Draw(picture)
            left, top = (int(place) for place in random.integers(1, 9, 2))
            box = (left, top, left + 13, top + 13)
            colour = tuple(int(part) for part in random.integers(120, 255, 3))
            if name == "circles":
                draw.ellipse(box, outline=colour, width=2)
            elif name == "squares":
                draw.rectangle(box, outline=colour, width=2)
            else:
                draw.line(box, fill=colour, width=2)
                draw.line((box[0], box[3], box[2], box[1]), fill=colour, width=2)
            picture.save(folder / name / f"{number:03d}.png")


def _write_table(path: Path) -> None:
    import numpy as np

    random = np.random.default_rng(0)
    inputs = random.normal(size=(_NUM_ROWS, 4))
    target = inputs[:, 0] - 2 * inputs[:, 1] + inputs[:, 2] * inputs[:, 3] + random.normal(0, 0.1, _NUM_ROWS)
    rows = np.column_stack([inputs, target])
    np.savetxt(path, rows, "%.4f", delimiter=",", header="first,second,third,fourth,target", comments="")


def _write_texts(path: Path) -> None:
    import numpy as np

    random = np.random.default_rng(0)
    things = ("film", "book", "meal", "song", "walk", "talk")
    words = {"good": ("wonderful", "lovely", "bright", "kind"), "bad": ("awful", "boring", "dull", "rude")}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(_NUM_TEXTS):
            label = ("good", "bad")[number % 2]
            first, second = (words[label][int(place)] for place in random.integers(0, 4, 2))
            thing = things[int(random.integers(0, len(things)))]
            writer.writerow([f"The {thing} was {first}, and so {second}.", label])


_WRITERS = {"images": _draw_pictures, "table": _write_table, "text": _write_texts}
COMMAND = command(init)
