"""The loss that ways to agree cost on real data: the quickstart's model by each of them, beside an all-reduce per step.

    method x seed ─► trained to as many examples ─► eval loss ─► mean over seeds / that of `sync` ─► its bound

The optimizer, its rate and the order of examples are the same for all of them: nothing is tuned for a method.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpar.errors import refuse, suggest
from jaxpar.exchange.averaging.local import DiLoCo
from jaxpar.exchange.averaging.streaming import Streaming
from jaxpar.exchange.base import AllReduce, Exchange
from jaxpar.exchange.clock.base import Constant, WorkerTimes
from jaxpar.exchange.compressed.quantization import Sign
from jaxpar.exchange.compressed.sparsification import TopK
from jaxpar.job.compare.parse_methods import Method
from jaxpar.job.compare.training import check_all, train
from jaxpar.job.file.parse import load
from jaxpar.measure.record import commit, where
from jaxpar.mesh.chips import Link
from jaxpar.mesh.devices import simulate
from jaxpar.units import show_bytes

from .rows import keep, kept

METHODS: Mapping[str, Exchange] = {
    "sync": AllReduce(),
    "diloco": DiLoCo(every=20),
    "streaming": Streaming(every=20, fragments=4, delay=2),
    "sign": Sign(),
    "topk": TopK(share=0.01),
    "sign without feedback": Sign(feedback=False),
    "topk without feedback": TopK(share=0.01, feedback=False),
}
AT_MOST = {name: 1.02 for name in ("diloco", "streaming", "sign", "topk")}  # of the loss of `sync`
AT_LEAST = {name: 1.05 for name in ("sign without feedback", "topk without feedback")}
CLOCK, LINK = WorkerTimes(law=Constant()), Link(latency=0.0, bandwidth=1e9)  # of a virtual time that is not looked at


def exchanges(
    job: str, overrides: Sequence[str] = (), *, only: Sequence[str] = (), seeds: int = 3, out: str = ""
) -> dict[str, Any]:
    """Trains a job by each method from each seed, prints a table, and returns it with whether the bounds hold.

    Args:
      job: Its file.
      overrides: Of its keys; the seed is each run's own.
      only: Names of `METHODS`; all of them where empty.
      seeds: How many, from 0. All methods are trained from the first one before any is from the second.
      out: A file of JSON lines: rows in it of the same job are not trained again.

    Raises:
      JaxparError: If there is no such method, or the job is wrong.
    """
    for name in only:
        if name not in METHODS:
            raise refuse(f"--only {name!r:.60}", rule="a method of the bench has a name", fix=suggest(name, METHODS))
    names = list(dict.fromkeys(("sync", *(only or METHODS))))
    asked = {"job": job, "overrides": list(overrides)}
    own = load(job, overrides)
    simulate(own.mesh.simulate or 1)
    check_all(own, [Method(name, METHODS[name]) for name in names])
    rows = {(row["method"], row["seed"]): row for row in kept(out, asked)}
    for seed in range(seeds):
        for name in names:
            if (name, seed) not in rows:
                rows[name, seed] = _trained(name, seed, asked)
                keep(out, rows[name, seed])
            print(f"seed {seed}  {name:<24}eval loss {rows[name, seed]['eval_loss']:.4f}", flush=True)
    table = {name: _summary([rows[name, seed] for seed in range(seeds)], rows) for name in names}
    print(f"\n{'':<24}{'eval loss':>10}{'of sync':>9}{'from':>9}{'to':>8}{'bytes a step':>14}  bound")
    for name, line in table.items():
        print(f"{name:<24}{_shown(line)}")
    return {
        **asked, "table": table, "rows": [rows[name, seed] for seed in range(seeds) for name in names],
        "where": where(), "holds": all(line["holds"] for line in table.values()),
    }  # fmt: skip


def _trained(name: str, seed: int, asked: Mapping[str, Any]) -> dict[str, Any]:
    job = load(asked["job"], [*asked["overrides"], f"train.seed={seed}"])
    curve = train(job, Method(name, METHODS[name]), CLOCK, LINK)
    return {
        **asked, "method": name, "exchange": str(METHODS[name]), "seed": seed, "eval_loss": curve.eval_loss,
        "bytes": curve.bytes[-1] / len(curve.bytes), "loss": [round(float(x), 5) for x in curve.loss],
        "commit": commit(),
    }  # fmt: skip


def _summary(mine: Sequence[Mapping[str, Any]], rows: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a method's mean loss, how many times that of `sync` it is, and from which to which with the same seed."""
    name, losses = mine[0]["method"], np.array([row["eval_loss"] for row in mine])
    sync = np.array([rows["sync", row["seed"]]["eval_loss"] for row in mine])
    ratio = float(losses.mean() / sync.mean())
    most, least = AT_MOST.get(name), AT_LEAST.get(name)
    return {
        "eval_loss": float(losses.mean()), "ratio": ratio,
        "ratios": (losses / sync).tolist(), "bytes": mine[0]["bytes"], "at_most": most, "at_least": least,
        "holds": (most is None or ratio <= most) and (least is None or ratio >= least),
    }  # fmt: skip


def _shown(line: Mapping[str, Any]) -> str:
    low, high = min(line["ratios"]), max(line["ratios"])
    numbers = f"{line['eval_loss']:>10.4f}{line['ratio']:>9.3f}{low:>9.3f}{high:>8.3f}{show_bytes(line['bytes']):>14}"
    bound = f"at most {line['at_most']}" if line["at_most"] else f"at least {line['at_least']}"
    none = line["at_most"] is line["at_least"] is None
    return numbers + ("" if none else f"  {bound}: {'holds' if line['holds'] else 'DOES NOT HOLD'}")


if __name__ == "__main__":
    from .command import main

    raise SystemExit(main("exchanges"))
