"""The planner's predictions beside what XLA compiles, over layouts drawn by chance."""

from typing import Any

from jaxpar.job.file.schema import Job
from jaxpar.job.inspect import verify
from jaxpar.job.plan import question
from jaxpar.measure.record import commit, versions
from jaxpar.plan.validation import agreement, sample, summary

BOUND = 0.9  # least rank correlation of predicted seconds and those of the compiled program, replayed
ENDLESS = 2**44  # bytes: what XLA makes of a layout that does not fit is another program, which computes much again


def layouts(job: Job, *, devices: int, chip: str = "h100", count: int = 30, seed: int = 0) -> dict[str, Any]:
    """Returns predictions beside compiled bytes and replayed seconds, as JSON has them; prints each as it comes.

    Both times are modelled, none is measured. XLA is told of memory without end, so that it compiles each layout as it
    is: where memory is short it computes again what it can, and is slower. What it does not share with the prediction
    is then no layout's doing. Layouts that jaxpar or XLA refuses are named and not compared.

    Args:
      job: Its model, sequence and global batch count.
      devices: How many.
      chip: Which; XLA can compile for it.
      count: Layouts to draw.
      seed: Of the draw.
    """
    # as it is compiled here: without cuDNN
    asked = question(job, devices=devices, chip=chip, per_node=None, options={"attention": "unfused"})
    found = []
    print("predicted; replayed from the compiled program (modelled) and compiled bytes, with the prediction's errors")
    for each in verify(job, asked, sample(asked, count, seed=seed), memory=ENDLESS):
        print(f"  {each}", flush=True)
        found.append(each)
    agreed = agreement(found)
    holds = agreed.get("rank_correlation", 0.0) >= BOUND
    print(summary(agreed))
    print(f"rank correlation at least {BOUND}: {'holds' if holds else 'DOES NOT HOLD'}")
    return {
        "question": {"devices": devices, "chip": chip, "rows": asked.rows, "count": count, "seed": seed},
        "layouts": [each.to_dict() for each in found],
        "agreement": agreed,
        "holds": holds,
        "where": {"versions": versions(), "commit": commit()},
    }


if __name__ == "__main__":
    from .command import main

    raise SystemExit(main("layouts"))
