"""Renders a run as one HTML file, without network access or scripts."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from jaxpar.errors import JaxparError
from jaxpar.html.charts import Line, axes_table, chart, section
from jaxpar.html.markup import Markup, badge, document, table, tag, tile
from jaxpar.job.file.run_folder import read_job
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.plan_model import needs_jax
from jaxpar.job.plan import question
from jaxpar.job.report import kernel_times
from jaxpar.job.report.read import RunContents
from jaxpar.mesh.chips import find_chip
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.units import show_bytes, show_count, show_seconds

# The planner's prediction for the layout of a run, to compare with its measurements. Needs no jax.


def predict(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Predicts `seconds` per step, also by `causes`, and `bytes` of the fullest device; or the reason `why` it cannot.

    Simulated devices have none: their timings say nothing about GPUs, and their memory is not that of a GPU.

    Args:
      folder: The run folder.
      facts: The contents of its run.json.
    """
    count, _, kind = str(facts.get("devices", "")).partition(" x ")
    chip = None if "cpu" in kind else find_chip(kind)
    if chip is None or chip.key not in HARDWARE or not count.isdigit():
        return {"why": "simulated devices" if "cpu" in kind else f"no constants of {kind or 'the devices'} are known"}
    try:
        job = read_job(folder)
        return _predict_job(job, int(count), chip.key, dict(facts.get("candidate") or {}))
    except JaxparError as error:
        return {"why": error.problems[0].got}


def _predict_job(job: Job, count: int, chip: str, recorded: dict[str, Any]) -> dict[str, Any]:
    if needs_jax(job) or job.sweep.over or not recorded:
        return {"why": "its formulas cover a single decoder, on layouts that it can model"}
    options: Mapping[str, str | None] = {"attention": "fused"}
    request = question(job, devices=count, chip=chip, per_node=None, options=options)
    field_names = Candidate.__dataclass_fields__
    candidate = Candidate(**{key: value for key, value in recorded.items() if key in field_names})
    causes = dict(request.seconds(candidate).plain)
    size = float(request.bytes(candidate).total)
    return {"seconds": sum(causes.values()), "causes": causes, "bytes": size}


POINTS = 300  # maximal points per line; each is a mean over some steps
EVENTS = 200  # maximal rows of the events table: the first and the last events
FIRST = 3  # steps without a meaningful time: compilation and warm-up


def render(run: RunContents) -> str:
    """Renders the page as HTML."""
    prediction = predict(run.folder, run.facts)
    sections = [
        _section("Loss", _chart(run, {"loss": "jx-k0", **_evaluations(run)}, "mean per unit that the loss counts")),
        _section("Gradient norm", _chart(run, {"grad_norm": "jx-k1"}, "global, before clipping")),
        _section("Learning rate", _chart(run, {"learning_rate": "jx-k2"}, "of the update")),
        _section("Throughput", _throughput(run)),
        _section("Predicted and measured", _comparison(run, prediction)),
        _section("Profile", *[kernel_times.render(each, run.folder, prediction) for each in run.profiles]),
        _section("Waiting for data", _wait_chart(run), _wait_note(run)),
        _section("Checkpoints", _checkpoints(run)),
        _section("Events", _events(run)),
        _section("Configuration", _configuration(run)),
        _section("Layout", _layout(run)),
    ]
    return document(
        run.folder.resolve().name, tag("p", _subtitle(run), cls="jx-where"), _tiles(run), *filter(None, sections)
    )


def text(run: RunContents) -> str:
    """Returns the headline numbers in one line."""
    last = run.rows[-1]
    parts = [f"step {last['step']}", f"loss {_number(last.get('loss'))}"]
    if best := _best(run, "eval_loss"):
        parts.append(f"best eval loss {best[1]:.4f} at step {best[0]}")
    parts.append(f"{len(run.checkpoints)} checkpoints, {len(run.events)} events, {len(run.changed)} changes")
    return ", ".join(parts)


def _section(name: str, *inside: Markup) -> Markup:
    return tag("section", tag("h2", name), *inside) if any(inside) else Markup("")


def _subtitle(run: RunContents) -> str:
    facts = run.facts
    mesh = " x ".join(f"{axis} {size}" for axis, size in facts.get("mesh", {}).items() if size > 1)
    versions = facts.get("versions", {})
    parts = [facts.get("devices"), mesh, facts.get("machine")]
    parts += [f"{name} {versions[name]}" for name in ("jaxpar", "jax", "flax", "optax") if name in versions]
    parts.append(f"commit {facts['commit']}" if facts.get("commit") else None)
    return ", ".join(str(part) for part in parts if part)


def _tiles(run: RunContents) -> Markup:
    rows, last = run.rows, run.rows[-1]
    steps = run.jobs[-1].get("train.steps") if run.jobs else None
    tokens = sum(row.get("tokens") or 0 for row in rows)
    tiles = [
        tile("steps", f"{last['step']:,}", f"of {int(steps):,}" if steps and steps.isdigit() else "", "measured"),
        tile("loss", _number(last.get("loss")), f"from {_number(rows[0].get('loss'))}", "measured"),
    ]
    if best := _best(run, "eval_loss"):
        tiles.append(tile("best eval loss", f"{best[1]:.4f}", f"at step {best[0]:,}", "measured"))
    tiles.append(tile("counted by the loss", show_count(tokens), "tokens, or the unit of the loss", "exact"))
    if "parameters" in run.facts:
        tiles.append(tile("parameters", show_count(run.facts["parameters"]), "", "exact"))
    if run.is_timed and (seconds := _seconds(run)):
        rate = median((row.get("tokens") or 0) / row["seconds"] for row in rows[FIRST:] if row.get("seconds"))
        tiles.append(tile("a step", show_seconds(median(seconds)), f"{show_count(rate)} per second", "measured"))
    return tag("div", *tiles, cls="jx-tiles")


def _seconds(run: RunContents) -> list[float]:
    return [row["seconds"] for row in run.rows[FIRST:] if row.get("seconds")]


def _chart(run: RunContents, series: dict[str, str], what: str) -> Markup:
    lines = [line for name, look in series.items() if (line := _line(run, name, look)) is not None]
    return chart(lines, x="step", y=what, show_x=show_count) if lines else Markup("")


def _evaluations(run: RunContents) -> dict[str, str]:
    """Maps each evaluation loss to its line style."""
    names = dict.fromkeys(name for row in run.rows for name in row if name.startswith("eval_") and "loss" in name)
    return {name: f"jx-c{i % 10}" for i, name in enumerate(names)}


def _line(run: RunContents, name: str, look: str) -> Line | None:
    """Plots a metric against steps, binned to at most `POINTS` means; None if the run does not record it."""
    points = [(row["step"], row[name]) for row in run.rows if isinstance(row.get(name), (int, float))]
    points = [point for point in points if math.isfinite(point[1])]
    if not points:
        return None
    arrays = np.array(points, float)
    bins = np.array_split(np.arange(len(points)), min(POINTS, len(points)))
    x, y = (np.array([arrays[bin_indices, column].mean() for bin_indices in bins]) for column in (0, 1))
    return Line(name=name, x=x, y=y, css_class=look, dashed=name.startswith("eval_"))


def _throughput(run: RunContents) -> Markup:
    if not run.is_timed:
        note = "Not shown: devices were simulated, and their speed says nothing about GPUs."
        return tag("p", note, cls="jx-small")
    return _chart(run, {"tokens_per_second": "jx-k3"}, "counted by the loss, per second")


def _wait_note(run: RunContents) -> Markup:
    """Describes the time for which steps waited for their batches; "" on simulated devices."""
    rows = [row for row in run.rows[FIRST:] if row.get("input_wait_seconds") is not None and row.get("seconds")]
    if not run.is_timed or not rows:
        return Markup("")
    wait, total = (sum(row[name] for row in rows) for name in ("input_wait_seconds", "seconds"))
    note = f"Steps waited at most {show_seconds(wait)} for their batches, {wait / total:.1%} of the time."
    return tag("p", note, cls="jx-small")


def _checkpoints(run: RunContents) -> Markup:
    rows = [
        (
            str(checkpoint["step"]),
            show_bytes(checkpoint["bytes"]),
            _time(checkpoint["written"]),
            " ".join(f"{name} {value:.4f}" for name, value in checkpoint["scores"].items()) or "-",
            checkpoint["state"] + (f": {checkpoint['wrong'][0]}" if checkpoint["wrong"] else ""),
        )
        for checkpoint in run.checkpoints
    ]
    return table("Checkpoints", ("step", "size", "written", "scores", "state"), rows, "nntts") if rows else Markup("")


def _events(run: RunContents) -> Markup:
    events = run.events
    if not events:
        return tag("p", "No events are recorded.", cls="jx-small")
    omitted = len(events) - EVENTS
    if omitted > 0:
        events = [*events[: EVENTS // 2], *events[-EVENTS // 2 :]]
    rows = [(str(event.step), _time(event.when), event.kind, event.what.replace("\n", "; ")) for event in events]
    event_table = table("Events", ("after step", "when", "kind", "what"), rows, "nttw")
    notes = [tag("p", f"{omitted} between them are left out.", cls="jx-small")] if omitted > 0 else []
    return tag("div", event_table, *notes)


def _configuration(run: RunContents) -> Markup:
    if not run.jobs:
        return Markup("")
    change_table = table("Changes", ("key", "was", "now"), run.changed, "tss") if run.changed else None
    intro = tag("p", f"Started with {len(run.jobs)} jobs; this changed between them:", cls="jx-small")
    job_table = table("Job", ("key", "value"), sorted(run.jobs[-1].items()), "ts")
    details = tag("details", tag("summary", f"The job, {len(run.jobs[-1])} keys"), job_table)
    return tag("div", *([intro, change_table] if change_table else []), details)


def _comparison(run: RunContents, prediction: Mapping[str, Any]) -> Markup:
    """Compares modelled, compiled and measured memory and step time; without times on simulated devices."""
    peak = run.facts.get("peak") or {}
    if not peak and "bytes" not in prediction:
        return Markup("")
    size = lambda number: "-" if number is None else show_bytes(int(number))  # noqa: E731
    memory = [size(prediction.get("bytes")), size(peak.get("compiled")), size(peak.get("measured"))]
    rows = [("memory of a device, at most", *memory)]
    if run.is_timed and (seconds := _seconds(run)):
        forecast = prediction.get("seconds")
        rows.append(("a step", "-" if forecast is None else show_seconds(forecast), "-", show_seconds(median(seconds))))
    notes = [f"No prediction by the planner: {prediction['why']}."] if "why" in prediction else []
    if peak.get("measured") is None:
        notes.append("These devices do not report their memory use.")
    head = ("", "planner", "XLA", "run")
    badges = tag("tr", tag("td", ""), *[tag("td", badge(word)) for word in ("modelled", "compiled", "measured")])
    comparison = Markup(table("Predicted and measured", head, rows, "tnnn").replace("<tbody>", f"<tbody>{badges}", 1))
    return tag("div", comparison, *[tag("p", note, cls="jx-small") for note in notes])


def _wait_chart(run: RunContents) -> Markup:
    """Plots the wait of each step for its batch; nothing on simulated devices."""
    return _chart(run, {"input_wait_seconds": "jx-k4"}, "seconds, at most") if run.is_timed else Markup("")


def _layout(run: RunContents) -> Markup:
    notes = [run.facts.get("summary"), *run.facts.get("chosen", ())]
    lines = [tag("p", str(note)) for note in notes if note]
    if run.axes:
        lines.append(axes_table(run.axes))
    if run.cards:
        lines.append(section(run.cards))
    specs: dict[str, Any] = run.facts.get("placed", {})
    if specs:
        details = table("Parameters", ("parameter", "placed as"), [(k, str(v)) for k, v in specs.items()], "ss")
        lines.append(tag("details", tag("summary", f"Where each of {len(specs)} parameters lives"), details))
    return tag("div", *lines) if lines else Markup("")


def _best(run: RunContents, name: str) -> tuple[int, float] | None:
    points: Sequence[tuple[float, int]] = [
        (row[name], row["step"]) for row in run.rows if isinstance(row.get(name), (int, float))
    ]
    return (min(points)[1], min(points)[0]) if points else None


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "not finite"


def _time(when: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if when else "-"
