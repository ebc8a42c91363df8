"""The planner's peak memory beside what XLA assigns, over layouts that nobody chose.

Compiled with an empty kernel in place of cuDNN's attention, so that buffers are those of the program that a GPU runs.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.errors import JaxparError
from jaxpar.inspector import stand_in_attention
from jaxpar.inspector.compiled import compile_program
from jaxpar.inspector.memory_causes import total
from jaxpar.job.build import assemble
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import abstract_batch
from jaxpar.job.plan import apply_layout, compiled_chip, question
from jaxpar.measure.record import commit, versions
from jaxpar.mesh.absent_gpus import target_devices
from jaxpar.mesh.target import Target
from jaxpar.models.islands import override_cudnn
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.search import Question, Ranked, describe
from jaxpar.plan.validation import sample
from jaxpar.units import show_bytes

MEAN, WITHIN, SHARE, WORST = 0.05, 0.1, 0.9, 0.15  # of the errors: their mean, a share of them within, the worst


def peaks(
    job: Job, *, devices: int, chip: str = "h100", count: int = 64, seed: int | None = None, out: str = ""
) -> dict[str, Any]:
    """Returns predicted beside compiled bytes of layouts drawn by chance, as JSON has them; prints each as it comes.

    Args:
      job: Its model, sequence and global batch count.
      devices: How many.
      chip: Which; XLA can compile for it.
      count: Layouts to draw.
      seed: Of the draw; None takes the clock's seconds.
      out: File of rows to keep, JSON lines; layouts in it are not compiled again.
    """
    seed = int(time.time()) if seed is None else seed
    asked = question(job, devices=devices, chip=chip, per_node=None, options={})
    print(f"seed {seed}: predicted, and compiled, with the prediction's error")
    rows = list(_rows(job, asked, sample(asked, count, seed=seed), Path(out) if out else None))
    found = summary(rows)
    for kind, numbers in found.items():
        print(f"{kind}: {shown(numbers)}")
    every = found["all"]
    holds = every["mean"] <= MEAN and every["within"] >= SHARE and every["worst"] <= WORST
    print(
        f"mean {MEAN:.0%}, {SHARE:.0%} within {WITHIN:.0%}, worst {WORST:.0%}: {'holds' if holds else 'DOES NOT HOLD'}"
    )
    return {
        "question": {"devices": devices, "chip": chip, "rows": asked.rows, "count": count, "seed": seed},
        "layouts": rows,
        "errors": found,
        "holds": holds,
        "where": {"versions": versions(), "commit": commit()},
    }


def _rows(job: Job, asked: Question, layouts: list[Ranked], out: Path | None) -> Iterator[dict[str, Any]]:
    kept = [json.loads(line) for line in out.read_text().splitlines()] if out and out.exists() else []
    known = {row["layout"]: row for row in kept}
    for ranked in layouts:
        name = describe(ranked.candidate)
        row = {**known.get(name, {})} or {"layout": name, **compiled(job, asked, ranked.candidate)}
        if out and name not in known:
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        row["predicted"] = ranked.memory.plain.total
        row["kinds"] = kinds(ranked.candidate)
        row["candidate"] = {key: value for key, value in asdict(ranked.candidate).items() if key != "axes"}
        error = f"{row['predicted'] / row['bytes'] - 1:+.1%}" if row["bytes"] else row["refusal"]
        print(f"  {name}: {show_bytes(row['predicted'])}, {show_bytes(row['bytes'] or 0)} ({error})", flush=True)
        yield row


def compiled(job: Job, asked: Question, candidate: Candidate) -> dict[str, Any]:
    """Returns the bytes of a device as compiled, or why there are none."""
    each = asked.hardware.per_node
    target = Target(compiled_chip(asked.hardware), -(-asked.devices // each), min(each, asked.devices))
    try:
        meant = apply_layout(job, candidate, asked.model.layers)
        step = assemble(meant, target_devices(target))
        batch = {name: step.placement.shape_struct(name, value) for name, value in abstract_batch(meant).items()}
        with override_cudnn(stand_in_attention.attention):
            lowered = step.lower(step.abstract(), batch)
        return {"bytes": total(compile_program(lowered, list(step.layout.device_mesh.devices.flat))), "refusal": ""}
    except JaxparError as error:
        return {"bytes": None, "refusal": str(error.problems[0])}


def kinds(candidate: Candidate) -> list[str]:
    """Returns the kinds of layouts that one is of."""
    c = candidate
    pipes = "one stage" if c.pipe == 1 else "interleaved" if c.chunks > 1 else "pipeline"
    axes = [axis for axis in ("context", "tensor") if c.size(axis) > 1]
    return [pipes, f"ZeRO-{c.zero}" if c.fsdp > 1 else "no fsdp", f"remat {c.remat}", *axes]


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns, of all rows with bytes and of each kind of them, the errors of predicted bytes."""
    both = [(abs(row["predicted"] / row["bytes"] - 1), row["kinds"]) for row in rows if row["bytes"]]
    names = ["all", *sorted({kind for _, of in both for kind in of})]
    return {name: _of([error for error, of in both if name in ("all", *of)]) for name in names}


def _of(errors: list[float]) -> dict[str, float]:
    found = np.array(errors or [np.nan])
    return {
        "layouts": len(errors),
        "mean": float(found.mean()),
        "ninetieth": float(np.quantile(found, 0.9)),
        "worst": float(found.max()),
        "within": float((found <= WITHIN).mean()),
    }


def shown(numbers: dict[str, float]) -> str:
    """Returns the errors of a kind in a line."""
    return (
        f"{numbers['layouts']} layouts: mean {numbers['mean']:.1%}, 90 % within {numbers['ninetieth']:.1%}, worst "
        f"{numbers['worst']:.1%}; {numbers['within']:.0%} within {WITHIN:.0%}"
    )


if __name__ == "__main__":
    from .command import main

    raise SystemExit(main("memory"))
