"""The one executor: it runs any table inside one compiled program.

    a tick   read x or g and what was kept from the slots of this stage's row
             F: embed if first, the chunk, the head and its gradient if last     out = y, or dL/dy
             B: the chunk's backward, the embedding's if first                   out = dx
             W: the weights' half, from the stash
             write slots; send out to the neighbours; write what arrives

A tick in which all stages do the same kind of thing runs it on all of them, masked where a stage idles: no
conditional, so that nothing in a block can deadlock and a GPU needs no answer from its host. Tables that mix kinds in a
tick choose with `lax.switch`, once per tick and stage.

Gradients are taken inside: the head's as part of the last stage's F, which hands dL/dy to itself, so that B is the
same on every stage. Buffers are read inside a switch and written outside: XLA copies what a branch writes. Everything
here runs inside `shard_map`, on one stage's local arrays.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import refuse
from jaxpar.pipeline.dataflow import Traced
from jaxpar.pipeline.halves import Halves, halves
from jaxpar.pipeline.program import COLUMNS, OP_NUMBER, Kind, Loop, Program
from jaxpar.sharding.names import AGAIN, BACKWARD, CHOICE, GRADIENT, MESSAGE, SCOPE, TABLE

Tree = Any
Keep = Literal["inputs", "residuals"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model in the three pieces that a pipeline runs apart. All are pure functions.

    Attributes:
      name: For messages.
      layers: Layers of each stage where they differ; its arrays then hold as many as the fullest stage has.
      embed: (shared, known) to (x, per_layer): what flows into the first layer, and what each layer has of its own.
      stage: (layers, known, per_layer, x) to y: consecutive layers. `layers` and `per_layer` have a leading dim of
        layers.
      head: (shared, known, y) to name -> (sum, count); the entry `loss` is minimized.
    """

    name: str
    embed: Callable
    stage: Callable
    head: Callable
    layers: tuple[int, ...] = ()


class Gradients(NamedTuple):
    """What one stage knows after the last tick: to be summed over the stages that share it.

    Attributes:
      sums: Name to (sum, count) over the microbatches; zero but on the last stage.
      shared: Gradients of the sum of the loss for what all stages share; None after an evaluation.
      layers: Likewise for this stage's layers.
    """

    sums: Mapping[str, tuple[jax.Array, jax.Array]]
    shared: Tree
    layers: Tree


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
    """What an op leaves, None where nothing of the kind. `layers` is to be added; `shared` and `sums` are sums."""

    out: Tree = None
    kept: Any = None
    stash: Any = None
    layers: Tree = None
    shared: Tree = None
    sums: Any = None


def execute(
    program: Program,
    model: Model,
    rows: jax.Array,
    shared: Tree,
    layers: Tree,
    known: Tree,
    *,
    keep: Keep = "inputs",
    place: Callable[[str, Tree], Tree] = lambda what, tree: tree,
    fill: float = 0.0,
) -> Gradients:
    """Runs a table on this stage.

    Args:
      program: The table, as rows and loops; of forwards alone for an evaluation.
      model: The three pieces.
      rows: This stage's rows. Shape [ticks, columns], int32.
      shared: Parameters outside of the stack, whole.
      layers: Parameters of this stage's layers, leading dim chunks x layers of a chunk, its chunks in their order.
      known: What is no parameter, leading dim microbatches: the batch, dropout keys.
      keep: What a forward leaves for its backward: its input, from which it is computed again, or what the
        backward reads.
      place: Given "x", "layers" or "shared" and a tree, returns it with its sharding over the axes that are not manual.
      fill: What the buffers hold before they are written; of no consequence.

    Raises:
      JaxparError: If the model cannot be cut: blocks that change the shape, a stack that reads what is outside.
    """
    run = Stage(program, model, shared, layers, known, keep=keep, place=place)
    state = run_table(program, run.tick, run.start(fill), rows)
    merged = None if not program.kept else jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state["layers"])
    return Gradients(sums=state["sums"], shared=state["shared"], layers=merged)


def run_table(program: Program, tick: Callable, state: dict, rows: jax.Array) -> dict:
    """Returns the state after all ticks."""
    for at, loop in _offsets(program.loops):
        state = _loop(loop, tick, state, rows[at : at + loop.ticks])
    return state


def _offsets(body) -> list[tuple[int, Any]]:
    at, found = 0, []
    for each in body:
        found.append((at, each))
        at += each.ticks if isinstance(each, Loop) else 1
    return found


def _loop(loop: Loop, tick: Callable, state: dict, rows: jax.Array) -> dict:
    """Runs a piece of the table: a body that is compiled once, as often as it is repeated."""

    def body(state, rows):
        for at, each in _offsets(loop.body):
            if isinstance(each, Kind):
                state = tick(each, state, rows[at])
            else:
                state = _loop(each, tick, state, rows[at : at + each.ticks])
        return state, None

    if loop.repeats == 1:
        return body(state, rows)[0]
    return jax.lax.scan(body, state, rows.reshape(loop.repeats, -1, *rows.shape[1:]))[0]


class Stage:
    """One stage: its parameters, and its three ops as functions of a row."""

    def __init__(
        self, program: Program, model: Model, shared, layers, known, *, keep: Keep, place, traced: "Stage | None" = None
    ):
        self.program, self.keep, self.place = program, keep, place
        self.schedule = program.schedule
        self.forward_only = not program.kept
        self.shared, self.known, self.one = shared, known, jnp.ones((), jnp.float32)
        count = {leaf.shape[0] for leaf in jax.tree.leaves(layers)}
        self.depth = max(count) // self.schedule.chunks
        self.chunks = jax.tree.map(lambda x: x.reshape(self.schedule.chunks, self.depth, *x.shape[1:]), layers)
        if traced is None:
            self._trace(model)
        else:  # the same stage, in another place of the program
            vars(self).update({name: vars(traced)[name] for name in TRACED if name in vars(traced)})

    def _trace(self, model: Model) -> None:
        one, chunk = _first(self.known), _first(self.chunks)
        self.embed = Traced(lambda shared, known: model.embed(shared, known), self.shared, one)
        self.x, per_layer = self.embed.shapes
        mine = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((self.depth, *leaf.shape[1:]), leaf.dtype), per_layer)
        self.layers = np.array(model.layers or [self.depth] * self.schedule.parts, np.int32)
        self.starts = np.cumsum([0, *self.layers[:-1]], dtype=np.int32)
        fewest = int(min(self.layers))

        def stage(chunk, known, x):
            known, mine, count = known
            some = lambda first, last: jax.tree.map(lambda leaf: leaf[first:last], (chunk, mine))  # noqa: E731
            layers, each = (chunk, mine) if fewest == self.depth else some(0, fewest)
            x = model.stage(layers, known, each, x)
            for extra in range(fewest, self.depth):  # run everywhere, and left out where a stage has fewer
                layers, each = some(extra, extra + 1)
                y = model.stage(layers, known, each, x)
                x = jax.tree.map(lambda a, b, n=extra: jnp.where(count > n, a, b), y, x)
            return x

        count = jax.ShapeDtypeStruct((), jnp.int32)
        self.stage = Traced(stage, chunk, (one, mine, count), self.x)
        _check_shapes(model.name, self.x, self.stage.shapes)
        if not self.forward_only:
            split = self.schedule.split
            self.halves: Halves = halves(self.stage, chunk, (one, mine, count), self.x, split=split)

        def total(shared, known, y):
            sums = model.head(shared, known, y)
            return sums["loss"][0], sums

        def head(shared, known, y, scale):
            _, pull, sums = jax.vjp(lambda shared, y: total(shared, known, y), shared, y, has_aux=True)
            dshared, dy = pull(scale)
            return sums, dshared, dy

        def embed_back(shared, known, g):
            _, pull = jax.vjp(lambda shared: model.embed(shared, known)[0], shared)
            return pull(g)[0]

        if self.forward_only:
            self.head = Traced(lambda *args: (total(*args[:3])[1], None, None), self.shared, one, self.x, self.one)
        else:
            self.head = Traced(head, self.shared, one, self.x, self.one)
            self.embed_back = Traced(embed_back, self.shared, one, self.x)
        self.sums = self.head.shapes[0]

    @jax.named_scope(TABLE)
    def start(self, fill: float, *, head: bool = True) -> dict:
        """Returns the buffers and sums before the first tick; slots hold `fill`. Without a head there are no sums."""

        def slots(count: int, trees: Tree) -> Tree:
            return jax.tree.map(lambda leaf: jnp.full((count, *leaf.shape), fill, leaf.dtype), trees)

        @jax.named_scope(GRADIENT)
        def zeros(what: str, tree: Tree) -> Tree:  # sums of gradients are never shorter than float32
            made = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), tree)
            return self.place(what, made)

        table = self.program
        return {
            "mail": self.place("slots", slots(table.mail, self.x)),
            "kept": [] if self.forward_only or self.keep == "inputs" else slots(table.kept, self.halves.kept),
            "stash": slots(table.stash, self.halves.stash) if table.stash else [],
            "layers": None if self.forward_only else zeros("layers", self.chunks),
            "shared": None if self.forward_only else zeros("shared", self.shared),
            "sums": jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.sums) if head else {},
        }

    @jax.named_scope(TABLE)
    def tick(self, kind: Kind, state: dict, numbers: jax.Array) -> dict:
        """Runs one tick: the op of this stage, then what it writes, sends and receives."""
        return self.step(kind, state, Row(*(numbers[i] for i in range(len(COLUMNS)))))

    def masked(self, row: Row, op: str) -> "_Masked":
        """Returns how a tick in which all stages do this op leaves no trace on one that idles."""
        return _Masked(row.op == OP_NUMBER[op])

    def step(self, kind: Kind, state: dict, row: Row) -> dict:
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
        empty = lambda trees: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), trees)  # noqa: E731
        return _Done(
            out=empty(self.x) if done.out is None else done.out,
            kept=[jnp.zeros(b.shape[1:], b.dtype) for b in state["kept"]] if done.kept is None else done.kept,
            stash=[jnp.zeros(b.shape[1:], b.dtype) for b in state["stash"]] if done.stash is None else done.stash,
            layers=empty(_first(self.chunks)) if done.layers is None else done.layers,
            shared=state["shared"] if done.shared is None else done.shared,
            sums=state["sums"] if done.sums is None else done.sums,
        )

    def parameters(self, state: dict, row: Row) -> tuple[Tree, Tree]:
        """Returns what all stages share, and the row's chunk."""
        with jax.named_scope(f"{SCOPE}layers of a chunk"):
            return self.shared, load(self.chunks, row.chunk)

    def scale(self, row: Row) -> jax.Array:
        """Returns what the gradient of this microbatch's loss begins with."""
        return self.one

    def _inputs(self, row: Row, shared: Tree):
        known = load(self.known, row.microbatch)
        x, per_layer = self.embed(shared, known)
        part = jnp.maximum(row.part, 0)
        start, count = jnp.asarray(self.starts)[part], jnp.asarray(self.layers)[part]

        def mine(leaf):  # a stage with fewer layers reads on into the next one's, and past the last into nothing
            more = (
                jnp.concatenate([leaf, leaf[: self.depth - min(self.layers)]])
                if min(self.layers) < self.depth
                else leaf
            )
            return jax.lax.dynamic_slice_in_dim(more, start, self.depth)

        return known, (known, jax.tree.map(mine, per_layer), count), x

    def _input(self, kind: Kind, state: dict, row: Row, choose: "_Masked | _Chosen"):
        """Returns this op's (known, known of the stage, shared parameters, the chunk's, x)."""
        shared, chunk = self.parameters(state, row)
        known, mine, embedded = self._inputs(row, shared)
        x = load(state["mail"], row.x)
        if kind.first:
            x = self.place("x", choose(row.part == 0, lambda: embedded, lambda: x))
        return known, mine, shared, chunk, x

    def forward(self, kind: Kind, state: dict, row: Row, choose: "_Masked | _Chosen") -> _Done:
        """F."""
        known, mine, params, chunk, x = self._input(kind, state, row, choose)
        if self.forward_only or self.keep == "inputs":
            y, kept = self.stage(chunk, mine, x), None
        else:
            y, kept = self.halves.forward(chunk, mine, x)
        if not kind.last:
            return _Done(out=y, kept=kept)
        shared, sums = state["shared"], state["sums"]

        def with_head():
            new, dshared, dy = self.head(params, known, y, self.scale(row))
            more = None if self.forward_only else self.place("shared", jax.tree.map(add, shared, dshared))
            return (y if self.forward_only else dy), more, jax.tree.map(jnp.add, sums, new)

        last = choose.active & (row.part == self.schedule.parts - 1)
        out, shared, sums = choose(last, with_head, lambda: (y, shared, sums))
        return _Done(out=out, kept=kept, shared=shared, sums=sums)

    def _kept(self, state: dict, row: Row, mine, chunk, x) -> list:
        if self.keep == "residuals":
            return load(state["kept"], row.kept)
        with jax.named_scope(AGAIN):
            return self.halves.forward(chunk, mine, x)[1]

    def backward(self, kind: Kind, state: dict, row: Row, choose: "_Masked | _Chosen") -> _Done:
        """B."""
        known, mine, params, chunk, x = self._input(kind, state, row, choose)
        kept, g = self._kept(state, row, mine, chunk, x), load(state["mail"], row.g)
        stash = layers = None
        with jax.named_scope(BACKWARD):
            if self.halves.input_grad is not None:
                dx, stash = self.halves.input_grad(chunk, mine, x, kept, g)
            else:
                layers, dx = self.halves.backward(chunk, mine, x, kept, g)
        shared = state["shared"]
        if kind.first:

            def embedding():
                dshared = self.embed_back(params, known, dx)
                return self.place("shared", jax.tree.map(add, shared, dshared))

            shared = choose(choose.active & (row.part == 0), embedding, lambda: shared)
        return _Done(out=dx, stash=stash, layers=layers, shared=shared if kind.first else None)

    def weights(self, kind: Kind, state: dict, row: Row, choose: "_Masked | _Chosen") -> _Done:
        """W."""
        assert self.halves.weight_grad is not None  # a table with W is split
        shared, chunk = self.parameters(state, row)
        _, mine, _ = self._inputs(row, shared)
        with jax.named_scope(BACKWARD):
            dchunk = self.halves.weight_grad(chunk, mine, load(state["stash"], row.stash))
        return _Done(layers=dchunk)

    def write(self, kind: Kind, state: dict, row: Row, done: _Done) -> dict:
        """Returns the state with what an op left, and with what then arrives."""
        state = dict(state)
        if state["kept"] and done.kept is not None:
            state["kept"] = store(state["kept"], done.kept, row.kept, row.op == OP_NUMBER["F"])
        if state["stash"] and done.stash is not None:
            state["stash"] = store(state["stash"], done.stash, row.stash, row.op == OP_NUMBER["B"])
        if done.layers is not None:
            before, summed = load(state["layers"], row.chunk), row.op == OP_NUMBER["W" if self.schedule.split else "B"]
            write = partial(jax.lax.dynamic_update_index_in_dim, index=row.chunk, axis=0)
            with jax.named_scope(GRADIENT):
                total = jax.tree.map(lambda a, b: jnp.where(summed, add(a, b), a), before, done.layers)
                state["layers"] = self.place("layers", jax.tree.map(write, state["layers"], total))
        state |= {key: value for key in ("shared", "sums") if (value := getattr(done, key)) is not None}
        return state if done.out is None else self.send(kind, state, row, done.out)

    def send(self, kind: Kind, state: dict, row: Row, out: Tree) -> dict:
        """Returns the state with what arrives when every stage sends what it computed."""
        state, out = dict(state), self.place("x", out)
        for way in ("right", "left", "own"):
            if getattr(kind, way):
                pairs = {"right": self.program.right, "left": self.program.left}.get(way)
                arrives = jax.tree.map(partial(_send, pairs=pairs), out) if pairs else out
                slot = getattr(row, way)
                state["mail"] = self.place("slots", store(state["mail"], arrives, slot, slot >= 0))
        return state


TRACED = ("embed", "x", "layers", "starts", "stage", "halves", "head", "embed_back", "sums")


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


def _first(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def load(tree: Tree, index) -> Tree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, jnp.maximum(index, 0), 0, keepdims=False), tree)


def store(tree: Tree, new: Tree, index, take) -> Tree:
    """Returns the buffers with one slot written, where there is something to write."""
    index = jnp.maximum(index, 0)

    def one(buffer, value):
        old = jax.lax.dynamic_index_in_dim(buffer, index, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(buffer, jnp.where(take, value, old), index, 0)

    return jax.tree.map(one, tree, new)


def _check_shapes(name: str, x: Tree, y: Tree) -> None:
    show = lambda tree: ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree))  # noqa: E731
    same = jax.tree.structure(x) == jax.tree.structure(y)
    if not same or [(a.shape, a.dtype) for a in jax.tree.leaves(x)] != [(b.shape, b.dtype) for b in jax.tree.leaves(y)]:
        raise refuse(
            f"the layers of {name} take {show(x)} and return {show(y)}",
            rule="a stage gets what the one before returns, so layers keep structure, shape and dtype",
            fix="what changes the shape belongs before or after pipelined(layers, x)",
        )
