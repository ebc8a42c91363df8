"""One stage of a pipeline, and the work it does in one tick.

    a tick   read the input x or the gradient g, and what the forward kept, from the slots that this stage's row names
             F: embed if first, the chunk, the head and its gradient if last     out = y, or dL/dy
             B: the chunk's backward, the embedding's if first                   out = dx
             W: the gradient of the weights, from the stash
             write the slots; send `out` to the neighbours; write what arrives from them

Gradients are taken inside: the head's as part of the last stage's F, which sends dL/dy to itself, so that B is the
same on every stage. Buffers are read inside a switch and written outside: XLA copies what a branch writes.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.pipeline.jaxprs.in_place import Place
from jaxpar.pipeline.run.choice import Chosen, Masked
from jaxpar.pipeline.run.program import COLUMNS, OP_NUMBER, Program, TickKind
from jaxpar.pipeline.run.slots import load, store
from jaxpar.pipeline.run.sum_shards import Shards, sums_of, zeros_of
from jaxpar.pipeline.run.traced_model import Model, TracedModel, one_of
from jaxpar.sharding.names import AGAIN, BACKWARD, CHOICE, GRADIENT, MESSAGE, SCOPE, TABLE

Tree = Any
Keep = Literal["inputs", "residuals"]


class Row(NamedTuple):
    """One stage's cell of a tick, as traced int32 scalars: see `program.COLUMNS`."""

    op: Any
    microbatch: Any
    chunk: Any
    part: Any
    x: Any
    g: Any
    kept: Any
    stash: Any
    right: Any
    left: Any
    self_send: Any
    version: Any  # this and the next are for updates in the middle of a table: see `unflushed`
    update: Any


class _Done(NamedTuple):
    """The results of an op, None where it has none: `layers` is one gradient, `shared` and `sums` are new totals.

    An op that reads and writes buffers where they are returns the new buffers: `slots` of what is kept, `total` of the
    sums of the layers' gradients.
    """

    out: Tree = None
    kept: Any = None
    slots: Any = None
    stash: Any = None
    layers: Tree = None
    total: Tree = None
    shared: Tree = None
    sums: Any = None


class Stage:
    """One stage: its parameters, and its three ops as functions of a row."""

    def __init__(
        self, program: Program, model: Model, shared, layers, known, *,
        keep: Keep, place, traced: TracedModel | None = None, shards: Shards | None = None,
    ):  # fmt: skip
        self.program, self.keep, self.place, self.shards = program, keep, place, shards
        self.schedule = program.schedule
        self.forward_only = not program.kept
        self.shared, self.known, self.one = shared, known, jnp.ones((), jnp.float32)
        self.embedded: Tree = None  # the input of part 0, where `spread_head` looks it up between the stages
        chunks = self.schedule.chunks
        # [chunks x layers, ...] -> [chunks, layers, ...], so that a chunk is one dynamic index on the leading dim
        self.chunks = jax.tree.map(lambda x: x.reshape(chunks, x.shape[0] // chunks, *x.shape[1:]), layers)
        self.traced = traced or TracedModel(
            model, self.schedule, shared, self.chunks, known, forward_only=self.forward_only
        )

    @jax.named_scope(TABLE)
    def start(self, fill: float, *, head: bool = True) -> dict:
        """Returns the buffers and sums before the first tick; slots hold `fill`. Without a head there are no sums."""

        def slots(count: int, trees: Tree) -> Tree:
            return jax.tree.map(lambda leaf: jnp.full((count, *leaf.shape), fill, leaf.dtype), trees)

        @jax.named_scope(GRADIENT)
        def zeros(what: str, tree: Tree) -> Tree:
            shapes = sums_of(tree) if self.shards is None else self.shards.sums_of(tree, ahead=int(what == "layers"))
            return self.place(what, zeros_of(shapes))

        table = self.program
        return {
            # x and g share one pool: they have the same shape, and a slot that an x leaves takes the next g
            "messages": self.place("slots", slots(table.messages, self.traced.x)),
            "kept": [] if self.forward_only or self.keep == "inputs" else slots(table.kept, self.traced.halves.kept),
            "stash": slots(table.stash, self.traced.halves.stash) if table.stash else [],
            "layers": None if self.forward_only else zeros("layers", self.chunks),
            "shared": None if self.forward_only else zeros("shared", self.shared),
            "sums": zeros_of(self.traced.sums) if head else {},
        }

    @jax.named_scope(TABLE)
    def tick(self, kind: TickKind, state: dict, numbers: jax.Array) -> dict:
        """Runs one tick: the op of this stage, then its writes and its messages."""
        return self.step(kind, state, Row(*(numbers[i] for i in range(len(COLUMNS)))))

    def masked(self, row: Row, op: str) -> Masked:
        """Returns the choice for a tick in which all stages run this op: it has no effect on one that idles."""
        return Masked(row.op == OP_NUMBER[op])

    def step(self, kind: TickKind, state: dict, row: Row) -> dict:
        """Runs one tick."""
        ops = {"F": self.forward, "B": self.backward, "W": self.weights}
        if len(kind.ops) == 1:
            # no conditional: idle stages compute too and are masked, so a block may hold any collective (all devices
            # reach it), and a GPU need not send a predicate to its host
            (op,) = kind.ops
            done = ops[op](kind, state, row, self.masked(row, op))
        else:
            # stages take different branches: collectives in them must stay within one stage, or they would deadlock
            names = sorted(kind.ops, key=lambda op: OP_NUMBER[op])
            branches = [lambda: self._all(_Done(), state, row)]
            branches += [lambda op=op: self._all(ops[op](kind, state, row, Chosen()), state, row) for op in names]
            # op number -> branch; ops that the table does not have are mapped to branch 0, idle
            numbered = np.zeros(4, np.int32)
            numbered[[OP_NUMBER[op] for op in names]] = range(1, len(names) + 1)
            with jax.named_scope(CHOICE):
                done = jax.lax.switch(jnp.asarray(numbered)[row.op], branches)
        return self.write(kind, state, row, done)

    def _all(self, done: _Done, state: dict, row: Row) -> _Done:
        """Returns the results of an op, filled up with zeros or old totals: branches must return the same structure."""
        return _Done(
            out=zeros_of(self.traced.x) if done.out is None else done.out,
            kept=[jnp.zeros(b.shape[1:], b.dtype) for b in state["kept"]] if done.kept is None else done.kept,
            stash=[jnp.zeros(b.shape[1:], b.dtype) for b in state["stash"]] if done.stash is None else done.stash,
            layers=zeros_of(one_of(self.chunks)) if done.layers is None else done.layers,
            shared=self._before(state) if done.shared is None else done.shared,
            sums=state["sums"] if done.sums is None else done.sums,
        )

    def parameters(self, state: dict, row: Row) -> tuple[Tree, Tree]:
        """Returns the parameters that all stages share, and those of the row's chunk."""
        with jax.named_scope(f"{SCOPE}layers of a chunk"):
            return self.shared, load(self.chunks, row.chunk)

    def _before(self, state: dict) -> Tree:
        """Returns the total to which an op adds its gradients of `shared`: zeros where the total is kept in shards."""
        # a shard cannot be added to a whole gradient inside an op: `write` scatters the op's own gradient and adds it
        return state["shared"] if self.shards is None or self.forward_only else zeros_of(sums_of(self.shared))

    def scale(self, row: Row) -> jax.Array:
        """Returns the cotangent of this microbatch's loss."""
        return self.one  # of a sum: the step divides by the count of the whole batch once, at its end

    def _inputs(self, row: Row, shared: Tree):
        known = load(self.known, row.microbatch)
        # every stage runs the embedding: `per_layer` comes from it, and XLA removes the lookup of an x nobody uses
        x, per_layer = self.traced.embed(shared, known)
        x = x if self.embedded is None else self.embedded
        part = jnp.maximum(row.part, 0)
        start, count = jnp.asarray(self.traced.starts)[part], jnp.asarray(self.traced.layers)[part]

        def mine(leaf):
            # a slice has one static length, that of the fullest stage: a stage with fewer layers reads on into those
            # of the next. `dynamic_slice` would shift a slice that leaves the array, so the array is made longer
            more = (
                jnp.concatenate([leaf, leaf[: self.traced.depth - min(self.traced.layers)]])
                if min(self.traced.layers) < self.traced.depth
                else leaf
            )
            return jax.lax.dynamic_slice_in_dim(more, start, self.traced.depth)

        return known, (known, jax.tree.map(mine, per_layer), count, part), x

    def _input(self, kind: TickKind, state: dict, row: Row, choose: Masked | Chosen):
        """Returns an op's (batch, what the layers read of it, shared parameters, parameters of the chunk, x)."""
        shared, chunk = self.parameters(state, row)
        known, mine, embedded = self._inputs(row, shared)
        x = load(state["messages"], row.x)
        if kind.first:
            x = self.place("x", choose(row.part == 0, lambda: embedded, lambda: x))
        return known, mine, shared, chunk, x

    def forward(self, kind: TickKind, state: dict, row: Row, choose: Masked | Chosen) -> _Done:
        """Runs F: the chunk's forward; on the last part the head and its gradient too."""
        known, mine, params, chunk, x = self._input(kind, state, row, choose)
        kept = slots = None
        if self.forward_only or self.keep == "inputs":
            y = self.traced.stage(chunk, mine, x)
        elif self._in_place(kind):
            into = self.traced.halves.forward_into
            assert into is not None  # a table that is not split has it
            layers = self._read_in_place(chunk, row)
            y, slots = into(layers, mine, x, self._places(state, row, row.op == OP_NUMBER["F"]))
        else:
            y, kept = self.traced.halves.forward(chunk, mine, x)
        if not kind.last:
            return _Done(out=y, kept=kept, slots=slots)
        shared, sums = self._before(state), state["sums"]

        # the head's gradient is taken here, not in a B: no logits are ever stored, and all stages have the same B
        def with_head():
            new, dshared, dy = self.traced.head(params, known, y, self.scale(row))
            more = None if self.forward_only else self.place("shared", jax.tree.map(add, shared, dshared))
            return (y if self.forward_only else dy), more, jax.tree.map(jnp.add, sums, new)

        last = choose.active & (row.part == self.schedule.parts - 1)
        out, shared, sums = choose(last, with_head, lambda: (y, shared, sums))
        return _Done(out=out, kept=kept, slots=slots, shared=shared, sums=sums)

    def _in_place(self, kind: TickKind) -> bool:
        """Returns whether ops read and write buffers where they are: not through a switch, which would copy them."""
        return len(kind.ops) == 1 and not self.schedule.split

    def _read_in_place(self, chunk: Tree, row: Row) -> Tree:
        """Returns where an op reads the parameters of its chunk: of several, one layer at a time out of all.

        A chunk is a copy of its parameters, and of all ticks of a loop XLA makes these copies at once, at its start.
        """
        several = self.schedule.chunks > 1
        return jax.tree.map(lambda buffer: Place(buffer, row.chunk), self.chunks) if several else chunk

    def _places(self, state: dict, row: Row, take: Any = True) -> list[Place]:
        return [Place(buffer, row.kept, take) for buffer in state["kept"]]

    def _sums(self, state: dict, row: Row) -> Tree:
        """Returns where gradients of the layers are added up."""

        def one(path: tuple, buffer: jax.Array) -> Place:
            def join(old: jax.Array, new: jax.Array) -> jax.Array:  # of a layer, or of all layers of a chunk
                gone = buffer.ndim - 1 - new.ndim
                return add(old, new if self.shards is None else self.shards.one(path[0].key, new, gone=gone))

            return Place(buffer, row.chunk, row.op == OP_NUMBER["B"], join)

        return jax.tree_util.tree_map_with_path(one, state["layers"])

    def _kept(self, state: dict, row: Row, mine, chunk, x) -> list:
        if self.keep == "residuals":
            return load(state["kept"], row.kept)
        return self._again(mine, chunk, x)

    def _again(self, mine, chunk, x) -> list:
        with jax.named_scope(AGAIN):  # the inspector counts it as recomputation
            return self.traced.halves.forward(chunk, mine, x)[1]

    def backward(self, kind: TickKind, state: dict, row: Row, choose: Masked | Chosen) -> _Done:
        """Runs B: the gradient of the input, and where the table has no W that of the weights."""
        known, mine, params, chunk, x = self._input(kind, state, row, choose)
        g, stash, layers, total = load(state["messages"], row.g), None, None, None
        into = self.traced.halves.backward_from if self._in_place(kind) else None
        kept = None if into else self._kept(state, row, mine, chunk, x)
        with jax.named_scope(BACKWARD):
            if into:
                places = self._again(mine, chunk, x) if self.keep == "inputs" else self._places(state, row)
                total, dx = into(self._read_in_place(chunk, row), mine, x, places, g, self._sums(state, row))
            elif self.traced.halves.input_grad is not None:
                dx, stash = self.traced.halves.input_grad(chunk, mine, x, kept, g)
            else:
                layers, dx = self.traced.halves.backward(chunk, mine, x, kept, g)
        shared = self._before(state)
        if kind.first and self.embedded is None:  # else `spread_head` takes the embedding's gradient between the stages

            def embedding():
                dshared = self.traced.embed_back(params, known, dx)
                return self.place("shared", jax.tree.map(add, shared, dshared))

            shared = choose(choose.active & (row.part == 0), embedding, lambda: shared)
        return _Done(out=dx, stash=stash, layers=layers, total=total, shared=shared if kind.first else None)

    def weights(self, kind: TickKind, state: dict, row: Row, choose: Masked | Chosen) -> _Done:
        """Runs W: the gradient of the weights, from what B has stashed."""
        assert self.traced.halves.weight_grad is not None  # a table with W is split
        shared, chunk = self.parameters(state, row)
        _, mine, _ = self._inputs(row, shared)
        with jax.named_scope(BACKWARD):
            dchunk = self.traced.halves.weight_grad(chunk, mine, load(state["stash"], row.stash))
        return _Done(layers=dchunk)

    def write(self, kind: TickKind, state: dict, row: Row, done: _Done) -> dict:
        """Returns the state with the results of an op stored, and with the messages that then arrive.

        Every write is conditional on the op of this stage's row: in a masked tick an idle stage has computed on stale
        slots, and its results must not be stored.
        """
        state = dict(state)
        if state["kept"] and done.kept is not None:
            state["kept"] = store(state["kept"], done.kept, row.kept, row.op == OP_NUMBER["F"])
        if done.slots is not None:
            state["kept"] = done.slots
        if done.total is not None:
            state["layers"] = self.place("layers", done.total)
        if state["stash"] and done.stash is not None:
            state["stash"] = store(state["stash"], done.stash, row.stash, row.op == OP_NUMBER["B"])
        if done.layers is not None:
            before, summed = load(state["layers"], row.chunk), row.op == OP_NUMBER["W" if self.schedule.split else "B"]
            more = done.layers if self.shards is None else self.shards.of(done.layers)
            write = partial(jax.lax.dynamic_update_index_in_dim, index=row.chunk, axis=0)
            with jax.named_scope(GRADIENT):
                total = jax.tree.map(lambda a, b: jnp.where(summed, add(a, b), a), before, more)
                state["layers"] = self.place("layers", jax.tree.map(write, state["layers"], total))
        if self.shards is not None and done.shared is not None and not self.forward_only:
            # only parameters that the op's end of the model reads have a gradient: others need no reduce-scatter
            ends = {"F": self.traced.head, "B": self.traced.embed}
            reads = [ends[op].reads()[0] for op in kind.ops if op in ends]
            done = done._replace(shared=self.place("shared", self.shards.added(state["shared"], done.shared, reads)))
        state |= {key: value for key in ("shared", "sums") if (value := getattr(done, key)) is not None}
        if done.out is None:
            return state
        out = done.out
        if done.shared is not None and not self.forward_only and self.shards is None:
            # gradients of the ends are added up before a result is sent: left to itself XLA keeps those of many ticks,
            # and what they are made of, the gradient of all logits; stage 2 of ZeRO scatters them in the same tick
            out, state["shared"] = jax.lax.optimization_barrier((out, state["shared"]))
        # what a forward keeps is written, and of several chunks what a backward reads of it read, before a result is
        # sent: else XLA puts parts of a tick off, and copies all slots, as the next tick writes what they still read
        names = ["kept"] * (done.slots is not None)
        if done.total is not None and self.schedule.chunks > 1:
            names = ["kept", "layers"]
        if names:
            out, after = jax.lax.optimization_barrier((out, {name: state[name] for name in names}))
            state |= after
        return self.send(kind, state, row, out)

    def send(self, kind: TickKind, state: dict, row: Row, out: Tree) -> dict:
        """Returns the state with the messages that arrive when every stage sends its result."""
        state, out = dict(state), self.place("x", out)
        # a permute is a collective: all stages take part in every tick of this kind, and those whose slot is -1 drop
        # what arrives. Sends stand outside of the switch, where all stages meet
        for way in ("right", "left", "self_send"):
            if getattr(kind, way):
                pairs = {"right": self.program.right, "left": self.program.left}.get(way)
                arrives = jax.tree.map(partial(_send, pairs=pairs), out) if pairs else out
                slot = getattr(row, way)
                state["messages"] = self.place("slots", store(state["messages"], arrives, slot, slot >= 0))
        return state


@jax.named_scope(MESSAGE)
def _send(x: jax.Array, *, pairs) -> jax.Array:
    return jax.lax.ppermute(x, "pipe", pairs)


@jax.named_scope(GRADIENT)
def add(total: jax.Array, more: jax.Array) -> jax.Array:
    return total + more.astype(total.dtype)
