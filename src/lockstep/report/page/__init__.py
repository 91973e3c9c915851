"""`report.html`: one page about a run, or about several side by side, that needs no network.

    run_data     what a run directory says: metrics, config, starts, checkpoints, recording
    measure      how long a step would take on another number of workers
    figures      curves, the timeline of the last steps, and bars, as figures of Bokeh
    texts        every text of the page in English and in Chinese, and its colours
    page.html    the page itself, as a template of Jinja, which escapes what a run says

Bokeh is imported by `figures` and `make_page` alone, because its import takes long.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from lockstep.checkpoint.atomic_write import atomic_write_text
from lockstep.doctor.slow import SlowReport, find_slow, recorded_usage
from lockstep.errors import missing_extra
from lockstep.report.page.measure import Forecast, forecast_steps, measure_steps
from lockstep.report.page.run_data import RunData
from lockstep.report.page.texts import SHARE_COLOURS, TEXTS
from lockstep.runs.audit_log import describe_log
from lockstep.runs.listing import NOT_MEASURED, find_differences
from lockstep.version import VERSION

__all__ = ["write_page"]

_CURVES: Final[Mapping[str, tuple[str | None, Sequence[str]]]] = {
    "learning_rate": ("learning_rate", ()),
    "grad_norm": ("grad_norm", ()),
    "samples_per_second": (None, ("samples_per_second",)),
}
"""After the loss and the metrics: the key of each step, and those of each epoch."""
_PARTS: Final = {
    "loading": "loading",
    "forward and backward": "compute",
    "communication": "gradients",
    "waiting": "others",
    "update": "update",
    "evaluating": "evaluating",
    "saving": "saving",
}
"""Parts of a worker's time, as the doctor calls them, and on the page; the others are the rest."""


def write_page(runs: Sequence[RunData], path: Path) -> None:
    atomic_write_text(path, make_page(runs))


def make_page(runs: Sequence[RunData]) -> str:
    try:
        from bokeh.embed import components
        from bokeh.resources import Resources
        from jinja2 import Environment
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    differences = find_differences([run.listed for run in runs]) if len(runs) > 1 else []
    figures = _draw(runs)
    scripts, divisions = components(figures) if figures else ("", {})
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": _number, "json": _json, "workers": _workers}
    source = files("lockstep.report.page").joinpath("page.html").read_text(encoding="utf-8")
    page = environment.from_string(source).render(
        runs=runs,
        differences=differences,
        different_keys=dict.fromkeys(key for each in differences for key in each),
        summary=_summary(runs),
        shares=_shares,
        look_for_slow=_look_for_slow,
        forecast=_forecast,
        figures=divisions,
        texts=TEXTS,
        colours=SHARE_COLOURS,
        library=Resources(mode="inline", components=["bokeh"]).render(),
        scripts=scripts,
        version=VERSION,
    )
    return page.lstrip()  # of the lines between the macros


def _draw(runs: Sequence[RunData]) -> dict[str, Any]:
    from lockstep.report.page.figures import draw_curve, draw_memory, draw_timeline

    measured = by_metric([key for run in runs for row in run.marks for key in row])
    wanted: dict[str, tuple[str | None, Sequence[str]]] = {"loss": ("loss", ("train_loss", *measured.pop("loss", ())))}
    wanted |= {keys[0] if len(keys) == 1 else metric: (None, keys) for metric, keys in measured.items()}
    wanted |= _CURVES
    figures = {
        f"curve_{name}": draw_curve(runs, step_key, epoch_keys) for name, (step_key, epoch_keys) in wanted.items()
    }
    for number, run in enumerate(runs):
        figures[f"memory-{number}"] = draw_memory(run)
        figures[f"timeline-{number}"] = draw_timeline(run)
    return {name: each for name, each in figures.items() if each is not None}


def by_metric(columns: Iterable[str]) -> dict[str, list[str]]:
    """Return the columns that evaluations fill, by metric: `test_loss` and `val_loss` are the loss of two sets."""
    measured = [each for each in dict.fromkeys(columns) if each not in NOT_MEASURED]
    sets = {each.removesuffix("_loss") for each in measured if each.endswith("_loss")}
    sets = {each for each in sets if not any(each.startswith(f"{other}_") for other in sets)}
    found: dict[str, list[str]] = {}
    for each in measured:
        of_set = next((name for name in sets if each.startswith(f"{name}_")), None)
        found.setdefault(each if of_set is None else each.removeprefix(f"{of_set}_"), []).append(each)
    return found


def _summary(runs: Sequence[RunData]) -> dict[str, list[str]]:
    return {
        "state": [f"{run.listed.state} {run.listed.reason}".strip() for run in runs],
        "progress": [f"{run.listed.epoch} / {run.listed.epochs or '?'}" for run in runs],
        "results": [
            ", ".join(f"{name} {_number(value)}" for name, value in run.listed.metrics.items()) for run in runs
        ],
        "speed": [_number(run.epochs[-1].get("samples_per_second")) if run.epochs else "" for run in runs],
        "workers": ["; ".join(run.listed.workers) for run in runs],
        "digest": [run.listed.digest or "" for run in runs],
        "audit": [describe_log(run.listed.path) for run in runs],
        "started": [run.listed.started or "" for run in runs],
        "command": [str(next(iter(run.starts), {}).get("command", "")) for run in runs],
    }


def _shares(run: RunData) -> dict[int, dict[str, float]]:
    """Return the seconds of each part of the time of each worker in its last steps, by rank; empty if too short."""
    found: dict[int, dict[str, float]] = {}
    for use in _look_for_slow(run).workers:
        found[use.rank] = dict.fromkeys(SHARE_COLOURS, 0.0)
        for part, share in use.shares.items():
            found[use.rank][_PARTS.get(part, "rest")] += share * use.seconds
    return found


def _look_for_slow(run: RunData) -> SlowReport:
    return find_slow(run.workers, recorded_usage(run.launcher, run.workers))


def _forecast(run: RunData) -> tuple[list[Forecast], list[str]]:
    """Return a forecast for each number of workers, and the text beside each; empty if too little was recorded."""
    measured = measure_steps(run)
    found: list[Forecast] = forecast_steps(measured) if measured is not None else []
    start = next(iter(run.starts), {})
    on_cpu = "cpu" in str(start.get("workers", ""))
    cores = start.get("system", {}).get("cores") or os.cpu_count() or 1
    return found, forecast_notes(found, cores=cores if on_cpu else None)


def forecast_notes(found: Sequence[Forecast], *, cores: int | None) -> list[str]:
    """Return the text that stands beside each forecast; `cores` is None where a worker does not need one of its own."""
    base = next((each.workers for each in found if each.is_measured), 0)
    notes: list[str] = []
    for each in found:
        note = "measured" if each.is_measured else "forecast_at_best" if each.is_best_case else ""
        if cores is not None and each.workers < base:
            note = "forecast_at_most"
        if cores is not None and each.workers > cores and not each.is_measured:
            note = "forecast_cores"
        notes.append(note)
    return notes


def _workers(workers: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"rank {each['rank']} {each.get('reason', '')}".strip() for each in workers)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False, default=str)


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, int | float) else "-"
