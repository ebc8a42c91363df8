"""One stage of a pipeline, and the operations that it runs in a tick.

    a tick   read the input x or the gradient g, and the residuals of the forward, from the slots in this stage's row
             F: embed if first, the chunk, the head and its gradient if last     out = y, or dL/dy
             B: the chunk's backward, the embedding's if first                   out = dx
             W: the gradient of the weights, from the stash
             write the slots; send `out` to the neighbours; write what arrives from them     see `execute.py`

The head's gradient is part of the last stage's F, which sends dL/dy to itself, so that B is the same on every stage.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.jaxprs.in_place_scan import BufferEntry
from jaxpar.pipeline.run.model_functions import PipelineFunctions, PipelineModel
from jaxpar.pipeline.run.stage_buffers import load
from jaxpar.pipeline.run.stage_gradients import GradientSums, Shards, add
from jaxpar.pipeline.run.tick_program import Program, TableRow, TickKind
from jaxpar.sharding.names import BACKWARD, SCOPE

Tree = Any
Keep = Literal["inputs", "residuals"]


class MaskedChoice:
    """Computes both alternatives and selects one; even NaNs in the other have no effect.

    Args:
      active: Whether this stage runs the op of the tick; an idle stage computes on stale data.
    """

    def __init__(self, active: jax.Array):
        self.active = active

    def __call__(self, pred: jax.Array | bool, on_true: Callable[[], Tree], on_false: Callable[[], Tree]) -> Tree:
        """Returns the result of `on_true` if `pred` is true, else that of `on_false`."""
        # `where`, not a product with 0 or 1: stale slots may hold NaN or infinity, and 0 x NaN is NaN
        return jax.tree.map(lambda a, b: jnp.where(pred, a, b), on_true(), on_false())


class BranchChoice:
    """Computes one of two alternatives; an idle stage takes another branch and never calls this."""

    active = True

    def __call__(self, pred: jax.Array | bool, on_true: Callable[[], Tree], on_false: Callable[[], Tree]) -> Tree:
        """Returns the result of `on_true` if `pred` is true, else that of `on_false`."""
        return on_true() if pred is True else jax.lax.cond(pred, on_true, on_false)


class OpResult(NamedTuple):
    """The results of an op, or None: `layers` is a gradient to add, `shared` and `sums` are new totals.

    An op that works in place returns new buffers: `slots` with the residuals, `total` with the layers' gradient sums.
    """

    out: Tree = None
    residuals: Any = None
    slots: Any = None
    stash: Any = None
    layers: Tree = None
    total: Tree = None
    shared: Tree = None
    sums: Any = None


class Stage:
    """One stage: its parameters, and its three ops as functions of a row."""

    def __init__(
        self, program: Program, model: PipelineFunctions, shared, layers, inputs, *,
        keep: Keep, constrain, traced_model: PipelineModel | None = None, shards: Shards | None = None,
    ):  # fmt: skip
        self.program, self.schedule, self.keep, self.constrain = program, program.schedule, keep, constrain
        self.forward_only = not program.residual_slots
        self.shared, self.inputs, self.unit_scale = shared, inputs, jnp.ones((), jnp.float32)
        self.embeddings: Tree = None  # the input of part 0, if `spread_head` embeds it outside of the stages
        chunks = self.schedule.chunks
        # [chunks x layers, ...] -> [chunks, layers, ...], so that a chunk is one dynamic index on the leading dim
        self.chunks = jax.tree.map(lambda x: x.reshape(chunks, x.shape[0] // chunks, *x.shape[1:]), layers)
        self.model = traced_model or PipelineModel(
            model, self.schedule, shared, self.chunks, inputs, forward_only=self.forward_only
        )
        shards = None if self.forward_only else shards
        self.gradient_sums = GradientSums(
            shared, self.chunks, constrain=constrain, shards=shards, split=self.schedule.split
        )

    def parameters(self, state: dict, row: TableRow) -> tuple[Tree, Tree]:
        """Returns the shared parameters, and those of the row's chunk."""
        with jax.named_scope(f"{SCOPE}layers of a chunk"):
            return self.shared, load(self.chunks, row.chunk)

    def scale(self, row: TableRow) -> jax.Array:
        """Returns the cotangent of this microbatch's loss."""
        return self.unit_scale  # of the summed loss: the step divides by the count of the whole batch once, at its end

    def _load_batch(self, row: TableRow, shared: Tree):
        inputs = load(self.inputs, row.microbatch)
        # every stage runs the embedding: it computes `per_layer`, and XLA removes the lookup of an unused x
        x, per_layer = self.model.embed(shared, inputs)
        x = x if self.embeddings is None else self.embeddings
        return inputs, self.model.stage_inputs(inputs, per_layer, jnp.maximum(row.part, 0)), x

    def _load_inputs(self, kind: TickKind, state: dict, row: TableRow, choose: MaskedChoice | BranchChoice):
        """Returns an op's inputs: (batch and state, inputs per layer, shared parameters, chunk's parameters, x)."""
        shared, chunk = self.parameters(state, row)
        inputs, layer_args, embeddings = self._load_batch(row, shared)
        x = load(state["messages"], row.x)
        if kind.first:
            x = self.constrain("x", choose(row.part == 0, lambda: embeddings, lambda: x))
        return inputs, layer_args, shared, chunk, x

    def _layer_entries(self, chunk: Tree, row: TableRow) -> Tree:
        """Returns the chunk's parameters; of several chunks, references from which an op reads a layer at a time.

        Slicing out a chunk copies its parameters, and XLA hoists the copies of all ticks to the start of their loop.
        """
        several_chunks = self.schedule.chunks > 1
        return jax.tree.map(lambda buffer: BufferEntry(buffer, row.chunk), self.chunks) if several_chunks else chunk

    def forward(self, kind: TickKind, state: dict, row: TableRow, choose: MaskedChoice | BranchChoice) -> OpResult:
        """Runs F: the chunk's forward, and in the last part also the head and its gradient."""
        inputs, layer_args, params, chunk, x = self._load_inputs(kind, state, row, choose)
        residuals = slots = None
        if self.forward_only or self.keep == "inputs":
            y = self.model.stage(chunk, layer_args, x)
        elif kind.phased and (into_places := self.model.halves.forward_in_place):
            entries = _residual_entries(state, row, self.program.write_mask("residuals", row))
            y, slots = into_places(self._layer_entries(chunk, row), layer_args, x, entries)
        else:
            y, residuals = self.model.halves.forward(chunk, layer_args, x)
        if not kind.last:
            return OpResult(out=y, residuals=residuals, slots=slots)
        shared, sums = self.gradient_sums.initial_shared(state["shared"]), state["sums"]

        # the head's gradient is computed here, not in a B: logits are never stored, and all stages have the same B
        def run_head():
            new_sums, dshared, dy = self.model.head(params, inputs, y, self.scale(row))
            total = None if self.forward_only else self.constrain("shared", jax.tree.map(add, shared, dshared))
            return (y if self.forward_only else dy), total, jax.tree.map(jnp.add, sums, new_sums)

        last = choose.active & (row.part == self.schedule.parts - 1)
        out, shared, sums = choose(last, run_head, lambda: (y, shared, sums))
        return OpResult(out=out, residuals=residuals, slots=slots, shared=shared, sums=sums)

    def backward(self, kind: TickKind, state: dict, row: TableRow, choose: MaskedChoice | BranchChoice) -> OpResult:
        """Runs B: computes the gradient of the input, and that of the weights if the table has no W."""
        inputs, layer_args, params, chunk, x = self._load_inputs(kind, state, row, choose)
        g, stash, layers, total = load(state["messages"], row.g), None, None, None
        from_places = self.model.halves.backward_in_place if kind.phased else None
        recompute = partial(self.model.recompute_residuals, chunk, layer_args, x)
        if from_places is None:
            residuals = load(state["residuals"], row.residuals) if self.keep == "residuals" else recompute()
        with jax.named_scope(BACKWARD):
            if from_places is not None:
                residuals = _residual_entries(state, row) if self.keep == "residuals" else recompute()
                sums = self.gradient_sums.layer_entries(state["layers"], row)
                total, dx = from_places(self._layer_entries(chunk, row), layer_args, x, residuals, g, sums)
            elif self.model.halves.input_grad is not None:
                dx, stash = self.model.halves.input_grad(chunk, layer_args, x, residuals, g)
            else:
                layers, dx = self.model.halves.backward(chunk, layer_args, x, residuals, g)
        shared = self.gradient_sums.initial_shared(state["shared"])
        if kind.first and self.embeddings is None:  # otherwise `spread_head` computes the embedding's gradient

            def add_embedding_gradient():
                dshared = self.model.embed_backward(params, inputs, dx)
                return self.constrain("shared", jax.tree.map(add, shared, dshared))

            shared = choose(choose.active & (row.part == 0), add_embedding_gradient, lambda: shared)
        return OpResult(out=dx, stash=stash, layers=layers, total=total, shared=shared if kind.first else None)

    def weights(self, kind: TickKind, state: dict, row: TableRow, choose: MaskedChoice | BranchChoice) -> OpResult:
        """Runs W: computes the gradient of the weights from the stash of B."""
        assert self.model.halves.weight_grad is not None  # a table with W has a split backward
        shared, chunk = self.parameters(state, row)
        _, layer_args, _ = self._load_batch(row, shared)
        with jax.named_scope(BACKWARD):
            dchunk = self.model.halves.weight_grad(chunk, layer_args, load(state["stash"], row.stash))
        return OpResult(layers=dchunk)


def _residual_entries(state: dict, row: TableRow, mask: jax.Array | bool = True) -> list[BufferEntry]:
    return [BufferEntry(buffer, row.residuals, mask) for buffer in state["residuals"]]
