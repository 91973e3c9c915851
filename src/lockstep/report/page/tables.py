"""The tables of the page, as HTML."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from lockstep.doctor.slow import find_slow, recorded_usage
from lockstep.report.page.colours import SHARE_COLOURS
from lockstep.report.page.measure import Forecast
from lockstep.report.page.run_data import RunData
from lockstep.report.page.time_shares import SHARES, time_shares
from lockstep.report.page.words import both

_SMALL_SHARE = 0.001


def summary_table(runs: Sequence[RunData]) -> str:
    """Return state, progress, results and digest of each run."""
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
    """Return a bar for each worker: where its time went."""
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
    """Return the workers that were lost, joined or left."""
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
    """Return where and how a run was started, each time."""
    return "".join(
        f"<details><summary>{escape(str(start.get('started', '')))} "
        f"<code>{escape(str(start.get('command', '')))}</code></summary>"
        f"<pre>{escape(json.dumps(start, indent=2, ensure_ascii=False))}</pre></details>"
        for start in run.starts
    )


def _bar(shares: Mapping[str, float]) -> str:
    total = sum(shares.values())
    return "".join(
        f'<span style="width:{shares[share] / total:.3%};background:{SHARE_COLOURS[share]}" '
        f'title="{share}: {shares[share]:.2f} s, {shares[share] / total:.1%}"></span>'
        for share in SHARES
        if shares[share] / total > _SMALL_SHARE
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
