"""Bare models at the widths they were published in, as compiled for absent H100s: chosen beside written by hand.

    python tests/unannotated_compiled.py h100:8x8 fsdp=8,tensor=8 [MODEL ...]

Wire and memory are of one device. Where `tensor` does not divide a vocabulary, an expert who may not change the model
leaves the table whole or cuts its other dim; both are compiled.
"""

import math
import sys
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import optax
import unannotated as models

import jaxpar as jp

ROWS, LENGTH = 16, 512  # on 2 x 2 x 2 a replica has 2,048 tokens
LOSSES = {"ViT": models.image_loss, "Whisper": models.sound_loss}
WAYS = ("chosen", "by hand", "by hand, table whole", "by hand, table cut along embed")


@dataclass(frozen=True)
class Compiled:
    """One device's part of a step.

    Attributes:
      wire: Bytes that it sends.
      memory: Bytes that it needs.
      flop: Of matmuls.
      share: What it computes, in multiples of its own share.
    """

    wire: float
    memory: int
    flop: int
    share: float


def batch(name):
    """Returns the shapes of a batch."""
    rows = {"label": (ROWS,)} if name == "ViT" else dict.fromkeys(("tokens", "targets"), (ROWS, LENGTH))
    made = {key: jax.ShapeDtypeStruct(shape, jnp.int32) for key, shape in rows.items()}
    floats = {"ViT": {"image": (ROWS, 224, 224, 3)}, "Whisper": {"sound": (ROWS, 2 * LENGTH, 80)}}.get(name, {})
    return made | {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in floats.items()}


def compiled(name, way, target, sizes):
    """Returns a model's step as compiled; None where a rule asks for what does not divide.

    Args:
      name: Of the model.
      way: One of `WAYS`.
      target: Of `jp.target_devices`.
      sizes: (axis, size) pairs.
    """
    try:
        layout = placed(name, way, target, sizes)
    except jp.JaxparError:
        return None
    chosen = placed(name, "chosen", target, sizes)
    return _compiled(name, "chosen" if specs(layout) == specs(chosen) else way, target, sizes)


@cache
def placed(name, way, target, sizes):
    """Returns the layout of a model."""
    import expert_rules  # describes 14 models, which takes seconds: not where tests are only collected

    rules = {} if way == "chosen" else _rules(name, way)
    return expert_rules.by_hand(expert_rules.PUBLISHED[name], rules, dict(sizes), jp.target_devices(target))


def specs(layout):
    """Returns the specs of all parameters: equal ones are equal programs, and compiled once."""
    return {path: (place.stored, place.used, place.whole) for path, place in layout.placements.items()}


@cache
def _compiled(name, way, target, sizes):
    step = jp.train_step(placed(name, way, target, sizes), LOSSES.get(name, models.token_loss), optax.adamw(1e-3))
    found = jp.inspect(step, batch(name))
    made, wire = found.flop.total - found.flop.squeezed, sum(entry.step_wire for entry in found.ledger)
    return Compiled(wire, found.total, found.flop.total, made / step.compiler.share.flop)


def _rules(name, way):
    import expert_rules

    table, head = {
        "by hand": (("vocab", None), (None, "vocab")),
        "by hand, table whole": ((None, None), (None, None)),
        "by hand, table cut along embed": ((None, "tensor"), ("tensor", None)),
    }[way]
    other = {("vocab", None): table, (None, "vocab"): head, ("vocab",): (None,) if table[0] is None else ("vocab",)}
    return {end: other.get(dims, dims) for end, dims in expert_rules.RULES[name].items()}


def ways(name, target, sizes, *, odd=WAYS[2:]):
    """Returns each way that compiles, chosen first; those of `odd` where `tensor` does not divide a vocabulary."""
    found = {way: compiled(name, way, target, sizes) for way in WAYS[:2]}
    if found["by hand"] is None:
        found |= {way: compiled(name, way, target, sizes) for way in odd}
    return {way: each for way, each in found.items() if each is not None}


def rows(name, target, sizes):
    """Yields the rows of a Markdown table."""
    found = ways(name, target, sizes)
    for way, each in found.items():
        more = found["chosen"].wire / each.wire if each.wire else math.inf
        yield (
            f"| {name} | {' x '.join(f'{axis} {size}' for axis, size in sizes)} | {way} | {each.wire / 2**20:,.1f} "
            f"| {more:.3f} | {each.memory / 2**30:.2f} | {each.flop / 1e9:,.1f} | {each.share:.2f} |"
        )


if __name__ == "__main__":
    print("| model | layout | rules | MiB on the wire | chosen / this | GiB | GFLOP | of its share |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    for layout in sys.argv[2].split(";"):
        sizes = tuple((axis, int(size)) for axis, size in (each.split("=") for each in layout.split(",")))
        for name in sys.argv[3:] or models.NAMES:
            print(*rows(name, sys.argv[1], sizes), sep="\n", flush=True)
