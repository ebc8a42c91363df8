"""The plans of traced models beside their programs, as XLA compiles them for one absent H100.

Bytes are all that the program needs; seconds are replayed from it. The plan has the prices of the replay, so that what
is compared is the estimate of the program, and not of the machine.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import optax

import jaxpar as jp
from jaxpar.inspector.timeline import KERNEL, MATMULS
from jaxpar.measure.record import commit, versions
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE, Hardware
from jaxpar.plan.machine.kernels import Gemm
from jaxpar.units import show_bytes, show_seconds

from .plain_models import CASES, Case
from .unseen_models import UNSEEN

ALL = {**CASES, **UNSEEN}

MEAN = {"bytes": 0.1, "seconds": 0.15}  # bounds of the errors' means


def replay_prices() -> Hardware:
    """Returns an H100 with the prices of `jaxpar.inspector.timeline`."""
    gemm = Gemm(top=MATMULS, half=1.0, source="the replay")
    return replace(HARDWARE["h100"], gemm=gemm, streaming=1.0, launch=KERNEL, jitter=0.0)


def compare(case: Case, *, remat: str = "none") -> dict[str, Any]:
    """Returns the predicted bytes and seconds of a case's step beside those of its program, on one absent H100."""
    model, loss, batch = case
    layout = jp.compose(model, jp.Parallel(), jp.target_devices("h100:1x1"))
    step = jp.train_step(layout, loss, optax.adamw(1e-3), precision="bf16", remat=remat)
    began = time.perf_counter()
    question = jp.plan(step, batch, devices=1).question
    rows, planned = question.rows, time.perf_counter() - began
    candidate = Candidate(data=1, microbatch=rows, remat=remat)
    memory = question.costs.memory(candidate)
    seconds = question.costs.time(candidate, replay_prices())
    began = time.perf_counter()
    report = jp.inspect(step, batch)
    predicted = {"bytes": float(memory.total), "seconds": float(seconds.total)}
    program = {"bytes": float(report.total), "seconds": report.timeline.seconds}
    return {
        "predicted": predicted,
        "compiled": program,
        "error": {key: predicted[key] / program[key] - 1 for key in predicted},
        "planned_in": planned,
        "compiled_in": time.perf_counter() - began,
        "causes": {
            "bytes": {key: float(value) for key, value in memory.items()},
            "seconds": {key: float(value) for key, value in seconds.items()},
        },
    }


def traced_models(only: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the comparison of each case, as JSON has them; prints each as it comes.

    Args:
      only: Names of cases; all if empty.
    """
    print(f"{'':16}{'bytes: predicted':>18}{'compiled':>12}{'':8}{'seconds: predicted':>20}{'replayed':>12}")
    rows = {}
    for name, case in ALL.items():
        if not only or name in only:
            rows[name] = row = compare(case())
            print(_line(name, row), flush=True)
    means = {}
    for group, names in (("models", CASES), ("unseen models", UNSEEN)):
        errors = [row["error"] for name, row in rows.items() if name in names]
        if errors:
            means[group] = {key: float(np.mean([abs(error[key]) for error in errors])) for key in MEAN}
            print(f"mean error of {group}: bytes {means[group]['bytes']:.1%}, seconds {means[group]['seconds']:.1%}")
    holds = all(mean[key] <= bound for mean in means.values() for key, bound in MEAN.items())
    print(f"bounds: bytes {MEAN['bytes']:.0%}, seconds {MEAN['seconds']:.0%}: {'hold' if holds else 'DO NOT HOLD'}")
    return {"models": rows, "means": means, "holds": holds, "where": {"versions": versions(), "commit": commit()}}


def _line(name: str, row: Mapping[str, Any]) -> str:
    predicted, compiled, error = row["predicted"], row["compiled"], row["error"]
    return (
        f"{name:16}{show_bytes(predicted['bytes']):>18}{show_bytes(compiled['bytes']):>12}{error['bytes']:>+8.1%}"
        f"{show_seconds(predicted['seconds']):>20}{show_seconds(compiled['seconds']):>12}{error['seconds']:>+8.1%}"
    )


if __name__ == "__main__":
    from .command import main

    raise SystemExit(main("traced_models"))
