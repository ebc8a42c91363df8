"""The loss that large batches cost at equal epochs: a job with one rate for all, and with one that follows.

    batch x way x seed ─► trained on as many examples ─► eval loss ─► mean over seeds / that of the job's own batch

The job's warm-up takes as many examples with every batch, both ways: what differs is the rate alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxpar.errors import refuse
from jaxpar.exchange.base import AllReduce
from jaxpar.exchange.clock.base import Constant, WorkerTimes
from jaxpar.job.compare.parse_methods import Method
from jaxpar.job.compare.training import train
from jaxpar.job.file.parse import load
from jaxpar.job.file.schema import Job
from jaxpar.measure.record import commit, where
from jaxpar.mesh.chips import Link
from jaxpar.mesh.devices import simulate

from .rows import keep, kept

TIMES = (1, 2, 4, 8, 16)  # batches, of the job's own
WAYS = ("one rate", "linear", "sqrt")
KNEE, FLAT, UP_TO = 1.5, 1.2, 8  # one rate: at least, linear: at most so many times the loss of the job's own batch
CLOCK, LINK = WorkerTimes(law=Constant()), Link(latency=0.0, bandwidth=1e9)  # of a virtual time that is not looked at


def batches(job: str, overrides: Sequence[str] = (), *, seeds: int = 3, out: str = "") -> dict[str, Any]:
    """Trains a job with each batch and way from each seed, prints a table, and returns it with whether it holds.

    It holds where one rate costs at least `KNEE` times the loss at `UP_TO` times the batch, and linear scaling at most
    `FLAT` times up to there.

    Args:
      job: Its file: the batch for which its rate and warm-up were found, and its steps with that.
      overrides: Of its keys; the seed is each run's own.
      seeds: How many, from 0.
      out: A file of JSON lines: rows in it of the same job are not trained again.

    Raises:
      JaxparError: If the job is wrong, or its rate follows the batch already.
    """
    own = load(job, overrides)
    if own.optimizer.reference_batch:
        rule = "the bench scales the rate itself, from that of the job's own batch"
        raise refuse(f"optimizer.reference_batch = {own.optimizer.reference_batch}", rule=rule, fix="leave it out")
    asked = {"job": job, "overrides": list(overrides)}
    simulate(own.mesh.simulate or 1)
    rows = {(row["way"], row["times"], row["seed"]): row for row in kept(out, asked)}
    for seed in range(seeds):
        for times in TIMES:
            for way in WAYS if times > 1 else WAYS[:1]:
                if (way, times, seed) not in rows:
                    rows[way, times, seed] = asked | _trained(own, way, times, seed)
                    keep(out, rows[way, times, seed])
                row = rows[way, times, seed]
                print(f"seed {seed}  batch {row['batch']:<6}{way:<10}eval loss {row['eval_loss']:.4f}", flush=True)
    table = _table(list(rows.values()), seeds)
    print(f"\n{'batch':>6}{'steps':>7}" + "".join(f"{way:>18}" for way in WAYS) + "   (eval loss, times the first)")
    for line in table:
        cells = [f"{each['eval_loss']:.4f} ({each['ratio']:.2f})" for each in line["ways"].values()]
        print(f"{line['batch']:>6}{line['steps']:>7}" + "".join(f"{cell:>18}" for cell in cells))
    knee = all(line["ways"]["one rate"]["ratio"] >= KNEE for line in table if line["times"] == UP_TO)
    flat = all(line["ways"]["linear"]["ratio"] <= FLAT for line in table if line["times"] <= UP_TO)
    print(f"one rate at {UP_TO} x the batch at least {KNEE}: {'holds' if knee else 'DOES NOT HOLD'}; "
          f"linear up to there at most {FLAT}: {'holds' if flat else 'DOES NOT HOLD'}")  # fmt: skip
    return {**asked, "table": table, "rows": list(rows.values()), "where": where(), "holds": knee and flat}


def with_batch(job: Job, way: str, times: int) -> Job:
    """Returns a job with a larger batch, which sees as many examples, and a rate that follows the batch or does not."""
    reference = job.train.global_batch
    batch = times * reference
    scaling = "sqrt" if way == "sqrt" else "linear"
    scaled = replace(job.optimizer, reference_batch=reference, scaling=scaling).for_batch(batch)
    optimizer = replace(scaled, learning_rate=job.optimizer.learning_rate) if way == "one rate" else scaled
    return replace(
        job, optimizer=optimizer, train=replace(job.train, global_batch=batch, steps=job.train.steps // times)
    )


def _trained(own: Job, way: str, times: int, seed: int) -> dict[str, Any]:
    job = with_batch(own, way, times)
    job = replace(job, train=replace(job.train, seed=seed))
    curve = train(job, Method("sync", AllReduce()), CLOCK, LINK)
    return {
        "way": way, "times": times, "seed": seed, "batch": job.train.global_batch, "steps": job.train.steps,
        "learning_rate": job.optimizer.learning_rate, "warmup": job.optimizer.warmup,
        "eval_loss": curve.eval_loss, "commit": commit(),
    }  # fmt: skip


def _table(rows: Sequence[Mapping[str, Any]], seeds: int) -> list[dict[str, Any]]:
    def mean(way: str, times: int) -> float:
        trained = (WAYS[0] if times == 1 else way, times)  # with the job's own batch all ways are one
        mine = [row for row in rows if (row["way"], row["times"]) == trained and row["seed"] < seeds]
        return float(np.mean([row["eval_loss"] for row in mine]))

    first, found = mean(WAYS[0], 1), []
    for times in TIMES:
        row = next(row for row in rows if row["times"] == times)
        ways = {way: {"eval_loss": mean(way, times), "ratio": mean(way, times) / first} for way in WAYS}
        found.append({"times": times, "batch": row["batch"], "steps": row["steps"], "ways": ways})
    return found


if __name__ == "__main__":
    from .command import main

    raise SystemExit(main("batches"))
