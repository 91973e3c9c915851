"""`report.html`: one page about a run, or about several side by side, that needs no network.

    run_data     what a run directory says: metrics, config, starts, checkpoints, recording
    measure      where the time of each worker went, and how long a step would take on another number of workers
    figures      curves, the timeline of the last steps, and bars, as figures of Bokeh
    texts        every text of the page in English and in Chinese, and its colours

Bokeh is imported by `figures` and `make_page` alone, because its import takes long.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from lockstep.checkpoint.atomic_write import atomic_write_text
from lockstep.doctor.slow import find_slow, recorded_usage
from lockstep.report.page.measure import SHARES, Forecast, forecast_steps, measure_steps, time_shares
from lockstep.report.page.run_data import RunData
from lockstep.report.page.texts import SHARE_COLOURS, TEXTS, both, heading
from lockstep.runs.listing import find_differences
from lockstep.version import VERSION

__all__ = ["write_page"]

_SMALL_SHARE = 0.001
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


def summary_table(runs: Sequence[RunData]) -> str:
    rows = {
        "state": [f"{run.listed.state} {run.listed.reason}".strip() for run in runs],
        "progress": [f"{run.listed.epoch} / {run.listed.epochs or '?'}" for run in runs],
        "results": [
            ", ".join(f"{name} {_number(value)}" for name, value in run.listed.metrics.items()) for run in runs
        ],
        "speed": [_number(run.epochs[-1].get("samples_per_second")) if run.epochs else "" for run in runs],
        "workers": ["; ".join(run.listed.workers) for run in runs],
        "digest": [run.listed.digest or "" for run in runs],
        "started": [run.listed.started or "" for run in runs],
        "command": [str(next(iter(run.starts), {}).get("command", "")) for run in runs],
    }
    head = [both("run"), *(f"<code>{escape(run.name)}</code>" for run in runs)]
    return _table(head, ([both(name), *map(escape, values)] for name, values in rows.items() if any(values)))


def share_bars(run: RunData) -> str:
    shares = {each.header.rank: time_shares(each.table) for each in run.workers}
    shares = {rank: found for rank, found in shares.items() if sum(found.values()) > 0}
    if not shares:
        return f"<p>{both('nothing_recorded')}</p>"
    bars = "".join(f"<div>{rank}</div><div class='bar'>{_bar(found)}</div>" for rank, found in sorted(shares.items()))
    total = sum(sum(found.values()) for found in shares.values())
    parts = {share: sum(found[share] for found in shares.values()) / total for share in SHARES}
    key = "".join(
        f'<span><i style="background:{SHARE_COLOURS[share]}"></i>{both(share)} {part:.1%}</span>'
        for share, part in parts.items()
        if part > _SMALL_SHARE
    )
    return f'<p class="how">{both("where_how")}</p><div class="bars">{bars}</div><div class="key">{key}</div>'


def _bar(shares: Mapping[str, float]) -> str:
    total = sum(shares.values())
    return "".join(
        f'<span style="width:{shares[share] / total:.3%};background:{SHARE_COLOURS[share]}" '
        f'title="{share}: {shares[share]:.2f} s, {shares[share] / total:.1%}"></span>'
        for share in SHARES
        if shares[share] / total > _SMALL_SHARE
    )


def slowest_part(run: RunData) -> str:
    """Return what bounds the last steps, and why a worker is slow, in the words of the doctor; empty if too short."""
    launcher = next((each for each in run.recording if each.header.worker < 0), None)
    begins = [int(each.table["begin"].min()) for each in run.workers if len(each.table)]
    usage = recorded_usage(launcher, min(begins, default=0)) if launcher is not None else {}
    found = find_slow(run.workers, usage)
    return f'<p lang="en">{escape(found.text)}</p>' if found.workers else ""


def forecast_table(found: Sequence[Forecast], batch_size: Any, *, cores: int | None) -> str:
    """Return the forecast for each number of workers; `cores` is None where a worker does not need one of its own."""
    base = next(each for each in found if each.is_measured)
    rows = []
    for each in found:
        note = both("measured") if each.is_measured else ""
        if each.is_best_case:
            note = both("forecast_at_best")
        if cores is not None and each.workers < base.workers:
            note = both("forecast_at_most")
        if cores is not None and each.workers > cores and not each.is_measured:
            note = both("forecast_cores")
        speed = f"{batch_size / each.seconds:,.0f}" if isinstance(batch_size, int) else ""
        milliseconds = f"{each.seconds * 1e3:.1f} ({each.low * 1e3:.1f} - {each.high * 1e3:.1f})"
        rows.append([f"{each.workers}", milliseconds, speed, f"{base.seconds / each.seconds:.2f}", note])
    how = f'<p class="how">{both("forecast_how")}</p>'
    if any(each.is_best_case for each in found):
        how += f'<p class="how">{both("forecast_best")}</p>'
    if cores is not None and found[0].workers < base.workers:
        how += f'<p class="how">{both("forecast_most")}</p>'
    return how + _table([both("workers"), both("seconds_per_step"), both("speed"), both("speedup"), ""], rows)


def changes_table(run: RunData) -> str:
    if not run.changes:
        return f"<p>{both('no_changes')}</p>"
    rows = [
        [
            f"{row['epoch'] + 1}, {row['step'] + 1}",
            _workers(row.get("lost", ())),
            _workers(row.get("joined", ())),
            _workers(row.get("left", ())),
            f"{row['seconds']:.2f} s" if isinstance(row.get("seconds"), float) else "",
        ]
        for row in run.changes
    ]
    return _table([both(name) for name in ("when", "lost", "joined", "left", "took")], rows)


def checkpoints_table(run: RunData) -> str:
    rows = [
        [f"<code>{escape(name)}</code>", f"{found.get('epoch')}, {found.get('step')}", escape(str(found.get("digest")))]
        for name, found in run.checkpoints.items()
    ]
    fingerprint = next((found["fingerprint"] for found in run.checkpoints.values() if found.get("fingerprint")), None)
    shown = (
        f"<details><summary>{both('fingerprint')}</summary>"
        f"<pre>{escape(json.dumps(fingerprint, indent=2, ensure_ascii=False, default=str))}</pre></details>"
        if fingerprint
        else ""
    )
    return _table([both(name) for name in ("file", "position", "digest")], rows) + shown if rows else ""


def config_table(runs: Sequence[RunData], only: Sequence[Mapping[str, Any]] | None) -> str:
    """Return the config of some runs; with `only`, the keys that these mappings have."""
    configs = [dict(run.listed.config) if only is None else dict(only[place]) for place, run in enumerate(runs)]
    keys = dict.fromkeys(key for config in configs for key in config)
    if not keys:
        return ""
    values = ([f"<code>{escape(key)}</code>", *(_value(config.get(key)) for config in configs)] for key in keys)
    table = _table([both("key"), *(f"<code>{escape(run.name)}</code>" for run in runs)], values)
    return table if only is not None else f"<details><summary>{len(keys)} {both('keys')}</summary>{table}</details>"


def environment(run: RunData) -> str:
    return "".join(
        f"<details><summary>{escape(str(start.get('started', '')))} "
        f"<code>{escape(str(start.get('command', '')))}</code></summary>"
        f"<pre>{escape(json.dumps(start, indent=2, ensure_ascii=False))}</pre></details>"
        for start in run.starts
    )


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _workers(workers: Iterable[Mapping[str, Any]]) -> str:
    return escape("; ".join(f"rank {each['rank']} {each.get('reason', '')}".strip() for each in workers))


def _value(value: Any) -> str:
    return f"<code>{escape(json.dumps(value, ensure_ascii=False, default=str))}</code>"


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, int | float) else "-"
