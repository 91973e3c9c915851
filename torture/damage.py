"""Checkpoints of which bytes were changed, cut off, moved or set to zero: refused, or the same to the last bit."""

import random
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

from lockstep.checkpoint.file import load_checkpoint, save_checkpoint, state_digest
from lockstep.checkpoint.manifest import Checkpoint, Manifest
from lockstep.errors import CheckpointError
from torture.row import Row


def run(row: Row, seed: int) -> None:
    """Damage copies of a checkpoint, and load them."""
    draw = random.Random(f"{seed} damage")
    counts = {"refused": 0, "equal": 0}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whole.ckpt"
        expected = _write(path)
        whole = path.read_bytes()
        broken = Path(folder) / "broken.ckpt"
        while row.has_time:
            how, data = _damage(draw, whole)
            broken.write_bytes(data)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    loaded = load_checkpoint(broken)
            except CheckpointError:
                counts["refused"] += 1
                row.note()
                continue
            except Exception as error:  # noqa: BLE001 - any other error is what this looks for
                row.note(f"try {row.num_tried} ({how}): {type(error).__name__}: {error}")
                continue
            is_equal = state_digest(dict(loaded.model)) == expected and loaded.manifest.global_step == 25
            counts["equal"] += is_equal
            row.note("" if is_equal else f"try {row.num_tried} ({how}): loaded with other values")
    row.figures.update({name: str(count) for name, count in counts.items()})


def _write(path: Path) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 40), nn.BatchNorm1d(40), nn.Linear(40, 9)).state_dict()
    digest = state_digest(model)
    manifest = Manifest(
        epoch=2,
        step=3,
        global_step=25,
        num_shards=4,
        seed=7,
        config=None,
        scheduler=None,
        digest=digest,
        optimizer={"lr": 0.125},
    )
    moments = {"optimizer/state/0/exp_avg": torch.ones(40, 9)}
    save_checkpoint(path, Checkpoint(model=model, optimizer=moments, manifest=manifest))
    return digest


def _damage(draw: random.Random, whole: bytes) -> tuple[str, bytes]:
    """Return how a file was damaged, and its bytes. Half of the places are in the header."""
    how = draw.choice(["bit", "byte", "cut", "zeros", "moved", "twice", "digit"])
    size = len(whole)
    place = draw.randrange(min(size, 4096) if draw.random() < 0.5 else size)
    length = draw.choice([1, 8, 512, 4096])
    changed = bytearray(whole)
    if how == "bit":
        changed[place] ^= 1 << draw.randrange(8)
    elif how == "byte":
        changed[place] = draw.randrange(256)
    elif how == "cut":
        del changed[place:]
    elif how == "zeros":
        changed[place : place + length] = bytes(len(changed[place : place + length]))
    elif how == "moved":
        del changed[place : place + length]
    elif how == "twice":
        changed[place:place] = changed[place : place + length]
    else:  # a number of the manifest out of its range, or of another kind
        digits = [index for index in range(min(size, 8192)) if chr(whole[index]).isdigit()]
        place = draw.choice(digits)
        changed[place : place + 1] = draw.choice([b"9" * 30, b"-1", b"1e999", b"NaN", b"null", b'"1"'])
    return f"{how} at {place}", bytes(changed)
