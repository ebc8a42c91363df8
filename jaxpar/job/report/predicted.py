"""What the planner says of the layout that a run has, to be shown beside what the run measured. Takes no jax."""

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


def predicted(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `seconds` of a step and `bytes` of the fullest device, modelled; or `why` there is no prediction.

    Of simulated devices nothing is predicted: they have no speed, and another memory than any GPU.

    Args:
      folder: The run folder.
      facts: Of its run.json.
    """
    count, _, kind = str(facts.get("devices", "")).partition(" x ")
    chip = None if "cpu" in kind else find_chip(kind)
    if chip is None or chip.key not in HARDWARE or not count.isdigit():
        return {"why": "simulated devices" if "cpu" in kind else f"no constants of {kind or 'the devices'} are known"}
    try:
        job = job_of(folder)
        return _of(job, int(count), chip.key, dict(facts.get("candidate") or {}))
    except JaxparError as error:
        return {"why": error.problems[0].got}


def _of(job: Job, count: int, chip: str, recorded: dict[str, Any]) -> dict[str, Any]:
    if needs_jax(job) or job.sweep.over or not recorded:
        return {"why": "its formulas are of one decoder, on a layout that it can weigh"}
    given: Mapping[str, str | None] = {"attention": "fused"}
    asked = question(job, devices=count, chip=chip, per_node=None, given=given)
    known = Candidate.__dataclass_fields__
    mine = Candidate(**{key: value for key, value in recorded.items() if key in known})
    return {"seconds": float(asked.seconds(mine).total), "bytes": float(asked.bytes(mine).total)}
