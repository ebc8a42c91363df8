"""Plans of traced models over layouts that nobody chose, beside their programs as XLA compiles them for absent GPUs.

A draw takes a model, then a kind of layout (its axes, ZeRO stage and remat policy), then a layout of that kind. Bytes
are all that the program needs on a device; seconds are replayed from it, with the replay's prices in the plan too.
Pipelines are not among the layouts: `tests/plan/test_traced_stages.py` compiles them.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import optax

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.inspector.timeline import HOP, LAUNCH, LINE
from jaxpar.measure.record import commit, versions
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.enumeration import select_one
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.search import Question, describe
from jaxpar.units import show_bytes, show_seconds

from .plain_models import CASES, Case, classify, floats, ids
from .traced_models import replay_prices

DEVICES, TARGET = 8, "h100:1x8"
ROWS = 8  # times the examples of `CASES`, so that a device has as many as there
MICROBATCHES = 4  # most of them: XLA compiles a loop over them once
BOUNDS = {"bytes": {"mean": 0.05, "ninetieth": 0.1, "worst": 0.2}, "seconds": {"mean": 0.12, "worst": 0.3}}


def decoder(*, rows: int = 8, seq: int = 512) -> Case:
    """The built-in decoder, which marks its blocks for remat."""
    config = jp.DecoderConfig(vocab=8192, layers=4, dim=512, heads=8, kv_heads=4, hidden=1536, seq=seq)
    batch = {"inputs": ids(rows, seq), "targets": ids(rows, seq)}
    return lambda rngs: jp.Decoder(config, rngs=rngs), jp.next_token_loss, batch


def vision(*, rows: int = 32, side: int = 128) -> Case:
    """The built-in vision transformer, which marks its blocks for remat."""
    config = jp.ViTConfig(size=side, channels=3, patch=8, classes=1000, layers=4, dim=384, heads=6)
    batch = {"inputs": floats(rows, side, side, 3), "labels": ids(rows)}
    return lambda rngs: jp.ViT(config, rngs=rngs), classify, batch


MODELS: dict[str, Callable[..., Case]] = {**CASES, "jp.Decoder": decoder, "jp.ViT": vision}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A model and a layout of it."""

    model: str
    candidate: Candidate

    @property
    def name(self) -> str:
        """The model and its layout, in one line."""
        return f"{self.model}: {describe(self.candidate)}"


@cache
def _case(name: str) -> Case:
    model, loss, batch = MODELS[name]()
    return model, loss, {key: _repeated(leaf) for key, leaf in batch.items()}


def _repeated(leaf: Any) -> Any:
    return leaf.update(shape=(ROWS * leaf.shape[0], *leaf.shape[1:]))


@cache
def question_of(name: str) -> Question:
    """Returns the question of a model's plan."""
    model, loss, batch = _case(name)
    step = jp.train_step(jp.compose(model, jp.Parallel(), jp.target_devices("h100:1x1")), loss, optax.adamw(1e-3),
                         precision="bf16")  # fmt: skip
    return jp.plan(step, batch, devices=DEVICES).question


def draw(count: int, *, seed: int, only: tuple[str, ...] = ()) -> Iterator[Pair]:
    """Draws pairs: models in turn, in a drawn order, and of each a kind of layout and a layout of that kind."""
    generator, seen = np.random.default_rng(seed), set()
    names = [name for name in MODELS if not only or name in only]
    while len(seen) < count:
        for name in generator.permutation(names).tolist():
            pair = Pair(model=name, candidate=_draw_layout(question_of(name), generator))
            if pair.name not in seen and len(seen) < count:
                seen.add(pair.name)
                yield pair


def _draw_layout(question: Question, generator: np.random.Generator) -> Candidate:
    layouts = question.legal()
    usual = np.flatnonzero((layouts.microbatches <= MICROBATCHES) & (layouts.pipe == 1))
    axes = [np.asarray(layouts.size(axis)) > 1 for axis in ("data", "fsdp", "context", "tensor")]
    kinds = np.stack([*axes, layouts.zero, np.unique(layouts.remat, return_inverse=True)[1],
                      np.asarray(layouts.microbatches) > 1])[:, usual]  # fmt: skip
    distinct, of_layout = np.unique(kinds, axis=1, return_inverse=True)
    kind = generator.integers(distinct.shape[1])
    return select_one(layouts, int(generator.choice(usual[of_layout.ravel() == kind])))


def network_prices() -> Hardware:
    """Returns H100s with the prices of `jaxpar.inspector.timeline`, those of collectives too."""
    machine = replay_prices()
    inside = replace(machine.inside, bandwidth=LINE * machine.chip.nvlink, latency=HOP["node"] * 3 / 7)
    return replace(machine, inside=inside, launch=LAUNCH)


def predict(pair: Pair) -> dict[str, Any]:
    """Returns the planned bytes and seconds of a pair, and their causes."""
    question = question_of(pair.model)
    memory = question.costs.memory(pair.candidate)
    seconds = question.costs.time(pair.candidate, network_prices())
    return {
        "bytes": float(memory.total), "seconds": float(seconds.total),
        "causes": {name: {key: float(value) for key, value in amounts.items()}
                   for name, amounts in (("bytes", memory), ("seconds", seconds))},
    }  # fmt: skip


def compiled(pair: Pair) -> dict[str, Any]:
    """Returns the bytes and replayed seconds of a pair's program, and their causes; or why it has none."""
    (model, loss, batch), layout = _case(pair.model), pair.candidate
    began = time.perf_counter()
    parallel = jp.Parallel(
        data=layout.data, fsdp=layout.fsdp, context=layout.context, tensor=layout.tensor,
        zero=layout.zero if layout.fsdp > 1 else None,
    )  # fmt: skip
    named = question_of(pair.model).model.named_axes
    try:
        if layout.tensor > 1 or (layout.context > 1 and "context" not in named):
            parallel = jp.find_specs(model, loss, batch, parallel, precision="bf16").parallel
        step = jp.train_step(
            jp.compose(model, parallel, jp.target_devices(TARGET)), loss, optax.adamw(1e-3), precision="bf16",
            remat=layout.remat, accumulate=layout.microbatches,
        )  # fmt: skip
        report = jp.inspect(step, batch)
    except JaxparError as error:
        return {"refusal": str(error.problems[0])}
    timeline = report.timeline
    return {
        "bytes": float(report.total), "seconds": timeline.seconds, "compiled_in": time.perf_counter() - began,
        "causes": {
            "bytes": {share.cause: share.bytes for share in report.memory},
            "seconds": {"compute": timeline.compute, "exposed": timeline.exposed, "all": timeline.communication},
            "sent": {axis: {**kinds} for axis, kinds in report.by_axis.items()},
        },
    }  # fmt: skip


def traced_layouts(
    *, count: int, seed: int | None = None, only: tuple[str, ...] = (), out: str = "", minutes: float = 0.0
) -> dict[str, Any]:
    """Returns predictions beside programs of drawn pairs, as JSON has them; prints each as it comes.

    Args:
      count: Pairs to draw.
      seed: Of the draw; None takes the clock's seconds.
      only: Names of models; all if empty.
      out: File of compiled rows, JSON lines; pairs in it are not compiled again.
      minutes: Starts no compilation later than that; 0 for no limit.
    """
    seed, began = int(time.time()) if seed is None else seed, time.monotonic()
    print(f"seed {seed}: predicted, compiled and the error of the bytes; predicted, replayed and that of the seconds")
    known, rows = _earlier_rows(out), []
    for pair in draw(count, seed=seed, only=only):
        if pair.name not in known:
            if minutes and time.monotonic() - began > 60 * minutes:
                continue
            known[pair.name] = {"pair": pair.name, **compiled(pair)}
            if out:
                with Path(out).open("a") as file:
                    file.write(json.dumps(known[pair.name]) + "\n")
        rows.append(row := _row(pair, known[pair.name]))
        print(f"  {_line(row)}", flush=True)
    errors = summary(rows)
    holds = bool(errors) and all(
        errors[name][key] <= bound for name, bounds in BOUNDS.items() for key, bound in bounds.items()
    )
    print("\n".join(_shown(name, numbers) for name, numbers in errors.items()))
    print(f"bounds {'hold' if holds else 'DO NOT HOLD'}")
    return {
        "question": {"count": count, "seed": seed}, "layouts": rows, "errors": errors, "holds": holds,
        "where": {"versions": versions(), "commit": commit()},
    }  # fmt: skip


def _earlier_rows(out: str) -> dict[str, dict[str, Any]]:
    lines = Path(out).read_text().splitlines() if out and Path(out).exists() else []
    return {row["pair"]: row for row in map(json.loads, lines)}


def _row(pair: Pair, program: Mapping[str, Any]) -> dict[str, Any]:
    predicted = predict(pair)
    error = {key: predicted[key] / program[key] - 1 for key in BOUNDS} if "bytes" in program else {}
    candidate = {key: value for key, value in asdict(pair.candidate).items() if key != "axes"}
    return {"pair": pair.name, "candidate": candidate, "predicted": predicted, "compiled": program, "error": error}


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the mean, the ninetieth percentile and the worst of the errors of bytes and of seconds."""
    result = {}
    for name in BOUNDS:
        errors = np.abs([row["error"][name] for row in rows if row["error"]])
        if len(errors):
            result[name] = {
                "layouts": len(errors), "mean": float(errors.mean()), "ninetieth": float(np.quantile(errors, 0.9)),
                "worst": float(errors.max()),
            }  # fmt: skip
    return result


def _line(row: Mapping[str, Any]) -> str:
    predicted, program, error = row["predicted"], row["compiled"], row["error"]
    if not error:
        return f"{row['pair']}: {program['refusal']}"
    return (
        f"{row['pair']:78}{show_bytes(predicted['bytes']):>11}{show_bytes(program['bytes']):>11}{error['bytes']:>+8.1%}"
        f"{show_seconds(predicted['seconds']):>11}{show_seconds(program['seconds']):>11}{error['seconds']:>+8.1%}"
    )


def _shown(name: str, numbers: Mapping[str, float]) -> str:
    shown = ", ".join(f"{key} {numbers[key]:.1%}" for key in ("mean", "ninetieth", "worst"))
    bounds = ", ".join(f"{key} {bound:.0%}" for key, bound in BOUNDS[name].items())
    return f"{name} of {numbers['layouts']} layouts: {shown}; bounds: {bounds}"


if __name__ == "__main__":
    from .command import main

    raise SystemExit(main("traced_layouts"))
