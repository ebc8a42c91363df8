"""One stage: what it does in a tick.

    a tick   read x or g and what was kept from the slots of this stage's row
             F: embed if first, the chunk, the head and its gradient if last     out = y, or dL/dy
             B: the chunk's backward, the embedding's if first                   out = dx
             W: the weights' half, from the stash
             write slots; send out to the neighbours; write what arrives

Gradients are taken inside: the head's as part of the last stage's F, which hands dL/dy to itself, so that B is the
same on every stage. Buffers are read inside a switch and written outside: XLA copies what a branch writes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.pipeline.run.program import COLUMNS, OP_NUMBER, Program, TickKind
from jaxpar.pipeline.run.sum_shards import Shards, sums_of, zeros_of
from jaxpar.pipeline.run.traced_model import Model, Pieces, one_of
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
    own: Any
    version: Any  # this and the next are for updates in the middle of a table: see `asynchronous`
    update: Any


class _Done(NamedTuple):
    """The results of an op, None where there are none. `layers` is to be added; `shared` and `sums` are sums."""

    out: Tree = None
    kept: Any = None
    stash: Any = None
    layers: Tree = None
    shared: Tree = None
    sums: Any = None


class Stage:
    """One stage: its parameters, and its three ops as functions of a row."""

    def __init__(
        self, program: Program, model: Model, shared, layers, known, *,
        keep: Keep, place, pieces: Pieces | None = None, shards: Shards | None = None,
    ):  # fmt: skip
        self.program, self.keep, self.place, self.shards = program, keep, place, shards
        self.schedule = program.schedule
        self.forward_only = not program.kept
        self.shared, self.known, self.one = shared, known, jnp.ones((), jnp.float32)
        self.embedded: Tree = None  # what flows into part 0, where that is looked up between the stages
        chunks = self.schedule.chunks
        self.chunks = jax.tree.map(lambda x: x.reshape(chunks, x.shape[0] // chunks, *x.shape[1:]), layers)
        self.pieces = pieces or Pieces(model, self.schedule, shared, self.chunks, known, forward_only=self.forward_only)

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
            "mail": self.place("slots", slots(table.mail, self.pieces.x)),
            "kept": [] if self.forward_only or self.keep == "inputs" else slots(table.kept, self.pieces.halves.kept),
            "stash": slots(table.stash, self.pieces.halves.stash) if table.stash else [],
            "layers": None if self.forward_only else zeros("layers", self.chunks),
            "shared": None if self.forward_only else zeros("shared", self.shared),
            "sums": zeros_of(self.pieces.sums) if head else {},
        }

    @jax.named_scope(TABLE)
    def tick(self, kind: TickKind, state: dict, numbers: jax.Array) -> dict:
        """Runs one tick: the op of this stage, then what it writes, sends and receives."""
        return self.step(kind, state, Row(*(numbers[i] for i in range(len(COLUMNS)))))

    def masked(self, row: Row, op: str) -> "_Masked":
        """Returns how a tick in which all stages do this op leaves no trace on one that idles."""
        return _Masked(row.op == OP_NUMBER[op])

    def step(self, kind: TickKind, state: dict, row: Row) -> dict:
        """Runs one tick."""
        ops = {"F": self.forward, "B": self.backward, "W": self.weights}
        if len(kind.ops) == 1:
            (op,) = kind.ops
            done = ops[op](kind, state, row, self.masked(row, op))
        else:
            names = sorted(kind.ops, key=lambda op: OP_NUMBER[op])
            branches = [lambda: self._all(_Done(), state, row)]
            branches += [lambda op=op: self._all(ops[op](kind, state, row, _Chosen()), state, row) for op in names]
            numbered = np.zeros(4, np.int32)
            numbered[[OP_NUMBER[op] for op in names]] = range(1, len(names) + 1)
            with jax.named_scope(CHOICE):
                done = jax.lax.switch(jnp.asarray(numbered)[row.op], branches)
        return self.write(kind, state, row, done)

    def _all(self, done: _Done, state: dict, row: Row) -> _Done:
        """Returns what an op leaves, with nothings where it leaves nothing, so that all branches are alike."""
        return _Done(
            out=zeros_of(self.pieces.x) if done.out is None else done.out,
            kept=[jnp.zeros(b.shape[1:], b.dtype) for b in state["kept"]] if done.kept is None else done.kept,
            stash=[jnp.zeros(b.shape[1:], b.dtype) for b in state["stash"]] if done.stash is None else done.stash,
            layers=zeros_of(one_of(self.chunks)) if done.layers is None else done.layers,
            shared=self._before(state) if done.shared is None else done.shared,
            sums=state["sums"] if done.sums is None else done.sums,
        )

    def parameters(self, state: dict, row: Row) -> tuple[Tree, Tree]:
        """Returns what all stages share, and the row's chunk."""
        with jax.named_scope(f"{SCOPE}layers of a chunk"):
            return self.shared, load(self.chunks, row.chunk)

    def _before(self, state: dict) -> Tree:
        """Returns what an op adds its gradients of `shared` to: their sum, or nothing where that is in shards."""
        return state["shared"] if self.shards is None or self.forward_only else zeros_of(sums_of(self.shared))

    def scale(self, row: Row) -> jax.Array:
        """Returns what the gradient of this microbatch's loss begins with."""
        return self.one

    def _inputs(self, row: Row, shared: Tree):
        known = load(self.known, row.microbatch)
        x, per_layer = self.pieces.embed(shared, known)
        x = x if self.embedded is None else self.embedded
        part = jnp.maximum(row.part, 0)
        start, count = jnp.asarray(self.pieces.starts)[part], jnp.asarray(self.pieces.layers)[part]

        def mine(leaf):  # a stage with fewer layers reads on into the next one's, and past the last into nothing
            more = (
                jnp.concatenate([leaf, leaf[: self.pieces.depth - min(self.pieces.layers)]])
                if min(self.pieces.layers) < self.pieces.depth
                else leaf
            )
            return jax.lax.dynamic_slice_in_dim(more, start, self.pieces.depth)

        return known, (known, jax.tree.map(mine, per_layer), count, part), x

    def _input(self, kind: TickKind, state: dict, row: Row, choose: "_Masked | _Chosen"):
        """Returns this op's (known, known of the stage, shared parameters, the chunk's, x)."""
        shared, chunk = self.parameters(state, row)
        known, mine, embedded = self._inputs(row, shared)
        x = load(state["mail"], row.x)
        if kind.first:
            x = self.place("x", choose(row.part == 0, lambda: embedded, lambda: x))
        return known, mine, shared, chunk, x

    def forward(self, kind: TickKind, state: dict, row: Row, choose: "_Masked | _Chosen") -> _Done:
        """F."""
        known, mine, params, chunk, x = self._input(kind, state, row, choose)
        if self.forward_only or self.keep == "inputs":
            y, kept = self.pieces.stage(chunk, mine, x), None
        else:
            y, kept = self.pieces.halves.forward(chunk, mine, x)
        if not kind.last:
            return _Done(out=y, kept=kept)
        shared, sums = self._before(state), state["sums"]

        def with_head():
            new, dshared, dy = self.pieces.head(params, known, y, self.scale(row))
            more = None if self.forward_only else self.place("shared", jax.tree.map(add, shared, dshared))
            return (y if self.forward_only else dy), more, jax.tree.map(jnp.add, sums, new)

        last = choose.active & (row.part == self.schedule.parts - 1)
        out, shared, sums = choose(last, with_head, lambda: (y, shared, sums))
        return _Done(out=out, kept=kept, shared=shared, sums=sums)

    def _kept(self, state: dict, row: Row, mine, chunk, x) -> list:
        if self.keep == "residuals":
            return load(state["kept"], row.kept)
        with jax.named_scope(AGAIN):
            return self.pieces.halves.forward(chunk, mine, x)[1]

    def backward(self, kind: TickKind, state: dict, row: Row, choose: "_Masked | _Chosen") -> _Done:
        """B."""
        known, mine, params, chunk, x = self._input(kind, state, row, choose)
        kept, g = self._kept(state, row, mine, chunk, x), load(state["mail"], row.g)
        stash = layers = None
        with jax.named_scope(BACKWARD):
            if self.pieces.halves.input_grad is not None:
                dx, stash = self.pieces.halves.input_grad(chunk, mine, x, kept, g)
            else:
                layers, dx = self.pieces.halves.backward(chunk, mine, x, kept, g)
        shared = self._before(state)
        if kind.first and self.embedded is None:

            def embedding():
                dshared = self.pieces.embed_back(params, known, dx)
                return self.place("shared", jax.tree.map(add, shared, dshared))

            shared = choose(choose.active & (row.part == 0), embedding, lambda: shared)
        return _Done(out=dx, stash=stash, layers=layers, shared=shared if kind.first else None)

    def weights(self, kind: TickKind, state: dict, row: Row, choose: "_Masked | _Chosen") -> _Done:
        """W."""
        assert self.pieces.halves.weight_grad is not None  # a table with W is split
        shared, chunk = self.parameters(state, row)
        _, mine, _ = self._inputs(row, shared)
        with jax.named_scope(BACKWARD):
            dchunk = self.pieces.halves.weight_grad(chunk, mine, load(state["stash"], row.stash))
        return _Done(layers=dchunk)

    def write(self, kind: TickKind, state: dict, row: Row, done: _Done) -> dict:
        """Returns the state with what an op left, and with what then arrives."""
        state = dict(state)
        if state["kept"] and done.kept is not None:
            state["kept"] = store(state["kept"], done.kept, row.kept, row.op == OP_NUMBER["F"])
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
            ends = {"F": self.pieces.head, "B": self.pieces.embed}
            reads = [ends[op].reads()[0] for op in kind.ops if op in ends]
            done = done._replace(shared=self.place("shared", self.shards.added(state["shared"], done.shared, reads)))
        state |= {key: value for key in ("shared", "sums") if (value := getattr(done, key)) is not None}
        return state if done.out is None else self.send(kind, state, row, done.out)

    def send(self, kind: TickKind, state: dict, row: Row, out: Tree) -> dict:
        """Returns the state with what arrives when every stage sends what it computed."""
        state, out = dict(state), self.place("x", out)
        for way in ("right", "left", "own"):
            if getattr(kind, way):
                pairs = {"right": self.program.right, "left": self.program.left}.get(way)
                arrives = jax.tree.map(partial(_send, pairs=pairs), out) if pairs else out
                slot = getattr(row, way)
                state["mail"] = self.place("slots", store(state["mail"], arrives, slot, slot >= 0))
        return state


class _Masked:
    """Computes both and takes one: nothing that is not taken leaves a trace, not even `nan`."""

    def __init__(self, active):
        self.active = active

    def __call__(self, take, yes: Callable, no: Callable) -> Tree:
        return jax.tree.map(lambda a, b: jnp.where(take, a, b), yes(), no())


class _Chosen:
    """Computes one of two, inside the branch that this stage is in."""

    active = True

    def __call__(self, take, yes: Callable, no: Callable) -> Tree:
        return yes() if take is True else jax.lax.cond(take, yes, no)


@jax.named_scope(MESSAGE)
def _send(x: jax.Array, *, pairs) -> jax.Array:
    return jax.lax.ppermute(x, "pipe", pairs)


@jax.named_scope(GRADIENT)
def add(total: jax.Array, more: jax.Array) -> jax.Array:
    return total + more.astype(total.dtype)


def load(tree: Tree, index) -> Tree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, jnp.maximum(index, 0), 0, keepdims=False), tree)


def store(tree: Tree, new: Tree, index, take) -> Tree:
    """Returns the buffers with one slot written, where there is something to write."""
    index = jnp.maximum(index, 0)

    def one(buffer, value):
        old = jax.lax.dynamic_index_in_dim(buffer, index, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(buffer, jnp.where(take, value, old), index, 0)

    return jax.tree.map(one, tree, new)
