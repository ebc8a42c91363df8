"""The planner's step times beside those of thirteen runs that others published, on A100s and H100s.

The constants are one set for all chips and stacks, fitted on these and 120 more: so nothing here is independent of
them. What they would be without a group of runs, and how far off the group then is: `bench planner --leave-out group`.
"""

import csv
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxpar.measure.record import commit, versions
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import MAXTEXT, MEGATRON_2022, TORCHTITAN, SoftwareModel
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.time import step_time

from .published.stacks import CHIPS as KNOWN

PRACTICES = {"Megatron-LM": MEGATRON_2022, "torchtitan": TORCHTITAN, "MaxText": MAXTEXT}
CHIPS = {"A100-80GB": KNOWN["A100"], "H100-80GB": KNOWN["H100"], "H100-80GB-500W": KNOWN["H100-500W"]}
BOUNDS = {"Megatron-LM mean": 0.04, "Megatron-LM max": 0.09, "H100 max": 0.15}


def published() -> list[dict[str, str]]:
    """Returns the published runs, each with its source."""
    text = (Path(__file__).parent / "published_runs.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def read(run: dict[str, str]) -> tuple[Shape, Candidate, Hardware, SoftwareModel, float]:
    """Returns a published run as the planner takes it, and its seconds per step."""
    number = {key: int(value) for key, value in run.items() if value.isdecimal()}
    gpt = run["system"] == "Megatron-LM"
    shape = Shape(
        layers=number["layers"], dim=number["hidden"], heads=number["heads"], kv_heads=number["kv_heads"],
        hidden=number["ffn"], vocab=number["vocab"], seq=number["seq"],
        gated=run["gated"] == "yes", learned=gpt, biases=gpt, tied=gpt,
    )  # fmt: skip
    replicas = number["data"] * number.get("fsdp", 1)
    candidate = Candidate(
        pipe=number["pipe"], data=number["data"], fsdp=number.get("fsdp", 1), tensor=number["tensor"],
        zero=3 if "fsdp" in number else 0, sequence=run["sequence_parallel"] == "yes",
        schedule="interleaved" if number["interleave"] > 1 else "1f1b", chunks=number["interleave"],
        microbatch=number["microbatch"], microbatches=number["global_batch"] // (replicas * number["microbatch"]),
        remat=run["recompute"].removesuffix("-selective"),
    )  # fmt: skip
    tokens = number["global_batch"] * number["seq"] / number["gpus"]
    seconds = float(run["seconds_per_step"] or 0.0) or tokens / float(run["tokens_per_second_per_gpu"])
    return shape, candidate, CHIPS[run["gpu"]], PRACTICES[run["system"]], seconds


def predict(run: dict[str, str]) -> dict[str, Any]:
    """Returns a published run's seconds, the predicted ones by cause, and the error."""
    shape, candidate, hardware, software, seconds = read(run)
    time = step_time(shape, candidate, hardware, software)
    total = float(time.total)
    return {
        "system": run["system"],
        "model": run["model"],
        "gpus": int(run["gpus"]),
        "gpu": run["gpu"],
        "recompute": run["recompute"],
        "published": seconds,
        "predicted": total,
        "error": total / seconds - 1,
        "causes": {cause: float(spent) for cause, spent in time.items()},
        "source": run["source"],
    }


def planner() -> dict[str, Any]:
    """Prints every published run beside its prediction, the constants, and whether the bounds hold."""
    runs = [predict(run) for run in published()]
    print(f"{'run':<46}{'published':>10}{'predicted':>11}{'error':>9}   where the time goes")
    for run in runs:
        name = f"{run['system']} {run['model']}, {run['gpus']} GPUs, {run['recompute']}"
        most = sorted(run["causes"].items(), key=lambda item: -item[1])[:3]
        spent = ", ".join(f"{cause} {seconds / run['predicted']:.0%}" for cause, seconds in most)
        print(f"{name:<46}{run['published']:>8.2f} s{run['predicted']:>9.2f} s{run['error']:>+9.1%}   {spent}")
    eight, five = ([abs(run["error"]) for run in runs if run["gpu"].startswith(gpu)] for gpu in ("A100", "H100"))
    checks = {
        "Megatron-LM mean": sum(eight) / len(eight),
        "Megatron-LM max": max(eight),
        "H100 mean": sum(five) / len(five),
        "H100 max": max(five),
    }
    print()
    for name, found in checks.items():
        print(f"{name:<46}{found:>8.1%}" + (f"   bound {BOUNDS[name]:.0%}" if name in BOUNDS else ""))
    constants = {name: asdict(value) for name, value in (*CHIPS.items(), *PRACTICES.items())}
    _show(constants)
    holds = all(checks[name] <= bound for name, bound in BOUNDS.items())
    print(f"bounds {'hold' if holds else 'DO NOT HOLD'}")
    return {
        "runs": runs,
        "checks": checks,
        "bounds": BOUNDS,
        "constants": constants,
        "holds": holds,
        "where": {"versions": versions(), "commit": commit()},
    }


def _show(constants: dict[str, Any]) -> None:
    """Prints the constants and their sources."""
    print("\nmodelled, with these constants:")
    for name, value in constants.items():
        rest = {key: item for key, item in value.items() if key not in ("chip", "gemm", "inside", "between", "source")}
        for key in ("inside", "between"):
            if key in value:
                rest[key] = f"{value[key]['bandwidth'] / 1e9:.4g} GB/s after {value[key]['latency'] * 1e6:g} us"
        if "gemm" in value:
            curve = value["gemm"]
            rest["matmuls"] = f"{curve['top']} of peak x f / (f + {curve['half'] / 1e9:g} GFLOP)"
            rest["a wave of tiles"] = f"{curve['wave'] * 1e6:g} us, {curve['ragged']:.0%} of the last one lost"
            rest["peak"] = f"{value['chip']['bf16_flops'] / 1e12:g} TFLOP/s"
            rest["memory"] = f"{value['chip']['bandwidth'] / 1e12:g} TB/s"
        print(f"  {name}: " + ", ".join(f"{key} {item}" for key, item in rest.items()))
        for source in (value.get("chip"), value.get("gemm"), value):
            if source:
                print(f"    from {source['source']}")


if __name__ == "__main__":
    from .command import main

    raise SystemExit(main("planner"))
