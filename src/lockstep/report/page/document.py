"""The page itself: its sections, and one file with everything in it."""

import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from lockstep.checkpoint.atomic_write import atomic_write_text
from lockstep.report.page.measure import Forecast, forecast_steps
from lockstep.report.page.measured import measure_steps
from lockstep.report.page.run_data import RunData
from lockstep.report.page.tables import (
    changes_table,
    checkpoints_table,
    config_table,
    environment,
    forecast_table,
    share_bars,
    slowest_part,
    summary_table,
)
from lockstep.report.page.texts import TEXTS
from lockstep.report.page.words import both, heading
from lockstep.runs.listing import find_differences
from lockstep.version import VERSION

_CURVES: Final = {
    "loss": ("loss", ("train_loss", "test_loss")),
    "learning_rate": ("learning_rate", ()),
    "grad_norm": ("grad_norm", ()),
    "samples_per_second": (None, ("samples_per_second",)),
}


def write_page(runs: Sequence[RunData], path: Path) -> None:
    """Write the page about some runs as one file (local)."""
    atomic_write_text(path, make_page(runs))


def make_page(runs: Sequence[RunData]) -> str:
    from bokeh.embed import components
    from bokeh.resources import Resources
    from jinja2 import Environment

    figures: dict[str, Any] = {}
    sections = [("summary", None, summary_table(runs)), _curves(runs, figures)]
    if len(runs) > 1:
        sections.append(
            ("differences", "config_differs", config_table(runs, find_differences([r.listed for r in runs])))
        )
    for number, run in enumerate(runs):
        sections += _of_one(run, f"-{number}" if len(runs) > 1 else "", figures)
    scripts, divisions = components(figures) if figures else ("", {})
    for name, division in divisions.items():
        sections = [(key, head, body.replace(_place(name), division)) for key, head, body in sections]
    source = files("lockstep.report.page").joinpath("page.html").read_text(encoding="utf-8")
    title = TEXTS["title" if len(runs) == 1 else "title_many"]
    return (
        Environment(autoescape=True)
        .from_string(source)
        .render(
            title=f"{runs[0].name if len(runs) == 1 else title[0]} - Lockstep",
            heading=both("title") + " " + f"<code>{escape(runs[0].name)}</code>"
            if len(runs) == 1
            else both("title_many"),
            library=Resources(mode="inline", components=["bokeh"]).render(),
            sections=[
                {"name": name, "heading": both(head) if head else "", "body": body}
                for name, head, body in sections
                if body
            ],
            scripts=scripts,
            footer=f"{both('made_by')} {VERSION}",
        )
    )


def _curves(runs: Sequence[RunData], figures: dict[str, Any]) -> tuple[str, str, str]:
    from lockstep.report.page.figures import draw_curve

    wanted: dict[str, tuple[str | None, Sequence[str]]] = {"loss": _CURVES["loss"]}
    names = [key for run in runs for row in run.epochs for key in row if key.startswith("test_") and key != "test_loss"]
    names += [key for run in runs for row in run.evaluations for key in row if key not in {"kind", "global_step"}]
    wanted |= {key: (None, (key,)) for key in dict.fromkeys(names)}
    wanted |= {key: value for key, value in _CURVES.items() if key != "loss"}
    body = ""
    for name, (step_key, epoch_keys) in wanted.items():
        plot = draw_curve(runs, step_key, epoch_keys)
        if plot is not None:
            figures[f"curve_{name}"] = plot
            body += heading(name) + f'<div class="figure">{_place(f"curve_{name}")}</div>'
    how = f'<p class="how">{both("curves_how")}</p>' if body else ""
    return "curves", "curves", how + body


def _of_one(run: RunData, suffix: str, figures: dict[str, Any]) -> list[tuple[str, str | None, str]]:
    """Return the sections that each run has for itself."""
    from lockstep.report.page.figures import draw_memory, draw_timeline

    of_run = f"<p><b>{escape(run.name)}</b></p>" if suffix else ""
    memory = draw_memory(run)
    used = ""
    if memory is not None:
        figures[f"memory{suffix}"] = memory
        used = heading("memory") + f'<div class="figure">{_place(f"memory{suffix}")}</div>'
    timeline = draw_timeline(run)
    if timeline is not None:
        figures[f"timeline{suffix}"] = timeline
        drawn = f'<p class="how">{both("timeline_how")}</p><div class="figure">{_place(f"timeline{suffix}")}</div>'
    else:
        drawn = f"<p>{both('nothing_recorded')}</p>"
    return [
        (f"where{suffix}", "where", of_run + share_bars(run) + slowest_part(run) + used),
        (f"timeline{suffix}", "timeline", of_run + drawn),
        (f"forecast{suffix}", "forecast", of_run + _forecast(run)),
        (f"changes{suffix}", "changes", of_run + changes_table(run)),
        (f"checkpoints{suffix}", "checkpoints", of_run + checkpoints_table(run)),
        (f"config{suffix}", "config", of_run + config_table([run], None)),
        (f"environment{suffix}", "environment", of_run + environment(run)),
    ]


def _forecast(run: RunData) -> str:
    measured = measure_steps(run)
    found: list[Forecast] = forecast_steps(measured) if measured is not None else []
    if not found:
        return f"<p>{both('few_steps')}</p>"
    start = next(iter(run.starts), {})
    on_cpu = "cpu" in str(start.get("workers", ""))
    cores = start.get("system", {}).get("cores") or os.cpu_count() or 1
    batch_size = run.listed.config.get("batch_size")
    return forecast_table(found, batch_size, cores=cores if on_cpu else None)


def _place(name: str) -> str:
    return f"<!-- {name} -->"
