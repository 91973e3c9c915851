"""`curves.png`: loss and the test metrics of a run, drawn from its metrics file.

Matplotlib is imported inside the functions that draw. The import takes a quarter of a second and workers never draw.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.report.metrics_file import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STEP_COLOUR, _TRAIN_COLOUR, _TEST_COLOUR = "#b8c4d6", "#2f5d9b", "#c8553d"
_SIZE_INCHES = (9.0, 4.0)
_DPI = 130
_DECADE = 10
_NO_METRICS = {"kind", "epoch", "global_step", "train_loss", "samples_per_second", "learning_rate"}


def draw_curves(metrics: Path, picture: Path, title: str) -> None:
    """Draw the curves of a metrics file as a PNG; does nothing before the end of the first epoch.

    Left: training loss of each step and epoch, and test loss. Right: other test metrics, if there are any.
    """
    rows = list(read_metrics(metrics))
    epochs = [row for row in rows if row["kind"] == "epoch"]
    if not epochs:
        return
    from matplotlib.figure import Figure

    measured = [key for key, value in epochs[-1].items() if key not in _NO_METRICS and value is not None]
    losses = [key for key in measured if key.endswith("loss")]
    names = [key for key in measured if key not in losses]
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, 1 + bool(names), squeeze=False)[0]
    _draw_loss(axes[0], [row for row in rows if row["kind"] == "step"], epochs, losses)
    if names:
        _draw_metrics(axes[1], epochs, names)
    figure.savefig(picture)


def _draw_loss(axes: "Axes", steps: list[dict[str, Any]], epochs: list[dict[str, Any]], losses: list[str]) -> None:
    from matplotlib.ticker import StrMethodFormatter

    per_epoch = epochs[-1]["global_step"] / (epochs[-1]["epoch"] + 1)
    known = [row for row in steps if row["loss"] is not None]
    places = [row["global_step"] / per_epoch for row in known]
    axes.plot(places, [row["loss"] for row in known], color=_STEP_COLOUR, linewidth=0.8, label="training, each step")
    _draw_epochs(axes, epochs, "train_loss", "training, mean of the epoch", _TRAIN_COLOUR)
    for name in losses:
        label = "test" if name == "test_loss" else name.replace("_", " ")
        _draw_epochs(axes, epochs, name, label, _TEST_COLOUR if name == "test_loss" else None)
    shown = [value for row in [*steps, *epochs] for key, value in row.items() if key.endswith("loss") and value]
    if shown and 0 < _DECADE * min(shown) < max(shown):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    _finish(axes, "loss")


def _draw_metrics(axes: "Axes", epochs: list[dict[str, Any]], names: list[str]) -> None:
    from matplotlib.ticker import PercentFormatter

    for name in names:
        last = epochs[-1][name]
        shown = f"{last:.2%}" if name.endswith("accuracy") else f"{last:.4g}"
        what = f"{name.removeprefix('test_')} on the test set" if name.startswith("test_") else name.replace("_", " ")
        label = f"{what}, last {shown}"
        _draw_epochs(axes, epochs, name, label, _TEST_COLOUR if len(names) == 1 else None)
    if names == ["test_accuracy"]:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _finish(axes, ", ".join(name.removeprefix("test_") for name in names))


def _draw_epochs(axes: "Axes", epochs: list[dict[str, Any]], key: str, label: str, colour: str | None) -> None:
    known = [
        row for row in epochs if row.get(key) is not None
    ]  # a resumed run may have measured another metric at first
    places = [row["epoch"] + 1 for row in known]
    axes.plot(places, [row[key] for row in known], marker="o", markersize=3.5, color=colour, label=label)


def _finish(axes: "Axes", name: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch")
    axes.set_ylabel(name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
