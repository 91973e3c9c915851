"""The figures of the page, made with Bokeh: they can be moved and zoomed, and show values below the mouse.

They have no background and middle grey axes, so they look right on a light and on a dark page.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from bokeh.models import CategoricalAxis, ColumnDataSource, DataRange1d, FactorRange, HoverTool
from bokeh.models.annotations import Legend
from bokeh.plotting import figure
from numpy.typing import NDArray

from lockstep.doctor.slow import recorded_usage
from lockstep.recording import EventKind
from lockstep.recording.reading import clock_offsets
from lockstep.report.page.measure import phases
from lockstep.report.page.run_data import RunData
from lockstep.report.page.texts import AXIS_COLOUR, RUN_COLOURS, SHARE_COLOURS

_MOST_POINTS: Final = 10_000
_MOST_EVENTS: Final = 4000
_LAST_STEPS: Final = 12
_PHASES: Final = {2: "rest", 4: "gradients", 5: "others", 6: "update"}
_TOOLS: Final = "xpan,xwheel_zoom,box_zoom,reset"


def draw_curve(runs: Sequence[RunData], step_key: str | None, epoch_keys: Sequence[str]) -> Any | None:
    """Return a figure with a value of each step, and values of each epoch, over the steps; None if there are none."""
    plot = _blank(active_scroll="xwheel_zoom", x_axis_label="step")
    drawn: list[tuple[str, list[Any]]] = []
    for run, colour in zip(runs, _cycle(len(runs)), strict=True):
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        if step_key is not None and (points := _points(run.steps, step_key)) is not None:
            faint = 0.8 if any(_points(run.marks, key) is not None for key in epoch_keys) else 1.0
            line = plot.line(*points, color=colour, alpha=faint, line_width=1.2)
            drawn.append((f"{prefix}each step", [line]))
        for number, key in enumerate(epoch_keys):
            if (points := _points(run.marks, key)) is not None:
                shade = colour if len(runs) > 1 else RUN_COLOURS[(number + bool(step_key)) % len(RUN_COLOURS)]
                dash = "solid" if key.startswith("train_") else "dashed"
                line = plot.line(*points, color=shade, line_width=2, line_dash=dash)
                dots = plot.scatter(*points, color=shade, size=5)
                label = "mean of the epoch" if key == "train_loss" else key.replace("_", " ")
                drawn.append((f"{prefix}{label}", [line, dots]))
    if not drawn:
        return None
    largest = max(float(np.abs(line.data_source.data["y"]).max()) for _, (line, *_) in drawn)
    plot.y_range.default_span = 0.2 * largest or 1.0  # of a value that never changes
    if len(drawn) > 1:
        _add_legend(plot, drawn)
    lines = [renderers[0] for _, renderers in drawn]
    plot.add_tools(HoverTool(renderers=lines, tooltips=[("", "$name"), ("step", "@x{0,0}"), ("", "@y{0.[0000]}")]))
    for name, renderers in drawn:
        renderers[0].name = name
    return plot


def draw_memory(run: RunData) -> Any | None:
    """Return a figure with the memory of each worker, as the launcher saw it; None if that was not recorded."""
    usage = recorded_usage(run.launcher)
    plot = _blank(active_scroll="xwheel_zoom", x_axis_label="s")
    drawn: list[tuple[str, list[Any]]] = []
    for file, colour in zip(run.workers, _cycle(len(run.workers)), strict=True):
        samples = usage.get(file.header.pid, ())
        if len(samples) > 1:
            seconds = np.array([(each.moment_ns - file.header.opened_ns) / 1e9 for each in samples])
            mebibytes = np.array([each.usage.get("memory_bytes", 0) / 2**20 for each in samples])
            line = plot.line(seconds, mebibytes, color=colour, line_width=1.5, name=f"rank {file.header.rank}")
            drawn.append((f"rank {file.header.rank}", [line]))
    if not drawn:
        return None
    _add_legend(plot, drawn)
    plot.y_range.start = 0
    plot.add_tools(HoverTool(tooltips=[("", "$name"), ("seconds", "@x{0.0}"), ("MiB", "@y{0,0}")]))
    return plot


def draw_timeline(run: RunData) -> Any | None:
    workers = run.workers
    bars = [
        bar
        for file, offset in zip(workers, clock_offsets(workers), strict=True)
        for bar in _worker_bars(file.table, file.text, f"{file.header.rank}", offset)
    ]
    if not bars:
        return None
    if len(bars) > _MOST_EVENTS:  # the latest of all workers, not all of the last workers
        since = sorted(bar["left"] for bar in bars)[-_MOST_EVENTS]
        bars = [bar for bar in bars if bar["left"] >= since]
    start = min(bar["left"] for bar in bars)
    columns: dict[str, list[Any]] = {key: [bar[key] for bar in bars] for key in bars[0]}
    for key in ("left", "right"):
        columns[key] = [(value - start) / 1e6 for value in columns[key]]
    columns["length"] = [right - left for left, right in zip(columns["left"], columns["right"], strict=True)]
    rows = [(f"{each.header.rank}", kind) for each in reversed(workers) for kind in ("messages", "shards", "phases")]
    plot = _blank(height=70 + 66 * len(workers), y_range=FactorRange(factors=rows), x_axis_label="ms")
    plot.y_range.range_padding = 0.02
    bars_drawn = plot.hbar(
        y="row",
        left="left",
        right="right",
        height=0.82,
        color="colour",
        line_color=None,
        source=ColumnDataSource(columns),
    )
    tips = [("", "@what"), ("step", "@step"), ("ms", "@length{0.00}"), ("bytes", "@size{0,0}")]
    plot.add_tools(HoverTool(renderers=[bars_drawn], tooltips=tips))
    return plot


def _worker_bars(table: NDArray[Any], text_of: Any, rank: str, offset: int) -> list[dict[str, Any]]:
    found = phases(table)
    if not len(found):
        return []
    first_step = int(found[:, 3].max()) - _LAST_STEPS
    since = int(found[found[:, 3] > first_step, 0].min())

    def bar(row: str, begin: int, end: int, colour: str, what: str, step: int, size: int = 0) -> dict[str, Any]:
        place = {"left": begin - offset, "right": end - offset, "row": (rank, row)}
        return place | {"colour": colour, "what": what, "step": step, "size": size}

    bars = [
        bar("phases", begin, end, SHARE_COLOURS[_PHASES[phase]], _PHASES[phase], step)
        for begin, end, phase, step in found.tolist()
        if phase in _PHASES and begin >= since
    ]
    rows = {
        EventKind.LOADING: ("phases", "loading"),
        EventKind.EVALUATING: ("phases", "evaluating"),
        EventKind.SAVING: ("phases", "saving"),
        EventKind.SHARD: ("shards", "compute"),
        EventKind.COLLECTIVE: ("messages", "gradients"),
    }
    recent = table[
        (table["begin"] >= since) & (table["end"] > 0) & np.isin(table["kind"], [int(kind) for kind in rows])
    ]
    for event in recent:
        kind = EventKind(int(event["kind"]))
        row, share = rows[kind]
        what = text_of(int(event["text"])) or f"{kind.name.lower()} {int(event['index'])}"
        times = int(event["begin"]), int(event["end"])
        bars.append(bar(row, *times, SHARE_COLOURS[share], what, int(event["step"]), int(event["size"])))
    return bars


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
    known = [(row["global_step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    if not known:
        return None
    steps, values = np.array(known, np.float64).T
    return _thin(steps.astype(np.int32), values.astype(np.float32))


def _thin(steps: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return at most `_MOST_POINTS` points: of each group its smallest and its largest, so that no peak is lost."""
    if len(steps) <= _MOST_POINTS:
        return steps, values
    chosen = set[int]()
    for group in np.array_split(np.arange(len(steps)), _MOST_POINTS // 2):
        chosen |= {int(group[values[group].argmin()]), int(group[values[group].argmax()])}
    places = np.array(sorted(chosen))
    return steps[places], values[places]


def _cycle(count: int) -> list[str]:
    return [RUN_COLOURS[number % len(RUN_COLOURS)] for number in range(count)]


def _blank(*, height: int = 260, active_scroll: str | None = None, **options: Any) -> Any:
    if "y_range" not in options:
        options["y_range"] = DataRange1d(only_visible=True)
    plot = figure(height=height, sizing_mode="stretch_width", tools=_TOOLS, toolbar_location="above", **options)
    if active_scroll is None:
        plot.toolbar.active_scroll = None
    plot.toolbar.logo = None
    plot.background_fill_color = plot.border_fill_color = None
    plot.outline_line_color = None
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = AXIS_COLOUR, 0.25
    for axis in plot.axis:
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = AXIS_COLOUR
        axis.major_label_text_color = axis.axis_label_text_color = AXIS_COLOUR
        if isinstance(axis, CategoricalAxis):
            axis.group_text_color = axis.separator_line_color = AXIS_COLOUR
            axis.separator_line_alpha = 0.5
    return plot


def _add_legend(plot: Any, drawn: list[tuple[str, list[Any]]]) -> None:
    legend = Legend(
        items=drawn, orientation="horizontal", click_policy="hide", background_fill_alpha=0, border_line_alpha=0
    )
    legend.label_text_color = AXIS_COLOUR
    legend.update(margin=0, padding=4, spacing=14)
    legend.nrows = -(-len(drawn) // 4)
    plot.add_layout(legend, "below")
