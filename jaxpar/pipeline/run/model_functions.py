"""Functions of a model in a pipeline: of its embedding, layers and head, or of parts that are different programs.

    embed ──► layers of part 0, 1, ... ──► head and loss

Forward and backward of the layers are separate functions, because they run in different ticks: see `split_backward`.
The same holds for one part of a model:

    forward       params, inputs              ─►  messages to later parts, residuals
    backward      params, inputs, residuals   ─►  gradients of the parameters and of the messages received, or of the
                  loss in the last part; without residuals: recomputes the forward

The inputs of a part are (data, state, messages received). Floating-point leaves of messages have gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import refuse
from jaxpar.jaxprs.dataflow import Traced, shapes
from jaxpar.jaxprs.part_programs import PartProgram
from jaxpar.jaxprs.shorter_scan import masked_layers
from jaxpar.jaxprs.split_backward import Halves, halves
from jaxpar.pipeline.run.stage_buffers import load, slot_shapes
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.sharding.names import AGAIN, BACKWARD, Tree, is_float


@dataclass(frozen=True, kw_only=True)
class PipelineFunctions:
    """A model as the three pure functions that a pipeline runs at different times.

    Attributes:
      name: Name of the model, for messages.
      layers: Number of layers of each stage, if they differ; all stages then hold as many as the largest stage.
      embed: Maps (shared, inputs) to (x, per_layer): the input of the first layer, and inputs that differ by layer.
      stage: Maps (layers, inputs, per_layer, x, salt) to y through consecutive layers. Dim 0 of `layers` and of
        `per_layer` is layers. The salt is an int32 that differs between calls; it is folded into PRNG keys of `inputs`.
      head: Maps (shared, inputs, y) to {name: (sum, count)}; the entry `loss` is minimized.
    """

    name: str
    embed: Callable
    stage: Callable
    head: Callable
    layers: tuple[int, ...] = ()


class PipelineModel:
    """A model's functions, traced for the shapes of one stage.

    Attributes:
      depth: Number of layers of a chunk, or the largest number if chunks differ.
      layers: Number of layers of each part.
      starts: First layer of each part.
      x: Shapes of the activations that parts pass on.
      embed: Maps (shared, inputs) to (x, per_layer).
      stage: Maps (chunk, (inputs, per_layer, number of layers, part), x) to y.
      halves: Forward and backward of `stage` as separate functions; not set for an evaluation.
      head: Maps (shared, inputs, y, scale) to (sums, gradients of shared, gradient of y); the gradients are scale times
        those of the loss, and omitted for an evaluation.
      embed_backward: Maps (shared, inputs, g) to gradients of shared; not set for an evaluation.
      sums: The (sum, count) pairs that `head` returns, as shapes.
    """

    def __init__(self, model: PipelineFunctions, schedule: Schedule, shared, chunks, inputs, *, forward_only: bool):
        # traced for one microbatch and one chunk: all others have the same shapes
        batch, chunk = slot_shapes(inputs), slot_shapes(chunks)
        self.depth = max(leaf.shape[0] for leaf in jax.tree.leaves(chunk))
        self.embed = Traced(lambda shared, inputs: model.embed(shared, inputs), shared, batch)
        self.x, per_layer = self.embed.shapes
        slices = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((self.depth, *leaf.shape[1:]), leaf.dtype), per_layer)
        self.layers = np.array(model.layers or [self.depth] * schedule.parts, np.int32)
        self.starts = np.cumsum([0, *self.layers[:-1]], dtype=np.int32)
        layers = _stage_function(model, self.depth, int(min(self.layers)))

        def stage(chunk, inputs, x):
            inputs, slices, count, part = inputs
            # at most depth + 1 calls in a part: no two calls share a salt
            return layers(chunk, inputs, slices, x, count, part * (self.depth + 1))

        count = jax.ShapeDtypeStruct((), jnp.int32)
        self.stage = Traced(stage, chunk, (batch, slices, count, count), self.x)
        _check_shapes(model.name, self.x, self.stage.shapes)
        if not forward_only:
            self.halves: Halves = halves(self.stage, chunk, (batch, slices, count, count), self.x, split=schedule.split)

        scale = jax.ShapeDtypeStruct((), jnp.float32)

        def total(shared, inputs, y):
            sums = model.head(shared, inputs, y)
            return sums["loss"][0], sums

        # value and gradient in one function: logits are live inside of it only, and never in a slot
        def head(shared, inputs, y, scale):
            _, pull, sums = jax.vjp(lambda shared, y: total(shared, inputs, y), shared, y, has_aux=True)
            dshared, dy = pull(scale)
            return sums, dshared, dy

        # recomputes the lookup from the batch: no residual of it is saved until the last B
        def embed_backward(shared, inputs, g):
            _, pull = jax.vjp(lambda shared: model.embed(shared, inputs)[0], shared)
            return pull(g)[0]

        if forward_only:
            self.head = Traced(lambda *args: (total(*args[:3])[1], None, None), shared, batch, self.x, scale)
        else:
            self.head = Traced(head, shared, batch, self.x, scale)
            self.embed_backward = Traced(embed_backward, shared, batch, self.x)
        self.sums = self.head.shapes[0]

    def stage_inputs(self, inputs: Tree, per_layer: Tree, part: jax.Array) -> tuple[Tree, Tree, jax.Array, jax.Array]:
        """Returns the inputs of `stage` for a part, given those of all layers."""
        start, count, fewest = jnp.asarray(self.starts)[part], jnp.asarray(self.layers)[part], min(self.layers)

        def slice_layers(leaf):
            # the static length of the slice is that of the fullest stage: a stage with fewer layers reads into the next
            # one's. `dynamic_slice` would shift a slice that exceeds the array, so the array is made longer
            extended = jnp.concatenate([leaf, leaf[: self.depth - fewest]]) if fewest < self.depth else leaf
            return jax.lax.dynamic_slice_in_dim(extended, start, self.depth)

        return inputs, jax.tree.map(slice_layers, per_layer), count, part

    def recompute_residuals(self, chunk: Tree, inputs: tuple, x: Tree) -> list:
        """Runs the forward of a chunk again."""
        with jax.named_scope(AGAIN):  # the inspector counts it as recomputation
            return self.halves.forward(chunk, inputs, x)[1]


def _stage_function(model: PipelineFunctions, depth: int, fewest: int) -> Callable:
    """Builds the function that runs the layers of a chunk, if chunks have between `fewest` and `depth` layers.

    All stages run one program: a layer that only some stages have runs on all, and the others drop its result. A tick
    takes as long as the stage with the most layers in any case.
    """

    def run(chunk, inputs, slices, x, count, salt):
        if fewest == depth:
            return model.stage(chunk, inputs, slices, x, salt)
        counted_layers = masked_layers(model.stage, chunk, inputs, slices, x, salt)
        if counted_layers is not None:
            return counted_layers(count, chunk, inputs, slices, x, salt)
        # not a single scan: runs the layers that all stages have together, and the others one by one
        part = lambda first, last: jax.tree.map(lambda leaf: leaf[first:last], (chunk, slices))  # noqa: E731
        layers, per_layer = part(0, fewest)
        x = model.stage(layers, inputs, per_layer, x, salt)
        for extra in range(fewest, depth):
            layers, per_layer = part(extra, extra + 1)
            y = model.stage(layers, inputs, per_layer, x, salt + extra)
            x = jax.tree.map(lambda a, b, n=extra: jnp.where(count > n, a, b), y, x)
        return x

    return run


def _check_shapes(name: str, x: Tree, y: Tree) -> None:
    fmt = lambda tree: ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree))  # noqa: E731
    integers = [leaf for leaf in jax.tree.leaves(x) if not jnp.issubdtype(leaf.dtype, jnp.floating)]
    if integers:
        raise refuse(
            f"the layers of {name} take {fmt(integers)}",
            rule="arrays that flow from layer to layer in a pipeline are floating point, as each stage takes their "
            "gradient",
            fix="a floating-point array; read integers that are the same for all layers from the batch",
        )
    alike = jax.tree.structure(x) == jax.tree.structure(y)
    if not alike or [(a.shape, a.dtype) for a in jax.tree.leaves(x)] != [
        (b.shape, b.dtype) for b in jax.tree.leaves(y)
    ]:
        raise refuse(
            f"the layers of {name} take {fmt(x)} and return {fmt(y)}",
            rule="a layer of a pipeline returns the structure, shapes and dtypes that it takes",
            fix="move the code that changes the shape before or after pipelined(layers, x)",
        )


class PartFunctions:
    """The functions of a part. Parameters are dicts by index.

    Args:
      program: The part.
      params: Shapes of its parameters.
      keep_residuals: Whether its forward leaves residuals for its backward.

    Attributes:
      targets: Parts that send gradients to this one.
      halves: Its forward and backward if it keeps residuals, else None.
    """

    def __init__(self, program: PartProgram, params: Mapping[int, jax.ShapeDtypeStruct], *, keep_residuals: bool):
        self.program = program
        self.targets = [target for target, variables in program.sends.items() if floats(shapes(variables))]
        self.halves = self._trace_halves(params) if keep_residuals else None

    def _trace_halves(self, params: Mapping[int, jax.ShapeDtypeStruct]) -> Halves:
        inputs = self.program.inputs
        received = {source: shapes(variables) for source, variables in self.program.receives.items()}
        state = {i: shapes([inputs.state[i]])[0] for i in self.program.reads_state}
        input_shapes = shapes(inputs.data), state, received
        return halves(self._float_messages, params, input_shapes, floats(received), split=False, whole=True)

    def _float_messages(self, params: Tree, inputs: tuple, values: Sequence[jax.Array]) -> list:
        """Returns the floating-point values that the part sends to each of `targets`.

        Args:
          params: The parameters.
          inputs: The inputs.
          values: The floating-point leaves of the messages that the part received.
        """
        data, state, x = inputs
        sent, _, _ = self.program.run(params, data, state, _replace_floats(x, values))
        return [floats(sent[target]) for target in self.targets]

    def forward(self, params: Tree, inputs: tuple) -> tuple[dict, list, dict, list | None]:
        """Returns the messages, outs and new state as `PartProgram.run` does, and the residuals or None."""
        sent, outs, state = self.program.run(params, *inputs)
        if self.halves is None:
            return sent, outs, state, None
        y, residuals = self.halves.forward(params, inputs, floats(inputs[2]))
        new = {target: _replace_floats(sent[target], leaves) for target, leaves in zip(self.targets, y, strict=True)}
        return sent | new, outs, state, residuals

    def backward(self, params: Tree, inputs: tuple, residuals: list | None, g: Tree) -> tuple[Tree, list]:
        """Returns gradients of the parameters and of the floats received, given those of the floats sent."""
        if self.halves is not None:
            with jax.named_scope(BACKWARD):
                return self.halves.backward(params, inputs, floats(inputs[2]), residuals, g)
        with jax.named_scope(AGAIN):
            _, pull = jax.vjp(lambda params, x: self._float_messages(params, inputs, x), params, floats(inputs[2]))
        with jax.named_scope(BACKWARD):
            return pull(g)

    def loss_backward(
        self, params: Tree, inputs: tuple, loss: int, scales: jax.Array | None, microbatch: jax.Array
    ) -> tuple[Tree, list, list]:
        """Returns gradients of the loss, as `backward` does, and the outs of the last part.

        Args:
          params: The parameters.
          inputs: The inputs.
          loss: Index of the loss among the outs.
          scales: The cotangent of each microbatch's loss; None for 1. Shape [microbatches].
          microbatch: Number of the microbatch.
        """

        def run(params, x):
            data, state, received = inputs
            _, outs, _ = self.program.run(params, data, state, _replace_floats(received, x))
            return outs[loss], outs

        with jax.named_scope(AGAIN):
            y, pull, outs = jax.vjp(run, params, floats(inputs[2]), has_aux=True)
        with jax.named_scope(BACKWARD):
            scale = jnp.ones_like(y) if scales is None else load(scales, microbatch).astype(y.dtype)
            return *pull(scale), outs


def floats(tree: Tree) -> list:
    """Returns the floating-point leaves, which have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def _replace_floats(tree: Tree, values: Sequence[jax.Array]) -> Tree:
    """Replaces the floating-point leaves of a tree."""
    leaves = iter(values)
    return jax.tree.map(lambda leaf: next(leaves) if is_float(leaf) else leaf, tree)
