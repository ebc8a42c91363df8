"""The gradients of a step whose layers are spread over `pipe`.

    params ─► cast ─► dealt to the stages ─► gathered over fsdp ─► the table ─► summed over fsdp, data, pipe ─► back
                                             └─────────── once per step ─────────────────────────────┘

Around the table everything is left to XLA. Inside it `pipe`, `data` and `fsdp` are manual, so that no gradient is
reduced before the last microbatch is done; `tensor` is XLA's, so that blocks need not know of it. With gather="tick"
`fsdp` is XLA's too: each layer is gathered where it runs, and its gradient reduced to a shard there.

A model is cut where it calls `jp.pipelined(layers, x)`: its loss function is run up to there, from there, or only that.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse
from jaxpar.mesh.axes import BATCH_AXES
from jaxpar.models.remat import remat
from jaxpar.models.stack import cut, reached
from jaxpar.parallel.layout import Layout
from jaxpar.pipeline.dataflow import Traced, function, needed, parts, primitives
from jaxpar.pipeline.deal import deal, padded
from jaxpar.pipeline.execute import execute
from jaxpar.pipeline.pieces import Model
from jaxpar.pipeline.program import Program, program
from jaxpar.pipeline.spread import Around, Spread
from jaxpar.pipeline.stage import Keep
from jaxpar.sharding.constrain import activation_names
from jaxpar.sharding.names import GRADIENT, SCOPE, Compute, Tree, nest, pick
from jaxpar.train.losses import Sums, as_sums
from jaxpar.train.numerics import Numerics


class Pipelined:
    """A model and its loss, run by the table of a layout."""

    def __init__(self, layout: Layout, loss: Callable, numerics: Numerics, dtype: Any):
        self.layout, self.loss, self.numerics, self.dtype = layout, loss, numerics, dtype
        self.schedule = layout.schedule
        self.per_tick = layout.parallel.pipeline.gather == "tick"
        self.manual = ("pipe", "data") if self.per_tick else ("pipe", *BATCH_AXES)
        self.batch_axes = tuple(axis for axis in BATCH_AXES if axis in self.manual)
        self.fill = 0.0  # what buffers hold before they are written: a test makes it nan
        self.stacked = {path: tuple(path.split("/")) for path in layout.stacked}
        self.uneven = tuple(layout.parallel.pipeline.layers)
        self.shared = {path: tuple(path.split("/")) for path in layout.placements if path not in self.stacked}

    def gradients(self, params: Tree, rest: Tree, batch: Mapping[str, jax.Array]) -> tuple[Tree, Sums, Tree]:
        """Returns gradients of the mean loss over all microbatches, the sums, and the rest afterwards."""
        rests, after = self._rests(params, rest, batch)
        sums, shared, layers = self._run(params, rests, batch, train=True)
        with jax.named_scope(GRADIENT):
            layers = self._stored(layers)
        tokens = sums["loss"][1]
        gradients = nest(
            {self.shared[path]: value for path, value in shared.items()}
            | {self.stacked[path]: value for path, value in layers.items()}
        )
        return jax.tree.map(lambda gradient: gradient / tokens.astype(gradient.dtype), gradients), sums, after

    def evaluate(self, params: Tree, rest: Tree, batch: Mapping[str, jax.Array]) -> Sums:
        """Returns the sums of a batch: the forwards of the table, nothing kept."""
        rests = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.schedule.microbatches, *x.shape)), rest)
        return self._run(params, rests, batch, train=False)[0]

    def _run(self, params: Tree, rests: Tree, batch: Mapping[str, jax.Array], *, train: bool):
        layout, mesh = self.layout, self.layout.on
        table = program(self.schedule, forward_only=not train)
        shared = {path: self._whole(path, pick(params, words)) for path, words in self.shared.items()}
        layers = {path: self._cast(pick(params, words)) for path, words in self.stacked.items()}
        with jax.named_scope(f"{SCOPE}layers dealt to the stages"):
            layers = self._dealt(layers)
        if not self.per_tick:
            layers = {path: self._gathered(path, value) for path, value in layers.items()}

        if layout.parallel.pipeline.head == "spread":
            return self._run_spread(table, shared, layers, rests, batch, train=train)

        def local(rows, replica, shared, layers, rests, batch):
            with self._inside():
                known = (folded(rests, replica[0], self.replicas), self._microbatches(batch))
                model = self._model(train=train)
                if self.per_tick and self.layout.sizes["tensor"] > 1:
                    self._check_lookups(model, shared, layers, known)
                done = self._execute(table, model, rows[:, 0], shared, layers, known)
            sums = jax.tree.map(lambda x: jax.lax.psum(x, self.manual), done.sums)
            if not train:
                return sums, {}, {}
            over = self.batch_axes[
                1:
            ]  # over fsdp first, where it is manual: else XLA sums whole over both axes at once
            with jax.named_scope(GRADIENT):
                one = lambda x: (jax.lax.psum(x, over) if over else x)[None]  # noqa: E731
                summed = jax.tree.map(one, (done.shared, done.layers))
            return sums, *summed

        rows = PartitionSpec(None, "pipe")
        each = PartitionSpec(self.batch_axes)
        sums, shared, layers = jax.shard_map(
            local,
            mesh=mesh,
            axis_names=set(self.manual),
            in_specs=(rows, each, PartitionSpec(), PartitionSpec("pipe"), PartitionSpec(), each),
            out_specs=(PartitionSpec(), PartitionSpec(("pipe", "data")), PartitionSpec("data", "pipe")),
            check_vma=False,
        )(table.rows, jnp.arange(self.replicas), shared, layers, rests, batch)
        shared = {path: self._summed(path, value, ("pipe", "data")) for path, value in shared.items()}
        layers = {path: self._summed(path, value, "data") for path, value in layers.items()}
        return sums, shared, layers

    def _run_spread(self, table: Program, shared: dict, layers: dict, rests: Tree, batch: Mapping, *, train: bool):
        """Runs the table with the head between the stages."""
        around = Around(
            mesh=self.layout.on,
            batch_axes=self.batch_axes,
            stages=self._inside,
            head=self._between,
            place=self._place,
            place_head=lambda tree: {path: self._spread(path, value) for path, value in tree.items()},
        )

        def known(replica, rests, batch):
            return folded(rests, replica[0], self.replicas), self._microbatches(batch)

        model, stacked = self._model(train=train), around.known(known)(jnp.arange(self.replicas), rests, batch)
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), stacked)
        embed = Traced(model.embed, shared, one)
        before = embed.reads()[0]
        after = Traced(model.head, shared, one, embed.shapes[0]).reads()[0]
        whole = {path: self._off_pipe(path, value) for path, value in shared.items() if before[path]}
        head = {path: value for path, value in shared.items() if after[path]}
        keep: Keep = self.layout.parallel.pipeline.keep
        run = Spread(table, model, around, layers, whole, head, stacked, keep=keep)
        done = run.run(self.fill)
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), done["head"]["sums"])
        if not train:
            return sums, {}, {}
        with jax.named_scope(GRADIENT):
            embedding, layers, head = around.reduced(done["stages"], done["head"]["shared"])
            layers = {path: self._summed(path, value, "data") for path, value in layers.items()}
            summed = {path: self._summed(path, value, "data") for path, value in head.items()}
            for path, value in embedding.items():  # [pipe, data, ...]
                spec = pick(self.layout.updated, self.shared[path])
                over = None if any("pipe" in (entry or ()) for entry in spec) else "pipe"  # pipe may become a dim's own
                more = self._summed(path, jnp.sum(self._on(value, PartitionSpec(over, "data", *spec)), axis=0), "data")
                summed[path] = summed[path] + more if path in summed else more
        leaves = {path: self.layout.placements[path].leaf for path in self.shared}
        return sums, {path: summed.get(path, jnp.zeros(leaf.shape)) for path, leaf in leaves.items()}, layers

    def _off_pipe(self, path: str, value: jax.Array) -> jax.Array:
        """Returns a parameter whole over `pipe`, as a stage that looks things up in it wants it."""
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            return self._on(value, _without(self.layout.placements[path].used, ("pipe",)))

    def _between(self):
        """Between the stages `pipe` is one more axis that names of activations may mean."""
        sizes = {axis: 1 if axis in self.batch_axes else size for axis, size in self.layout.sizes.items()}
        return activation_names(self.layout.names, sizes)

    def _spread(self, path: str, value: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(value, _without(self.layout.placements[path].used, self.batch_axes))

    @property
    def replicas(self) -> int:
        """Ways in which the rows of the batch are split by hand."""
        return math.prod(self.layout.sizes[axis] for axis in self.batch_axes)

    def _inside(self, *but: str):
        """Inside the table names of activations mean the axes that are not manual there, but for these."""
        sizes = {axis: 1 if axis in (*self.manual, *but) else size for axis, size in self.layout.sizes.items()}
        return activation_names(self.layout.names, sizes)

    def _execute(self, table: Program, model: Model, rows: jax.Array, shared: Tree, layers: Tree, known: Tree):
        """Runs the table on one stage's arrays."""
        keep = self.layout.parallel.pipeline.keep
        return execute(table, model, rows, shared, layers, known, keep=keep, place=self._place, fill=self.fill)

    # --- where arrays live ------------------------------------------------------------------------------------------

    def _cast(self, value: jax.Array) -> jax.Array:
        floating = self.dtype is not None and jnp.issubdtype(value.dtype, jnp.floating)
        return value.astype(self.dtype) if floating else value

    def _whole(self, path: str, value: jax.Array) -> jax.Array:
        return self._gathered(path, self._cast(value))

    def _dealt(self, layers: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the layers on the stages that run them."""
        if not self.uneven:
            return deal(self.layout.on, self.schedule.cut, layers)
        order, _ = padded(self.uneven)
        moved = {path: jnp.take(value, order, axis=0) for path, value in layers.items()}
        return {path: self._on(value, self._run_on(path, "stored")) for path, value in moved.items()}

    def _stored(self, layers: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the layers where they are stored."""
        if not self.uneven:
            return deal(self.layout.on, self.schedule.cut, layers, back=True)
        _, places = padded(self.uneven)
        specs = {path: pick(self.layout.updated, words) for path, words in self.stacked.items()}
        moved = {path: self._on(value, specs[path]) for path, value in layers.items()}
        return {path: self._on(jnp.take(value, places, axis=0), specs[path]) for path, value in moved.items()}

    def _on(self, value: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(value, self.layout.sharding(spec))

    def _run_on(self, path: str, which: str) -> PartitionSpec:
        """Returns a spec of a parameter for the time that the table runs: layers are split over `pipe` then."""
        words = tuple(path.split("/"))
        spec = pick(self.layout.updated, words) if which == "updated" else getattr(self.layout.placements[path], which)
        if path not in self.stacked:
            return spec
        return PartitionSpec("pipe", *_without(spec, ("pipe",))[1:])

    def _gathered(self, path: str, value: jax.Array) -> jax.Array:
        """Returns a parameter as the table reads it: gathered over `fsdp` once per step, cast before it travels."""
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            return self._on(self._on(value, self._run_on(path, "stored")), self._run_on(path, "used"))

    def _summed(self, path: str, stacked: jax.Array, over) -> jax.Array:
        """Returns the sum of gradients [ways, ...] over an axis, placed as the update reads them."""
        with jax.named_scope(GRADIENT):
            return jnp.sum(self._on(stacked, PartitionSpec(over, *self._run_on(path, "updated"))), axis=0)

    def _place(self, what: str, tree: Tree) -> Tree:
        """Returns what is inside the table with its sharding over the axes that are not manual."""
        if what in ("x", "slots"):
            dims = (("fsdp",), ("tensor",) if self.layout.parallel.sequence else (), ())
            ahead = ((),) * (what == "slots")

            def placed(x):  # [batch, seq, embed], or a tree of which only the rows are known
                own = x.ndim - len(ahead)
                return self._constrained(x, (*ahead, *(dims if own == 3 else dims[: min(own, 1)])))

            return jax.tree.map(placed, tree)
        places = {path: self.layout.placements[path] for path in tree}
        specs = {path: place.sharded if self.per_tick else place.used for path, place in places.items()}
        if what == "layers":
            return {path: self._constrained(x, ((), (), *specs[path][1:])) for path, x in tree.items()}
        return {path: self._constrained(x, specs[path]) for path, x in tree.items()}

    def _constrained(self, x: jax.Array, entries) -> jax.Array:
        """Constrains a value inside the table; axes that are manual there, or of size 1, are left out."""
        each = ((entry,) if isinstance(entry, str) else entry or () for entry in entries)
        free = [tuple(a for a in axes if a not in self.manual and self.layout.sizes[a] > 1) for axes in each]
        if not any(size > 1 for axis, size in self.layout.sizes.items() if axis not in self.manual):
            return x
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*(axes or None for axes in free)))

    def _layer(self, path: str, value: jax.Array) -> jax.Array:
        """Returns a parameter where a layer reads it: gathered over `fsdp` there, if that is not done once per step."""
        value = self._cast(value)
        if not self.per_tick:
            return value
        place = self.layout.placements[path]
        entries = [(*spec, *(None,) * (len(place.leaf.shape) - len(spec))) for spec in (place.stored, place.used)]
        stored, used = (entry[len(entry) - value.ndim :] for entry in entries)
        return self._constrained(self._constrained(value, stored), used)

    def _microbatches(self, batch: Mapping[str, jax.Array]) -> Tree:
        """Returns the rows of this device as [microbatches, rows, ...]: rows i, i + count, ... make microbatch i."""
        count = self.schedule.microbatches

        def split(value):
            rows = value.reshape(value.shape[0] // count, count, *value.shape[1:])
            rows = jnp.moveaxis(rows, 1, 0)
            return self._constrained(rows, ()) if self.per_tick else rows

        return {name: split(value) for name, value in batch.items()}

    # --- the model in three pieces ----------------------------------------------------------------------------------

    def _model(self, *, train: bool) -> Model:
        compute = Compute(train=train, dtype=self.dtype, remat=self.numerics.remat)
        layout, blueprint, at = self.layout, self.layout.blueprint, {"layers": False}

        def use(path: str, value: jax.Array) -> jax.Array:
            if (path in self.stacked) != at["layers"]:
                raise refuse(
                    f"{blueprint.name} reads {path} "
                    + ("outside of its layers" if path in self.stacked else "inside of its layers"),
                    rule="the layers of a pipeline read the parameters stacked for them (dim 0 named layers), all of "
                    "them and no others: a stage has nothing else",
                    fix="pass it through x, or run it before or after jp.pipelined(layers, x)",
                )
            with jax.named_scope(SCOPE + path.replace("/", ".")):
                return self._layer(path, value) if at["layers"] else self._cast(value)

        def called(params: Mapping[str, Any], known) -> Callable[[], Any]:
            rest, batch = known
            absent = {path: place.leaf for path, place in layout.placements.items() if path not in params}
            zeros = {
                path: jnp.zeros((1, *leaf.shape[1:]) if path in self.stacked else leaf.shape, leaf.dtype)
                for path, leaf in absent.items()
            }
            tree = nest({tuple(path.split("/")): value for path, value in {**params, **zeros}.items()})
            model = blueprint.bind(tree, rest, use, compute)
            return lambda: self.loss(model, batch)

        def embed(shared, known):
            with self._inside("fsdp"):  # XLA aborts on a lookup in a split table by rows split over an axis of its own
                found = reached(called(shared, known), lambda layers, x, per_layer: (x, per_layer))
            if found is None:
                raise refuse(
                    f"{blueprint.name} never says where its layers are",
                    rule="a pipeline cuts a model where it calls jp.pipelined(layers, x)",
                    fix="x = jp.pipelined(layers, x) around the stack of equal layers; Decoder and ViT have it",
                )
            whole = (lambda leaf: self._constrained(leaf, ())) if self.per_tick else lambda leaf: leaf
            return jax.tree.map(whole, found[0]), found[1]

        def stage(layers, known, per_layer, x, salt):
            known = (_salted(known[0], salt), known[1])

            def take(inner, x):
                at["layers"] = True
                try:
                    return inner(x, *per_layer)
                finally:
                    at["layers"] = False

            def whole(layers, x):
                return reached(called(layers, known), lambda inner, _, __: take(inner, x))

            if blueprint.takes_remat:
                return whole(layers, x)
            return remat(whole, self.numerics.remat)(layers, x)

        def head(shared, known, y):
            with cut(lambda layers, x, per_layer: y):
                return as_sums(called(shared, known)(), accumulate=self.schedule.microbatches)

        return Model(name=blueprint.name, embed=embed, stage=stage, head=head, layers=self.uneven)

    def _check_lookups(self, model: Model, shared: Tree, layers: Tree, known: Tree) -> None:
        """Refuses lookups on which XLA aborts: of rows split over `fsdp`, in what is split over `tensor`."""
        one = jax.tree.map(lambda leaf: leaf[0], known)
        x, per_layer = Traced(model.embed, shared, one).shapes
        pieces = {
            "layers": Traced(model.stage, layers, one, per_layer, x, jnp.int32(0)),
            "loss": Traced(model.head, shared, one, x),
        }
        for what, traced in pieces.items():
            eqns, _ = needed(traced.closed.jaxpr.eqns, traced.closed.jaxpr.outvars)
            if found := {"gather", "scatter", "scatter-add"} & primitives(eqns):
                raise refuse(
                    f"a {sorted(found)[0]} in the {what} of {model.name}, with gather='tick' and tensor > 1",
                    rule="layers that are gathered inside a tick, over fsdp and tensor, look nothing up by index",
                    fix='gather="step"; or a sum over one-hot entries, as jp.next_token does, for take_along_axis',
                )

    def _check_enclosed(self, params: Tree, rest: Tree, batch: Tree, given: tuple, compute: Compute) -> None:
        """Refuses layers that read, past their arguments, what follows from parameters of the first stage."""
        x, per_layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), given)

        def run(params, batch, rest):
            model = self.layout.blueprint.bind(params, rest, lambda path, value: value, compute)
            return lambda: self.loss(model, batch)

        def each(*args):
            return reached(run(*args), lambda layers, x, per_layer: per_layer)

        def alone(params, batch, rest, x, per_layer):
            return reached(run(params, batch, rest), lambda layers, _, __: layers(x, *per_layer))

        own = Traced(each, params, batch, rest).reads()[0] if jax.tree.leaves(per_layer) else {}
        for path, words in {**self.shared, **self.stacked}.items():
            if own and pick(own, words):
                raise refuse(
                    f"{self.layout.blueprint.name} gives its layers {path} one by one, in jp.pipelined(layers, x, ...)",
                    rule="what each layer has of its own there is no parameter: it gets no gradient",
                    fix="stack it with the other parameters of the layers",
                )

        reads = Traced(alone, params, batch, rest, x, per_layer).reads()[0]
        for path, words in self.shared.items():
            if pick(reads, words):
                raise refuse(
                    f"{self.layout.blueprint.name} reads {path} inside of its layers, or what follows from it",
                    rule="layers read the parameters stacked for them and what jp.pipelined(layers, x, ...) is given: "
                    "a stage has nothing else",
                    fix="pass it through x: jp.pipelined(layers, (x, it)), whose layers return it too",
                )

    def _rests(self, params: Tree, rest: Tree, batch: Mapping[str, jax.Array]) -> tuple[Tree, Tree]:
        """Returns the rest (dropout counts and their kin) before each microbatch, stacked, and after the last."""
        blueprint, compute = self.layout.blueprint, Compute(train=True, dtype=self.dtype, remat=self.numerics.remat)

        calls: list = []

        def at_cut(layers, x, per_layer):
            calls.append((x, per_layer))
            return layers(x, *per_layer)

        def after(params, batch, rest):
            model = blueprint.bind(params, rest, lambda path, value: value, compute)
            with cut(at_cut):
                self.loss(model, batch)
            return blueprint.collect(model)

        count = self.schedule.microbatches
        one = {key: value[: value.shape[0] // count] for key, value in batch.items()}
        traced = Traced(after, params, one, rest)
        if len(calls) != 1:
            raise refuse(
                f"{blueprint.name} calls jp.pipelined {len(calls)} times",
                rule="a pipeline cuts a model where it calls jp.pipelined(layers, x): once, around its stack of layers",
                fix="x = jp.pipelined(layers, x) around the stack of equal layers; Decoder and ViT have it",
            )
        self._check_enclosed(params, rest, one, calls[0], compute)
        reads = traced.reads()
        if any(jax.tree.leaves(reads[:2])):
            raise refuse(
                f"{blueprint.name} keeps state that follows from what it computes, such as the averages of BatchNorm",
                rule="in a pipeline microbatches overlap, so what one leaves behind is not there for the next",
                fix="LayerNorm or GroupNorm, or pipe=1",
            )
        jaxpr = traced.flat.jaxpr
        *_, ins = parts(jaxpr.invars, [len(jax.tree.leaves(tree)) for tree in (params, one, rest)])
        eqns, _ = needed(jaxpr.eqns, jaxpr.outvars)
        step = function(jaxpr, traced.flat.consts, ins, eqns, jaxpr.outvars)
        last, each = jax.lax.scan(lambda leaves, _: (step(*leaves), leaves), jax.tree.leaves(rest), length=count)
        restored = partial(jax.tree.unflatten, jax.tree.structure(rest))
        return restored(each), restored(last)


def _without(spec: PartitionSpec, left_out: tuple[str, ...]) -> PartitionSpec:
    each = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    return PartitionSpec(*(tuple(a for a in axes if a not in left_out) or None for axes in each))


def folded(rests: Tree, replica: jax.Array, replicas: int) -> Tree:
    """Returns random keys that differ between replicas of the batch: each draws for its own rows."""
    return rests if replicas == 1 else _salted(rests, replica)


def _salted(rest: Tree, salt: jax.Array) -> Tree:
    """Returns the random keys of a model's state made different by a number."""

    def fold(x):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        flat = jax.vmap(lambda key: jax.random.fold_in(key, salt))(x.reshape(-1))
        return flat.reshape(x.shape)

    return jax.tree.map(fold, rest)
