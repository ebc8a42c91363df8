"""Plans of decoders by formulas beside plans of the same jobs by their trace, over jobs that nobody chose.

Layouts that both price are compared: data, fsdp and tensor, without sequence parallelism, and attention as XLA compiles
it. Seconds are those of a plan, on H100s.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxpar.errors import JaxparError
from jaxpar.job.file.parse import loads
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.plan_traced import trace_job
from jaxpar.job.plan import question
from jaxpar.measure.record import commit, versions
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.enumeration import select, select_one
from jaxpar.plan.search import Question, describe, search

BOUNDS = {"seconds": 0.1, "bytes": 0.05}  # of the mean differences
FIELDS = "data", "fsdp", "tensor", "zero", "microbatch", "microbatches", "remat"


def draw(count: int, *, seed: int) -> Iterator[tuple[Job, int]]:
    """Draws jobs of decoders, and numbers of devices."""
    generator = np.random.default_rng(seed)

    def pick(*options: Any) -> Any:
        return options[generator.integers(len(options))]

    for _ in range(count):
        heads, devices = pick(8, 16, 32), pick(8, 8, 16, 64)
        settings = {
            "layers": pick(4, 8, 12, 24), "dim": 64 * heads * pick(1, 2), "heads": heads,
            "kv_heads": heads // pick(1, 2, 4), "vocab": pick(8192, 32768, 65536), "gated": pick("true", "false"),
        }  # fmt: skip
        lines = "\n".join(f"{key} = {value}" for key, value in settings.items())
        rows = devices * pick(1, 2, 4, 8)
        text = (
            f'[model]\nname = "decoder"\n{lines}\n[data]\nseq = {pick(512, 1024, 2048)}\n'
            f'[train]\nglobal_batch = {rows}\nprecision = "bf16"\n'
        )
        yield loads(text), devices


def questions(job: Job, devices: int) -> dict[str, Question]:
    """Returns the questions of a job's plan by formulas and by its trace, for the same layouts."""
    options = {"attention": "unfused"}
    formulas = question(job, devices=devices, chip="h100", per_node=None, options=options)
    formulas = replace(formulas, choices=Choices(context=1, pipe=1))
    return {"formulas": formulas, "trace": replace(formulas, model=trace_job(job, devices))}


def compare(job: Job, devices: int) -> dict[str, Any]:
    """Returns the differences of a job's two plans: of all layouts, and of the first ones."""
    both = questions(job, devices)
    layouts = _common(both)
    ratios = {
        "seconds": _totals(both["trace"].seconds(layouts)) / _totals(both["formulas"].seconds(layouts)),
        "bytes": _totals(both["trace"].bytes(layouts)) / _totals(both["formulas"].bytes(layouts)),
    }
    return {
        "layouts": len(layouts.data),
        "differences": {name: np.abs(ratio - 1).tolist() for name, ratio in ratios.items()},
        "mean": {name: float(np.mean(np.abs(ratio - 1))) for name, ratio in ratios.items()},
        "worst": {name: _worst(layouts, ratio) for name, ratio in ratios.items()},
        "first": _firsts(both),
    }


def _totals(causes: Any) -> np.ndarray:
    return np.asarray(causes.total, float)


def _common(both: Mapping[str, Question]) -> Candidate:
    """Returns the layouts that both plans weigh and that fit by the formulas."""
    priced = both["formulas"].legal()
    fits = _totals(both["formulas"].bytes(priced)) < both["formulas"].memory_limit
    kept = select(priced, ~np.asarray(priced.sequence, bool) & np.equal(priced.context, 1) & fits)
    weighed = {*_keys(both["trace"].legal())}
    return select(kept, np.array([key in weighed for key in _keys(kept)], bool))


def _keys(layouts: Candidate) -> list[tuple]:
    return [*zip(*(np.asarray(getattr(layouts, name)).tolist() for name in FIELDS), strict=True)]


def _worst(layouts: Candidate, ratio: np.ndarray) -> dict[str, Any]:
    place = int(np.argmax(np.abs(ratio - 1)))
    return {"layout": describe(select_one(layouts, place)), "difference": float(ratio[place] - 1)}


def _firsts(both: Mapping[str, Question]) -> dict[str, Any]:
    """Returns the first layout of each plan, and how much slower the trace's first is by the formulas."""
    try:
        firsts = {name: search(asked, top=1).best[0] for name, asked in both.items()}
    except JaxparError as error:
        return {"refusal": str(error.problems[0])}
    by_formulas = both["formulas"].seconds(firsts["trace"].candidate).total
    slower = float(by_formulas / firsts["formulas"].time.total - 1)
    return {
        "layouts": {name: describe(first.candidate) for name, first in firsts.items()},
        "slower": slower,
        "agrees": slower <= both["formulas"].slack,
    }


def traced_decoders(*, count: int, seed: int | None = None) -> dict[str, Any]:
    """Returns the differences of both plans of drawn jobs, as JSON has them; prints each as it comes.

    Args:
      count: Jobs to draw.
      seed: Of the draw; None takes the clock's seconds.
    """
    seed, rows = int(time.time()) if seed is None else seed, []
    print(f"seed {seed}: the trace's plan beside the formulas', mean and largest difference of a job's layouts")
    for job, devices in draw(count, seed=seed):
        rows.append(row := {"model": _shown_job(job), "devices": devices, **compare(job, devices)})
        print(f"  {_line(row)}", flush=True)
    every = {name: [error for row in rows for error in row["differences"][name]] for name in BOUNDS}
    errors = {
        name: {"mean": float(np.mean(values)), "ninetieth": float(np.quantile(values, 0.9)), "worst": max(values)}
        for name, values in every.items()
    }
    for name, numbers in errors.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.1%}" for key, value in numbers.items()))
    agrees = sum(row["first"].get("agrees", False) for row in rows)
    print(f"the same first layout, or one within the margin: {agrees} of {len(rows)} jobs")
    holds = all(errors[name]["mean"] <= bound for name, bound in BOUNDS.items()) and agrees == len(rows)
    print(f"bounds {'hold' if holds else 'DO NOT HOLD'}")
    for row in rows:
        del row["differences"]
    return {
        "question": {"count": count, "seed": seed}, "jobs": rows, "errors": errors, "agrees": agrees, "holds": holds,
        "where": {"versions": versions(), "commit": commit()},
    }  # fmt: skip


def _shown_job(job: Job) -> str:
    settings = dict(job.model)
    names = ("layers", "dim", "heads", "kv_heads", "vocab")
    return " ".join(f"{name} {settings[name]}" for name in names) + f" seq {job.data.seq} rows {job.train.global_batch}"


def _line(row: Mapping[str, Any]) -> str:
    shown = [
        f"{name} {row['mean'][name]:.1%} ({row['worst'][name]['difference']:+.0%} {row['worst'][name]['layout']})"
        for name in BOUNDS
    ]
    first = row["first"]
    end = first.get("refusal") or f"{first['layouts']['trace']} | {first['layouts']['formulas']} {first['slower']:+.1%}"
    return f"{row['model']} on {row['devices']}, {row['layouts']} layouts: {'; '.join(shown)}; {end}"


if __name__ == "__main__":
    from .command import main

    raise SystemExit(main("traced_decoders"))
