"""One stage of a pipeline, and the operations that it runs in a tick.

    a tick   read the input x or the gradient g, and the residuals of the forward, from the slots in this stage's row
             F: embed if first, the chunk, the head and its gradient if last     out = y, or dL/dy
             B: the chunk's backward, the embedding's if first                   out = dx
             W: the gradient of the weights, from the stash
             write the slots; send `out` to the neighbours; write what arrives from them

The head's gradient is part of the last stage's F, which sends dL/dy to itself, so that B is the same on every stage.
Ops read buffers inside a switch, and the stage writes them outside, because XLA copies a buffer that a branch writes.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.jaxprs.in_place_scan import BufferEntry
from jaxpar.pipeline.run.choice import BranchChoice, MaskedChoice
from jaxpar.pipeline.run.program import COLUMNS, OP_NUMBER, Program, TickKind
from jaxpar.pipeline.run.slots import load, slot_shapes, store
from jaxpar.pipeline.run.sum_shards import Shards, sum_shapes, zeros_like_shapes
from jaxpar.pipeline.run.traced_model import PipelineFunctions, PipelineModel
from jaxpar.sharding.names import AGAIN, BACKWARD, CHOICE, GRADIENT, MESSAGE, SCOPE, TABLE

Tree = Any
Keep = Literal["inputs", "residuals"]


class TableRow(NamedTuple):
    """One stage's cell of a tick, as traced int32 scalars: see `program.COLUMNS`."""

    op: Any
    microbatch: Any
    chunk: Any
    part: Any
    x: Any
    g: Any
    residuals: Any
    stash: Any
    right: Any
    left: Any
    self_send: Any
    version: Any  # this and the next are for updates in the middle of a table: see `asynchronous.py`
    update: Any


class _OpResult(NamedTuple):
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
        self.program, self.keep, self.constrain, self.shards = program, keep, constrain, shards
        self.schedule = program.schedule
        self.forward_only = not program.residual_slots
        self.shared, self.inputs, self.unit_scale = shared, inputs, jnp.ones((), jnp.float32)
        self.embeddings: Tree = None  # the input of part 0, if `spread_head` embeds it outside of the stages
        chunks = self.schedule.chunks
        # [chunks x layers, ...] -> [chunks, layers, ...], so that a chunk is one dynamic index on the leading dim
        self.chunks = jax.tree.map(lambda x: x.reshape(chunks, x.shape[0] // chunks, *x.shape[1:]), layers)
        self.model = traced_model or PipelineModel(
            model, self.schedule, shared, self.chunks, inputs, forward_only=self.forward_only
        )

    @jax.named_scope(TABLE)
    def start(self, fill: float, *, head: bool = True) -> dict:
        """Returns the initial buffers and sums; slots hold `fill`. `head=False` omits `sums`."""

        def slots(count: int, trees: Tree) -> Tree:
            return jax.tree.map(lambda leaf: jnp.full((count, *leaf.shape), fill, leaf.dtype), trees)

        @jax.named_scope(GRADIENT)
        def zeros(name: str, tree: Tree) -> Tree:
            shapes = (
                sum_shapes(tree)
                if self.shards is None
                else self.shards.sum_shapes(tree, leading_dims=int(name == "layers"))
            )
            return self.constrain(name, zeros_like_shapes(shapes))

        table = self.program
        return {
            # x and g share one pool: they have the same shape, and the slot of an x is reused by the next g
            "messages": self.constrain("slots", slots(table.message_slots, self.model.x)),
            "residuals": []
            if self.forward_only or self.keep == "inputs"
            else slots(table.residual_slots, self.model.halves.residuals),
            "stash": slots(table.stash_slots, self.model.halves.stash) if table.stash_slots else [],
            "layers": None if self.forward_only else zeros("layers", self.chunks),
            "shared": None if self.forward_only else zeros("shared", self.shared),
            "sums": zeros_like_shapes(self.model.sums) if head else {},
        }

    @jax.named_scope(TABLE)
    def tick(self, kind: TickKind, state: dict, numbers: jax.Array) -> dict:
        """Runs one tick: this stage's op, then its writes and messages."""
        return self.step(kind, state, TableRow(*(numbers[i] for i in range(len(COLUMNS)))))

    def masked_choice(self, row: TableRow, op: str) -> MaskedChoice:
        """Returns the choice for a tick in which all stages run this op, with idle stages masked."""
        return MaskedChoice(row.op == OP_NUMBER[op])

    def step(self, kind: TickKind, state: dict, row: TableRow) -> dict:
        """Runs one tick."""
        ops = {"F": self.forward, "B": self.backward, "W": self.weights}
        if len(kind.ops) == 1:
            # no conditional: idle stages compute too and are masked, so a block may have any collective (all devices
            # reach it), and a GPU need not send a predicate to its host
            (op,) = kind.ops
            results = ops[op](kind, state, row, self.masked_choice(row, op))
        else:
            # stages take different branches: collectives in them must stay within one stage, or they would deadlock
            names = sorted(kind.ops, key=lambda op: OP_NUMBER[op])
            branches = [lambda: self._fill_missing(_OpResult(), state, row)]
            branches += [
                lambda op=op: self._fill_missing(ops[op](kind, state, row, BranchChoice()), state, row) for op in names
            ]
            # op number -> branch; absent ops map to branch 0, idle
            numbered = np.zeros(4, np.int32)
            numbered[[OP_NUMBER[op] for op in names]] = range(1, len(names) + 1)
            with jax.named_scope(CHOICE):
                results = jax.lax.switch(jnp.asarray(numbered)[row.op], branches)
        return self.write(kind, state, row, results)

    def _fill_missing(self, result: _OpResult, state: dict, row: TableRow) -> _OpResult:
        """Fills missing results with zeros or old totals, because branches must return the same structure."""
        return _OpResult(
            out=zeros_like_shapes(self.model.x) if result.out is None else result.out,
            residuals=[jnp.zeros(b.shape[1:], b.dtype) for b in state["residuals"]]
            if result.residuals is None
            else result.residuals,
            stash=[jnp.zeros(b.shape[1:], b.dtype) for b in state["stash"]] if result.stash is None else result.stash,
            layers=zeros_like_shapes(slot_shapes(self.chunks)) if result.layers is None else result.layers,
            shared=self._old_total(state) if result.shared is None else result.shared,
            sums=state["sums"] if result.sums is None else result.sums,
        )

    def parameters(self, state: dict, row: TableRow) -> tuple[Tree, Tree]:
        """Returns the shared parameters, and those of the row's chunk."""
        with jax.named_scope(f"{SCOPE}layers of a chunk"):
            return self.shared, load(self.chunks, row.chunk)

    def _old_total(self, state: dict) -> Tree:
        """Returns the total that an op adds its gradients of `shared` to: zeros if the total is sharded."""
        # an op cannot add an unsharded gradient to a shard: `write` scatters the op's gradient and adds it
        return (
            state["shared"] if self.shards is None or self.forward_only else zeros_like_shapes(sum_shapes(self.shared))
        )

    def scale(self, row: TableRow) -> jax.Array:
        """Returns the cotangent of this microbatch's loss."""
        return self.unit_scale  # of the summed loss: the step divides by the count of the whole batch once, at its end

    def _load_inputs(self, row: TableRow, shared: Tree):
        inputs = load(self.inputs, row.microbatch)
        # every stage runs the embedding: it computes `per_layer`, and XLA removes the lookup of an unused x
        x, per_layer = self.model.embed(shared, inputs)
        x = x if self.embeddings is None else self.embeddings
        part = jnp.maximum(row.part, 0)
        start, count = jnp.asarray(self.model.starts)[part], jnp.asarray(self.model.layers)[part]

        def slice_layers(leaf):
            # the static length of the slice is that of the fullest stage: a stage with fewer layers reads into the next
            # one's. `dynamic_slice` would shift a slice that exceeds the array, so the array is made longer
            extended = (
                jnp.concatenate([leaf, leaf[: self.model.depth - min(self.model.layers)]])
                if min(self.model.layers) < self.model.depth
                else leaf
            )
            return jax.lax.dynamic_slice_in_dim(extended, start, self.model.depth)

        return inputs, (inputs, jax.tree.map(slice_layers, per_layer), count, part), x

    def _load_op_inputs(self, kind: TickKind, state: dict, row: TableRow, choose: MaskedChoice | BranchChoice):
        """Returns an op's inputs: (batch and state, inputs per layer, shared parameters, chunk's parameters, x)."""
        shared, chunk = self.parameters(state, row)
        inputs, layer_args, embeddings = self._load_inputs(row, shared)
        x = load(state["messages"], row.x)
        if kind.first:
            x = self.constrain("x", choose(row.part == 0, lambda: embeddings, lambda: x))
        return inputs, layer_args, shared, chunk, x

    def forward(self, kind: TickKind, state: dict, row: TableRow, choose: MaskedChoice | BranchChoice) -> _OpResult:
        """Runs F: the chunk's forward, and in the last part also the head and its gradient."""
        inputs, layer_args, params, chunk, x = self._load_op_inputs(kind, state, row, choose)
        residuals = slots = None
        if self.forward_only or self.keep == "inputs":
            y = self.model.stage(chunk, layer_args, x)
        elif self._runs_in_place(kind):
            into_places = self.model.halves.forward_in_place
            assert into_places is not None  # present if the backward is not split
            layers = self._read_in_place(chunk, row)
            y, slots = into_places(layers, layer_args, x, self._entries(state, row, self._mask("residuals", row, "F")))
        else:
            y, residuals = self.model.halves.forward(chunk, layer_args, x)
        if not kind.last:
            return _OpResult(out=y, residuals=residuals, slots=slots)
        shared, sums = self._old_total(state), state["sums"]

        # the head's gradient is computed here, not in a B: logits are never stored, and all stages have the same B
        def run_head():
            new_sums, dshared, dy = self.model.head(params, inputs, y, self.scale(row))
            total = None if self.forward_only else self.constrain("shared", jax.tree.map(add, shared, dshared))
            return (y if self.forward_only else dy), total, jax.tree.map(jnp.add, sums, new_sums)

        last = choose.active & (row.part == self.schedule.parts - 1)
        out, shared, sums = choose(last, run_head, lambda: (y, shared, sums))
        return _OpResult(out=out, residuals=residuals, slots=slots, shared=shared, sums=sums)

    def _runs_in_place(self, kind: TickKind) -> bool:
        """Whether ops read and write buffers in place; false inside a switch, which would copy them."""
        return len(kind.ops) == 1 and not self.schedule.split

    def _read_in_place(self, chunk: Tree, row: TableRow) -> Tree:
        """Returns the chunk's parameters; of several chunks, references from which an op reads a layer at a time.

        Slicing out a chunk copies its parameters, and XLA hoists the copies of all ticks to the start of their loop.
        """
        several_chunks = self.schedule.chunks > 1
        return jax.tree.map(lambda buffer: BufferEntry(buffer, row.chunk), self.chunks) if several_chunks else chunk

    def _mask(self, pool: str, row: TableRow, op: str) -> jax.Array | bool:
        """Whether the stage writes into its slot of a pool: always if the slot of an idle stage is a free one."""
        return row.op == OP_NUMBER[op] if pool in self.program.masked_pools else True

    def _entries(self, state: dict, row: TableRow, mask: jax.Array | bool = True) -> list[BufferEntry]:
        return [BufferEntry(buffer, row.residuals, mask) for buffer in state["residuals"]]

    def _gradient_entries(self, state: dict, row: TableRow) -> Tree:
        """Returns references to the buffers in which the layers' gradients are accumulated."""

        def sum_entry(path: tuple, buffer: jax.Array) -> BufferEntry:
            def join(old: jax.Array, new: jax.Array) -> jax.Array:  # gradients of a layer, or of all layers of a chunk
                missing_dims = buffer.ndim - 1 - new.ndim
                return add(
                    old,
                    new
                    if self.shards is None
                    else self.shards.scatter_one(path[0].key, new, missing_dims=missing_dims),
                )

            return BufferEntry(buffer, row.chunk, row.op == OP_NUMBER["B"], join, row_major=False)

        return jax.tree_util.tree_map_with_path(sum_entry, state["layers"])

    def _load_residuals(self, state: dict, row: TableRow, layer_inputs, chunk, x) -> list:
        if self.keep == "residuals":
            return load(state["residuals"], row.residuals)
        return self._recompute(layer_inputs, chunk, x)

    def _recompute(self, layer_inputs, chunk, x) -> list:
        with jax.named_scope(AGAIN):  # the inspector counts it as recomputation
            return self.model.halves.forward(chunk, layer_inputs, x)[1]

    def backward(self, kind: TickKind, state: dict, row: TableRow, choose: MaskedChoice | BranchChoice) -> _OpResult:
        """Runs B: computes the gradient of the input, and that of the weights if the table has no W."""
        inputs, layer_args, params, chunk, x = self._load_op_inputs(kind, state, row, choose)
        g, stash, layers, total = load(state["messages"], row.g), None, None, None
        from_places = self.model.halves.backward_in_place if self._runs_in_place(kind) else None
        residuals = None if from_places else self._load_residuals(state, row, layer_args, chunk, x)
        with jax.named_scope(BACKWARD):
            if from_places:
                entries = self._recompute(layer_args, chunk, x) if self.keep == "inputs" else self._entries(state, row)
                total, dx = from_places(
                    self._read_in_place(chunk, row), layer_args, x, entries, g, self._gradient_entries(state, row)
                )
            elif self.model.halves.input_grad is not None:
                dx, stash = self.model.halves.input_grad(chunk, layer_args, x, residuals, g)
            else:
                layers, dx = self.model.halves.backward(chunk, layer_args, x, residuals, g)
        shared = self._old_total(state)
        if kind.first and self.embeddings is None:  # otherwise `spread_head` computes the embedding's gradient

            def add_embedding_gradient():
                dshared = self.model.embed_backward(params, inputs, dx)
                return self.constrain("shared", jax.tree.map(add, shared, dshared))

            shared = choose(choose.active & (row.part == 0), add_embedding_gradient, lambda: shared)
        return _OpResult(out=dx, stash=stash, layers=layers, total=total, shared=shared if kind.first else None)

    def weights(self, kind: TickKind, state: dict, row: TableRow, choose: MaskedChoice | BranchChoice) -> _OpResult:
        """Runs W: computes the gradient of the weights from the stash of B."""
        assert self.model.halves.weight_grad is not None  # a table with W has a split backward
        shared, chunk = self.parameters(state, row)
        _, layer_args, _ = self._load_inputs(row, shared)
        with jax.named_scope(BACKWARD):
            dchunk = self.model.halves.weight_grad(chunk, layer_args, load(state["stash"], row.stash))
        return _OpResult(layers=dchunk)

    def write(self, kind: TickKind, state: dict, row: TableRow, result: _OpResult) -> dict:
        """Stores the results of an op, sends `out`, and stores the messages that arrive; returns the new state.

        In a masked tick, an idle stage computes on stale slots. What it writes goes to a free slot, or is masked.
        """
        state = dict(state)
        if (pool := state["residuals"]) and result.residuals is not None:
            state["residuals"] = store(pool, result.residuals, row.residuals, self._mask("residuals", row, "F"))
        if result.slots is not None:
            state["residuals"] = result.slots
        if result.total is not None:
            state["layers"] = self.constrain("layers", result.total)
        if state["stash"] and result.stash is not None:
            state["stash"] = store(state["stash"], result.stash, row.stash, self._mask("stash", row, "B"))
        if result.layers is not None:
            sums, active = load(state["layers"], row.chunk), row.op == OP_NUMBER["W" if self.schedule.split else "B"]
            gradients = result.layers if self.shards is None else self.shards.scatter(result.layers)
            write = partial(jax.lax.dynamic_update_index_in_dim, index=row.chunk, axis=0)
            with jax.named_scope(GRADIENT):
                total = jax.tree.map(lambda a, b: jnp.where(active, add(a, b), a), sums, gradients)
                state["layers"] = self.constrain("layers", jax.tree.map(write, state["layers"], total))
        if self.shards is not None and result.shared is not None and not self.forward_only:
            # only the parameters that the head or embedding reads have a gradient: others need no reduce-scatter
            ends = {"F": self.model.head, "B": self.model.embed}
            reads = [ends[op].reads()[0] for op in kind.ops if op in ends]
            result = result._replace(
                shared=self.constrain("shared", self.shards.accumulate(state["shared"], result.shared, reads))
            )
        state |= {key: value for key in ("shared", "sums") if (value := getattr(result, key)) is not None}
        if result.out is None:
            return state
        out = result.out
        if result.shared is not None and not self.forward_only and self.shards is None:
            # the barrier adds up gradients of embedding and head before the send: otherwise XLA keeps those of many
            # ticks, with their inputs, the gradient of all logits; ZeRO-2 scatters them in the same tick
            out, state["shared"] = jax.lax.optimization_barrier((out, state["shared"]))
        # the barrier completes the writes of a forward, and with several chunks the reads of a backward, before the
        # send: otherwise XLA defers parts of a tick, and copies all slots, which the next tick overwrites
        names = ["residuals"] * (result.slots is not None)
        if result.total is not None and self.schedule.chunks > 1:
            names = ["residuals", "layers"]
        if names:
            out, results = jax.lax.optimization_barrier((out, {name: state[name] for name in names}))
            state |= results
        return self.send(kind, state, row, out)

    def send(self, kind: TickKind, state: dict, row: TableRow, out: Tree) -> dict:
        """Sends the result of every stage, and stores the messages that arrive; returns the new state."""
        state, out = dict(state), self.constrain("x", out)
        # a permute is a collective: all stages take part in every tick of this kind, and drop the message if their slot
        # is -1. Sends stand outside of the switch, so that all stages reach them
        for direction in ("right", "left", "self_send"):
            if getattr(kind, direction):
                pairs = {"right": self.program.right, "left": self.program.left}.get(direction)
                received = jax.tree.map(partial(_send, pairs=pairs), out) if pairs else out
                slot = getattr(row, direction)
                state["messages"] = self.constrain("slots", store(state["messages"], received, slot, slot >= 0))
        return state


@jax.named_scope(MESSAGE)
def _send(x: jax.Array, *, pairs) -> jax.Array:
    return jax.lax.ppermute(x, "pipe", pairs)


@jax.named_scope(GRADIENT)
def add(total: jax.Array, gradient: jax.Array) -> jax.Array:
    return total + gradient.astype(total.dtype)
