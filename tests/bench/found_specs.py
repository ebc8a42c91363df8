"""Specs that are found beside what rules read, for models without a name, as XLA compiles them for eight absent H100s.

Both layouts of a model are compiled whole, with AdamW and bf16. Found specs may send 1.02 times the bytes of the rules
at most, and use 1.02 times their memory; their reduces are predicted within 2 %, and their gathers within 10 %.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

import jaxpar as jp
from jaxpar.units import show_bytes, show_seconds
from tests.specs import models

DEVICES = 8
LARGE = {"vocab": 32_000, "dim": 1024, "heads": 16, "hidden": 4096, "layers": 4}


def _tokens(rows: int, length: int) -> dict[str, Any]:
    return {key: jax.ShapeDtypeStruct((rows, length), "int32") for key in ("x", "y")}


def _floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "float32")


def _gpt(**settings: Any):
    return lambda rngs: models.Gpt(rngs, **{**LARGE, **settings})


CASES: Mapping[str, tuple[Any, Any, Mapping[str, Any]]] = {
    "GPT": (_gpt(), models.next_token, _tokens(2, 2048)),
    "GPT, 8 heads of keys": (_gpt(kv_heads=8), models.next_token, _tokens(2, 2048)),
    "GPT, scanned": (lambda rngs: models.ScannedGpt(rngs, **LARGE), models.next_token, _tokens(2, 2048)),
    "mixture": (_gpt(experts=8, capacity=640), models.next_token, _tokens(2, 2048)),
    "AlexNet": (
        models.AlexNet,
        models.classes,
        {"x": _floats(128, 224, 224, 3), "y": jax.ShapeDtypeStruct((128,), "int32")},
    ),
    "recommender": (
        lambda rngs: models.Recommender(rngs, rows=2_000_000, hidden=1024),
        models.clicks,
        {"x": jax.ShapeDtypeStruct((8192, 26), "int32"), "y": _floats(8192)},
    ),
    "LSTM": (lambda rngs: models.Lstm(rngs, vocab=32_000, dim=1024), models.next_token, _tokens(32, 256)),
    "two towers": (
        lambda rngs: models.TwoTowers(
            rngs, dim=1024, heads=16, hidden=4096, layers=2, vocab=32_000, patch=768
        ),
        models.contrastive,
        {"x": jax.ShapeDtypeStruct((64, 64), "int32"), "pictures": _floats(64, 196, 768)},
    ),
}  # fmt: skip


def compare(name: str) -> dict[str, Any]:
    """Returns the traffic, memory and replayed seconds of a model's step with and without specs that are found."""
    model, loss, batch = CASES[name]
    devices = jp.target_devices(f"h100:1x{DEVICES}")
    found = jp.find_specs(model, loss, batch, jp.Parallel(tensor=DEVICES), precision="bf16")
    reports = {}
    traced = jp.from_nnx(model, *(leaf for key, leaf in batch.items() if key != "y"))  # rules that read its use
    for key, source, parallel in (("found", model, found.parallel), ("rules", traced, jp.Parallel(tensor=DEVICES))):
        step = jp.train_step(jp.compose(source, parallel, devices), loss, optax.adamw(1e-3), precision="bf16")
        report = jp.inspect(step, batch)
        reports[key] = {
            "traffic": {kind: size for axis in report.by_axis.values() for kind, size in axis.items()},
            "sent": sum(sum(kinds.values()) for kinds in report.by_axis.values()),
            "memory": report.total,
            "seconds": report.timeline.seconds,
        }
    solution = found.solution
    return reports | {
        "predicted": solution.traffic, "gap": solution.gap, "relaxed gap": 1 - solution.relaxed / solution.best,
        "seconds": found.seconds,
    }  # fmt: skip


def errors(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the relative errors of the predicted bytes: of reduces, and of gathers and exchanges."""
    kinds = {"reduces": ("all-reduce", "reduce-scatter"), "gathers": ("all-gather", "all-to-all", "collective-permute")}
    result = {}
    for name, members in kinds.items():
        predicted, compiled = (
            sum(source.get(kind, 0.0) for kind in members) for source in (row["predicted"], row["found"]["traffic"])
        )
        result[name] = predicted / compiled - 1 if compiled > 2**20 else 0.0
    return result


def run(names: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Prints the comparison of models and returns it, with status 1 if a bound does not hold."""
    print(
        f"{'model':22}{'predicted':>12}{'compiled':>12}{'rules':>12}{'reduces':>9}{'gathers':>9}"
        f"{'memory':>11}{'rules':>11}{'step':>9}{'rules':>9}{'found in':>10}"
    )
    results, holds = {}, True
    for name in names:
        row = compare(name)
        found, rules, error = row["found"], row["rules"], errors(row)
        results[name] = row | {"errors": error}
        print(
            f"{name:22}{show_bytes(int(sum(row['predicted'].values()))):>12}{show_bytes(int(found['sent'])):>12}"
            f"{show_bytes(int(rules['sent'])):>12}{error['reduces']:>+9.1%}{error['gathers']:>+9.1%}"
            f"{show_bytes(found['memory']):>11}{show_bytes(rules['memory']):>11}"
            f"{show_seconds(found['seconds']):>9}{show_seconds(rules['seconds']):>9}{row['seconds']:>8.1f} s",
            flush=True,
        )
        holds &= found["sent"] <= 1.02 * rules["sent"] and found["memory"] <= 1.02 * rules["memory"]
        holds &= abs(error["reduces"]) <= 0.02 and abs(error["gathers"]) <= 0.1
    shares = [row["found"]["sent"] / row["rules"]["sent"] for row in results.values()]
    print(f"bytes beside those by rules, geometric mean: {np.exp(np.mean(np.log(shares))):.2f}")
    return results, 0 if holds else 1


if __name__ == "__main__":
    from .command import main

    raise SystemExit(main("found_specs"))
