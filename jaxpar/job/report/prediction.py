"""The planner's prediction for the layout of a run, to compare with its measurements. Needs no jax."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError
from jaxpar.job.file.schema import Job
from jaxpar.job.file.trained_job import job_of
from jaxpar.job.parts.plan_model import needs_jax
from jaxpar.job.plan import question
from jaxpar.mesh.chips import find_chip
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE


def predict(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Predicts `seconds` per step and `bytes` of the fullest device; or returns `why` there is no prediction.

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
        job = job_of(folder)
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
    return {"seconds": float(request.seconds(candidate).total), "bytes": float(request.bytes(candidate).total)}
