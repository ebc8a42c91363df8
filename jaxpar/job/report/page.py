"""A run as one HTML file: no network, no script."""

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from jaxpar.html.frame import document, tile
from jaxpar.html.lines import Line, chart
from jaxpar.html.markup import Markup, badge, table, tag
from jaxpar.html.pieces import axes_table, section
from jaxpar.job.report.predicted import predicted
from jaxpar.job.report.read import Told
from jaxpar.units import show_bytes, show_count, show_seconds

POINTS = 300  # of a line at most: each is a mean over some steps
EVENTS = 200  # rows of the table of events, at most: the first and the last of them
FIRST = 3  # steps whose time is compilation and warming up


def write(run: Told) -> str:
    """Returns the page."""
    sections = [
        _section("Loss", _chart(run, {"loss": "jx-k0", **_evaluations(run)}, "mean over what the loss counts")),
        _section("Gradient norm", _chart(run, {"grad_norm": "jx-k1"}, "global, before clipping")),
        _section("Learning rate", _chart(run, {"learning_rate": "jx-k2"}, "of the update")),
        _section("Throughput", _throughput(run)),
        _section("Predicted and measured", _beside(run)),
        _section("Waiting for data", _waiting(run), _waited(run)),
        _section("Checkpoints", _checkpoints(run)),
        _section("Events", _events(run)),
        _section("Configuration", _configuration(run)),
        _section("Layout", _layout(run)),
    ]
    return document(
        run.folder.resolve().name, tag("p", _where(run), cls="jx-where"), _tiles(run), *filter(None, sections)
    )


def text(run: Told) -> str:
    """Returns the headline numbers as text."""
    last = run.rows[-1]
    parts = [f"step {last['step']}", f"loss {_number(last.get('loss'))}"]
    if best := _best(run, "eval_loss"):
        parts.append(f"best eval loss {best[1]:.4f} at step {best[0]}")
    parts.append(f"{len(run.checkpoints)} checkpoints, {len(run.events)} events, {len(run.changed)} changes")
    return ", ".join(parts)


def _section(name: str, *inside: Markup) -> Markup:
    return tag("section", tag("h2", name), *inside) if any(inside) else Markup("")


def _where(run: Told) -> str:
    facts = run.facts
    mesh = " x ".join(f"{axis} {size}" for axis, size in facts.get("mesh", {}).items() if size > 1)
    versions = facts.get("versions", {})
    said = [facts.get("devices"), mesh, facts.get("machine")]
    said += [f"{name} {versions[name]}" for name in ("jaxpar", "jax", "flax", "optax") if name in versions]
    said.append(f"commit {facts['commit']}" if facts.get("commit") else None)
    return ", ".join(str(each) for each in said if each)


def _tiles(run: Told) -> Markup:
    rows, last = run.rows, run.rows[-1]
    steps = run.jobs[-1].get("train.steps") if run.jobs else None
    tokens = sum(row.get("tokens") or 0 for row in rows)
    tiles = [
        tile("steps", f"{last['step']:,}", f"of {int(steps):,}" if steps and steps.isdigit() else "", "measured"),
        tile("loss", _number(last.get("loss")), f"from {_number(rows[0].get('loss'))}", "measured"),
    ]
    if best := _best(run, "eval_loss"):
        tiles.append(tile("best eval loss", f"{best[1]:.4f}", f"at step {best[0]:,}", "measured"))
    tiles.append(tile("counted by the loss", show_count(tokens), "tokens, or what the loss counts", "exact"))
    if "parameters" in run.facts:
        tiles.append(tile("parameters", show_count(run.facts["parameters"]), "", "exact"))
    if run.is_timed and (seconds := _seconds(run)):
        rate = median((row.get("tokens") or 0) / row["seconds"] for row in rows[FIRST:] if row.get("seconds"))
        tiles.append(tile("a step", show_seconds(median(seconds)), f"{show_count(rate)} per second", "measured"))
    return tag("div", *tiles, cls="jx-tiles")


def _seconds(run: Told) -> list[float]:
    return [row["seconds"] for row in run.rows[FIRST:] if row.get("seconds")]


def _chart(run: Told, series: dict[str, str], what: str) -> Markup:
    lines = [line for name, look in series.items() if (line := _line(run, name, look)) is not None]
    return chart(lines, x="step", y=what, show_x=show_count) if lines else Markup("")


def _evaluations(run: Told) -> dict[str, str]:
    """Returns the names of losses of evaluations, each with its colour."""
    names = dict.fromkeys(name for row in run.rows for name in row if name.startswith("eval_") and "loss" in name)
    return {name: f"jx-c{i % 10}" for i, name in enumerate(names)}


def _line(run: Told, name: str, look: str) -> Line | None:
    """Returns a metric against steps, as means over so many steps that it has few points; None where it is not."""
    points = [(row["step"], row[name]) for row in run.rows if isinstance(row.get(name), (int, float))]
    points = [point for point in points if math.isfinite(point[1])]
    if not points:
        return None
    arrays = np.array(points, float)
    bins = np.array_split(np.arange(len(points)), min(POINTS, len(points)))
    x, y = (np.array([arrays[each, column].mean() for each in bins]) for column in (0, 1))
    return Line(name=name, x=x, y=y, look=look, dashed=name.startswith("eval_"))


def _throughput(run: Told) -> Markup:
    if not run.is_timed:
        said = "Not shown: devices were simulated on processors, whose speed says nothing of others."
        return tag("p", said, cls="jx-small")
    return _chart(run, {"tokens_per_second": "jx-k3"}, "counted by the loss, per second")


def _waited(run: Told) -> Markup:
    """Returns how long steps waited for their batches, of real devices."""
    rows = [row for row in run.rows[FIRST:] if row.get("input_wait_seconds") is not None and row.get("seconds")]
    if not run.is_timed or not rows:
        return Markup("")
    waited, whole = (sum(row[name] for row in rows) for name in ("input_wait_seconds", "seconds"))
    said = f"Steps waited at most {show_seconds(waited)} for their batches, {waited / whole:.1%} of the time."
    return tag("p", said, cls="jx-small")


def _checkpoints(run: Told) -> Markup:
    rows = [
        (
            str(each["step"]),
            show_bytes(each["bytes"]),
            _time(each["written"]),
            " ".join(f"{name} {value:.4f}" for name, value in each["scores"].items()) or "-",
            each["state"] + (f": {each['wrong'][0]}" if each["wrong"] else ""),
        )
        for each in run.checkpoints
    ]
    return table("Checkpoints", ("step", "size", "written", "scores", "state"), rows, "nntts") if rows else Markup("")


def _events(run: Told) -> Markup:
    shown = run.events
    if not shown:
        return tag("p", "None is recorded.", cls="jx-small")
    left = len(shown) - EVENTS
    if left > 0:
        shown = [*shown[: EVENTS // 2], *shown[-EVENTS // 2 :]]
    rows = [(str(each.step), _time(each.when), each.kind, each.what.replace("\n", "; ")) for each in shown]
    listed = table("Events", ("after step", "when", "kind", "what"), rows, "nttw")
    more = [tag("p", f"{left} between them are left out.", cls="jx-small")] if left > 0 else []
    return tag("div", listed, *more)


def _configuration(run: Told) -> Markup:
    if not run.jobs:
        return Markup("")
    changed = table("Changes", ("key", "was", "now"), run.changed, "tss") if run.changed else None
    said = tag("p", f"Started with {len(run.jobs)} jobs; this changed between them:", cls="jx-small")
    every = table("Job", ("key", "value"), sorted(run.jobs[-1].items()), "ts")
    folded = tag("details", tag("summary", f"The job, {len(run.jobs[-1])} keys"), every)
    return tag("div", *([said, changed] if changed else []), folded)


def _beside(run: Told) -> Markup:
    """Returns memory and seconds as predicted, compiled and measured; of simulated devices no seconds."""
    peak, planned = run.facts.get("peak") or {}, predicted(run.folder, run.facts)
    if not peak and "bytes" not in planned:
        return Markup("")
    size = lambda number: "-" if number is None else show_bytes(int(number))  # noqa: E731
    memory = [size(planned.get("bytes")), size(peak.get("compiled")), size(peak.get("measured"))]
    rows = [("memory of a device, at most", *memory)]
    if run.is_timed and (seconds := _seconds(run)):
        modelled = planned.get("seconds")
        rows.append(("a step", "-" if modelled is None else show_seconds(modelled), "-", show_seconds(median(seconds))))
    why = [f"The planner says nothing: {planned['why']}."] if "why" in planned else []
    if peak.get("measured") is None:
        why.append("These devices keep no account of their memory.")
    head = ("", "planner", "XLA", "run")
    how = tag("tr", tag("td", ""), *[tag("td", badge(word)) for word in ("modelled", "compiled", "measured")])
    listed = Markup(table("Predicted and measured", head, rows, "tnnn").replace("<tbody>", f"<tbody>{how}", 1))
    return tag("div", listed, *[tag("p", each, cls="jx-small") for each in why])


def _waiting(run: Told) -> Markup:
    """Returns what each step waited for its batch, where the run has measured that."""
    return _chart(run, {"input_wait_seconds": "jx-k4"}, "seconds, at most") if run.is_timed else Markup("")


def _layout(run: Told) -> Markup:
    said = [run.facts.get("summary"), *run.facts.get("chosen", ())]
    lines = [tag("p", str(each)) for each in said if each]
    if run.axes:
        lines.append(axes_table(run.axes))
    if run.cards:
        lines.append(section(run.cards))
    placed: dict[str, Any] = run.facts.get("placed", {})
    if placed:
        listed = table("Parameters", ("parameter", "placed as"), [(k, str(v)) for k, v in placed.items()], "ss")
        lines.append(tag("details", tag("summary", f"Where each of {len(placed)} parameters lives"), listed))
    return tag("div", *lines) if lines else Markup("")


def _best(run: Told, name: str) -> tuple[int, float] | None:
    known: Sequence[tuple[float, int]] = [
        (row[name], row["step"]) for row in run.rows if isinstance(row.get(name), (int, float))
    ]
    return (min(known)[1], min(known)[0]) if known else None


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "not finite"


def _time(when: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if when else "-"
