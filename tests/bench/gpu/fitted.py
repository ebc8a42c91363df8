"""The planner's constants as a record has them: fitted on matmuls and on the smallest model, judged on the others.

    gemm     share of the peak, by the size of a matmul
    124m     share of the memory's bandwidth, so that the step takes what it took

What they are judged on has no part in them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxpar.plan.machine.hardware import Gemm, Hardware
from jaxpar.plan.machine.software import JAXPAR_FUSED
from jaxpar.plan.time import step_time

from ..gpu.jobs.training import REAL, Training

FITTED_ON, JUDGED_ON = "124m", ("350m", "1b3")
LOWEST, HIGHEST = 0.2, 1.0  # share of the memory's bandwidth


def fit(lines: Sequence[Mapping[str, Any]], hardware: Hardware) -> Hardware | None:
    """Returns the hardware with the constants of a record; None where it lacks what they are fitted on."""
    curve, step = _find(lines, "gemm", "curve of bf16"), _find(lines, FITTED_ON, "step")
    if curve is None or step is None or "top" not in curve or "seconds" not in step:
        return None
    gemm = Gemm(top=curve["top"], half=curve["half"], source=curve["source"])
    low, high = LOWEST, HIGHEST
    for _ in range(40):  # the step takes less, the more of the bandwidth is reached
        middle = (low + high) / 2
        slow = seconds(REAL[FITTED_ON], replace(hardware, gemm=gemm, streaming=middle)) > step["seconds"]
        low, high = (middle, high) if slow else (low, middle)
    return replace(hardware, gemm=gemm, streaming=(low + high) / 2)


def judge(lines: Sequence[Mapping[str, Any]], hardware: Hardware) -> dict[str, tuple[float, float]]:
    """Returns the measured seconds of each model that constants are judged on, and those by the constants."""
    found = {name: _find(lines, name, "step") for name in JUDGED_ON}
    return {name: (line["seconds"], seconds(REAL[name], hardware)) for name, line in found.items() if line}


def seconds(job: Training, hardware: Hardware) -> float:
    """Returns the planner's seconds of a job's step."""
    return float(step_time(job.shape, job.candidate, hardware, JAXPAR_FUSED).total)


def _find(lines: Sequence[Mapping[str, Any]], stage: str, what: str) -> Mapping[str, Any] | None:
    return next((line for line in lines if (line["stage"], line["what"]) == (stage, what)), None)
