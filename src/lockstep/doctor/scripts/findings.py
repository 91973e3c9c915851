"""What rules report, and in which words."""

import ast
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Level(Enum):
    MISTAKE = "mistake"
    """It trains something else than meant, fails, or waits for ever."""
    NOTE = "note"
    """It works, and is seldom meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFinding:
    rule: str
    level: Level
    line: int
    text: str
    mended: str
    """The line as it should be, or the line to add."""


_MISTAKES: Final = {
    "batch-size": "A DataLoader's batch size is that of one rank, and {} says that it is that of all.",
    "collective-on-some-ranks": (
        "Only some ranks call {} here: they wait for ever, or take the others' next call for it."
    ),
    "device-ids": "{}",
    "gradients-divided": "The wrapper has averaged these gradients: divided by the number of ranks they are too small.",
    "gradients-summed": "The wrapper has averaged these gradients: their sum is too large by the number of ranks.",
    "loss-divided": "The wrapper averages over the ranks: a loss that is divided by their number is too small.",
    "map-location": "Tensors that were saved from a GPU are loaded onto the same GPU, by every rank.",
    "module-in-names": 'The saved names begin with "module.": a model that is not wrapped does not load them.',
    "norm-summed": "The gradients are the same on all ranks, and so is their norm: the sum of all is too large.",
    "no-sampler": (
        "Every rank reads all samples: an epoch is not divided over the ranks, and takes as long as with one."
    ),
    "one-device": "Every rank uses device {}.",
    "own-split": (
        "Each rank draws its own order here, so the parts overlap: one rank trains on what another one evaluates."
    ),
    "resumed-epoch": "After a resume the samples of the first epoch come in the order of another one.",
    "same-epoch": "set_epoch always gets the same number: the samples come in the same order in every epoch.",
    "saved-by-all": "Every rank writes this file: they write over each other, and a reader may find half of one.",
    "set-epoch": "set_epoch is never called: the samples come in the same order in every epoch.",
    "step-left-out": "A rank whose loss is not finite leaves the backward out, for which the others wait.",
}
_NOTES: Final = {
    "fixed-port": "A second job on this host takes the same port, and one of them ends with an error.",
    "inner-module": "A forward through .module: torch's wrapper averages no gradients then (Lockstep's does).",
    "loss-of-one-rank": "This is the loss of one rank's samples, not the mean over all ranks.",
    "one-seed": (
        "All ranks draw the same random numbers (line {}), so their samples get the same noise, masks or augmentation."
    ),
    "own-folder": "Each rank has a time of its own, so they write to different folders.",
    "padded-evaluation": "Where the samples do not divide by the ranks, some are counted twice in this evaluation.",
    "printed-by-all": "Every rank prints this line.",
    "weighted-mean": (
        "Each rank divides by the class weights of its own targets, and the mean of these means is not that over all."
    ),
}


def finding(
    rule: str, node: ast.expr | ast.stmt, mended: str, *, naming: str = "", level: Level | None = None
) -> ScriptFinding:
    """Return what a rule has found at a node; `naming` is what its text names, `level` replaces the rule's own."""
    text = {**_MISTAKES, **_NOTES}[rule].format(naming)
    usual = Level.MISTAKE if rule in _MISTAKES else Level.NOTE
    return ScriptFinding(rule=rule, level=level or usual, line=node.lineno, text=text, mended=mended)
