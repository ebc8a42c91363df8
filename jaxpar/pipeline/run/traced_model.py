"""A model as a stage of a pipeline runs it: embedding, layers and head, each traced once.

    embed ──► layers of part 0, 1, ... ──► head and loss

The forward and the backward of the layers are separate functions, as they run in different ticks: `split_backward`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import refuse
from jaxpar.pipeline.jaxprs.counted import counted
from jaxpar.pipeline.jaxprs.dataflow import Traced
from jaxpar.pipeline.jaxprs.split_backward import Halves, halves
from jaxpar.pipeline.tables.schedule import Schedule

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model as the three pure functions that a pipeline runs at different times.

    Attributes:
      name: For messages.
      layers: Layers of each stage where they differ; its arrays then hold as many as the fullest stage has.
      embed: (shared, known) to (x, per_layer): the input of the first layer, and inputs that differ by layer.
      stage: (layers, known, per_layer, x, salt) to y: consecutive layers. `layers` and `per_layer` have a leading dim
        of layers; the salt, an int32, is different in each call, and is folded into the PRNG keys in `known`.
      head: (shared, known, y) to name -> (sum, count); the entry `loss` is minimized.
    """

    name: str
    embed: Callable
    stage: Callable
    head: Callable
    layers: tuple[int, ...] = ()


class TracedModel:
    """A model's functions, traced for the shapes of one stage.

    Attributes:
      depth: Layers of a chunk; where stages have different numbers of layers, of the largest one.
      layers: Layers of each part.
      starts: First layer of each part.
      x: The activations that flow from part to part, as shapes.
      embed: (shared, known) to (x, per_layer).
      stage: (chunk, (known, per_layer, layers that count, part), x) to y.
      halves: Its forward and backward as separate functions; not set for an evaluation.
      head: (shared, known, y, scale) to (sums, gradients of shared, of y), scale times those of the loss; no gradients
        for an evaluation.
      embed_back: (shared, known, g) to gradients of shared; not set for an evaluation.
      sums: The (sum, count) pairs that `head` returns, as shapes.
    """

    def __init__(self, model: Model, schedule: Schedule, shared, chunks, known, *, forward_only: bool):
        # traced for one microbatch and one chunk: all others have the same shapes, and only their numbers differ
        one, chunk = one_of(known), one_of(chunks)
        self.depth = max(leaf.shape[0] for leaf in jax.tree.leaves(chunk))
        self.embed = Traced(lambda shared, known: model.embed(shared, known), shared, one)
        self.x, per_layer = self.embed.shapes
        mine = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((self.depth, *leaf.shape[1:]), leaf.dtype), per_layer)
        self.layers = np.array(model.layers or [self.depth] * schedule.parts, np.int32)
        self.starts = np.cumsum([0, *self.layers[:-1]], dtype=np.int32)
        layers = _of_a_stage(model, self.depth, int(min(self.layers)))

        def stage(chunk, known, x):
            known, mine, count, part = known
            # depth + 1 calls at most in a part: no two calls share a salt
            return layers(chunk, known, mine, x, count, part * (self.depth + 1))

        count = jax.ShapeDtypeStruct((), jnp.int32)
        self.stage = Traced(stage, chunk, (one, mine, count, count), self.x)
        _check_shapes(model.name, self.x, self.stage.shapes)
        if not forward_only:
            self.halves: Halves = halves(self.stage, chunk, (one, mine, count, count), self.x, split=schedule.split)

        scale = jax.ShapeDtypeStruct((), jnp.float32)

        def total(shared, known, y):
            sums = model.head(shared, known, y)
            return sums["loss"][0], sums

        # value and gradient in one function: logits are live inside of it alone, and never in a slot
        def head(shared, known, y, scale):
            _, pull, sums = jax.vjp(lambda shared, y: total(shared, known, y), shared, y, has_aux=True)
            dshared, dy = pull(scale)
            return sums, dshared, dy

        # the lookup is differentiated from the batch again: nothing of its forward is kept until the last B
        def embed_back(shared, known, g):
            _, pull = jax.vjp(lambda shared: model.embed(shared, known)[0], shared)
            return pull(g)[0]

        if forward_only:
            self.head = Traced(lambda *args: (total(*args[:3])[1], None, None), shared, one, self.x, scale)
        else:
            self.head = Traced(head, shared, one, self.x, scale)
            self.embed_back = Traced(embed_back, shared, one, self.x)
        self.sums = self.head.shapes[0]


def _of_a_stage(model: Model, depth: int, fewest: int) -> Callable:
    """Returns the layers of a stage that has at most `depth` and at least `fewest` of them.

    Stages run one program, so a layer that only some have runs on all, and its result is dropped where the stage has
    fewer: such a tick takes as long as on the fullest stage anyway.
    """

    def run(chunk, known, mine, x, count, salt):
        if fewest == depth:
            return model.stage(chunk, known, mine, x, salt)
        every = counted(model.stage, chunk, known, mine, x, salt)
        if every is not None:
            return every(count, chunk, known, mine, x, salt)
        # where layers are more than one scan: as many as all stages have, and the others one by one
        some = lambda first, last: jax.tree.map(lambda leaf: leaf[first:last], (chunk, mine))  # noqa: E731
        layers, each = some(0, fewest)
        x = model.stage(layers, known, each, x, salt)
        for extra in range(fewest, depth):
            layers, each = some(extra, extra + 1)
            y = model.stage(layers, known, each, x, salt + extra)
            x = jax.tree.map(lambda a, b, n=extra: jnp.where(count > n, a, b), y, x)
        return x

    return run


def one_of(tree: Tree) -> Tree:
    """Returns the shapes without their leading dim: one chunk, one microbatch."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def _check_shapes(name: str, x: Tree, y: Tree) -> None:
    show = lambda tree: ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree))  # noqa: E731
    whole = [leaf for leaf in jax.tree.leaves(x) if not jnp.issubdtype(leaf.dtype, jnp.floating)]
    if whole:
        raise refuse(
            f"the layers of {name} take {show(whole)}",
            rule="arrays that flow from layer to layer in a pipeline are floating point, as each stage takes their "
            "gradient",
            fix="a floating-point array; read integers that are the same for all layers from the batch",
        )
    same = jax.tree.structure(x) == jax.tree.structure(y)
    if not same or [(a.shape, a.dtype) for a in jax.tree.leaves(x)] != [(b.shape, b.dtype) for b in jax.tree.leaves(y)]:
        raise refuse(
            f"the layers of {name} take {show(x)} and return {show(y)}",
            rule="a layer of a pipeline returns the structure, shapes and dtypes that it takes",
            fix="move the code that changes the shape before or after pipelined(layers, x)",
        )
