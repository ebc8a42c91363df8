"""The gradients of a step whose layers are spread over `pipe`.

    params ─► cast ─► dealt to the stages ─► gathered over fsdp ─► the table ─► summed over fsdp, data, pipe ─► back
                                             └─────────── once per step ─────────────────────────────┘

Around the table everything is left to XLA. Inside it `pipe`, `data` and `fsdp` are manual, so that no gradient is
reduced before the last microbatch is done, but for those that zero=2 and gather="tick" reduce at once, to shards;
`tensor` is XLA's, so that blocks need not know of it.

    shardings    where arrays live, around the table and inside of it
    cut_model    the model in three pieces
    pieces       each of them, a function of the parameters that are there
    lists        a list of equal layers, stacked for the table and taken apart again
    model_state  what the model keeps beside its parameters, before each microbatch
    loss_inputs  what a loss may read of the layers: x alone
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse
from jaxpar.parallel.as_stacks import as_stacks
from jaxpar.parallel.layout import Layout
from jaxpar.pipeline.jaxprs.dataflow import Traced
from jaxpar.pipeline.run.execute import execute
from jaxpar.pipeline.run.program import Program, program
from jaxpar.pipeline.run.spread_head import Around, Spread
from jaxpar.pipeline.run.stage import Keep
from jaxpar.pipeline.run.traced_model import Model
from jaxpar.sharding.names import GRADIENT, SCOPE, Tree, nest, pick
from jaxpar.step.gradients import Gradients, one_update
from jaxpar.step.losses import Sums
from jaxpar.step.numerics import Numerics
from jaxpar.step.parameters.accumulators import divided
from jaxpar.step.parameters.frozen import zeroed
from jaxpar.step.parameters.overwritten import check_overwritten
from jaxpar.step.pipelined import lists
from jaxpar.step.pipelined.counts import counts_of, with_scaled_gradient
from jaxpar.step.pipelined.cut_model import CutModel
from jaxpar.step.pipelined.model_state import ModelStates, folded
from jaxpar.step.pipelined.shardings import Shardings
from jaxpar.step.state import State


class Pipelined(Gradients):
    """A model and its loss, run by the table of a layout.

    Attributes:
      shardings: Where its arrays live.
      cut_model: The model in pieces.
      model_states: What the model keeps beside its parameters.
      frozen: Paths of parameters whose gradients nobody reads: they are zero.
    """

    def __init__(self, layout: Layout, loss: Callable, numerics: Numerics, frozen: frozenset[str] = frozenset()):
        check_overwritten(layout)
        self.layout, self.schedule, self.frozen = layout, layout.schedule, frozen
        self.shardings = Shardings(as_stacks(layout), numerics.dtype)
        self.cut_model = CutModel(self.shardings, loss, numerics)
        self.model_states = ModelStates(self.shardings, layout, loss, numerics)
        self.fill = 0.0  # what buffers hold before they are written: a test makes it nan

    def gradients(self, params: Tree, model_state: Tree, batch: Mapping[str, jax.Array]) -> tuple[Tree, Sums, Tree]:
        """Returns gradients of the mean loss over all microbatches, the sums, and the rest afterwards."""
        model_states, after = self.model_states.each(params, model_state, batch)
        params = lists.stacked(self.layout, params)
        sums, shared, layers = self._run(params, model_states, batch, train=True)
        with jax.named_scope(GRADIENT):
            layers = self.shardings.stored(layers)
        gradients = nest(
            {self.shardings.shared[path]: value for path, value in shared.items()}
            | {self.shardings.stacked[path]: value for path, value in layers.items()}
        )
        gradients = lists.taken_apart(
            self.layout, divided(gradients, jnp.ones(()) if self.scaled else sums["loss"][1], params)
        )
        return zeroed(self.frozen, self.layout, gradients), sums, after

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Mapping[str, jax.Array], on_device: Callable
    ) -> tuple[State, dict[str, jax.Array]]:
        """Makes one update, by the gradients of the whole batch."""
        made = self.gradients(state.params, state.model_state, batch)
        return one_update(self.layout, optimizer, state, made, on_device)

    def evaluate(self, params: Tree, model_state: Tree, batch: Mapping[str, jax.Array]) -> Sums:
        """Returns the sums of a batch: the forwards of the table, nothing kept."""
        self.model_states.traced(params, model_state, batch, train=False)  # refuses models that a pipeline cannot cut
        model_states = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.schedule.microbatches, *x.shape)), model_state)
        return self._run(lists.stacked(self.layout, params), model_states, batch, train=False)[0]

    def _run(self, params: Tree, model_states: Tree, batch: Mapping[str, jax.Array], *, train: bool):
        shardings = self.shardings
        table = program(self.schedule, forward_only=not train)
        shared = {path: shardings.whole(path, pick(params, words)) for path, words in shardings.shared.items()}
        layers = {path: pick(params, words) for path, words in shardings.stacked.items()}
        if not shardings.per_tick:  # else they are cast where they are gathered, and have gradients of their own dtype
            layers = {path: shardings.cast(value) for path, value in layers.items()}
        with jax.named_scope(f"{SCOPE}layers dealt to the stages"):
            layers = shardings.dealt(layers)
        if not shardings.per_tick:
            layers = {path: shardings.gathered(path, value) for path, value in layers.items()}

        if self.layout.parallel.pipeline.head == "spread":
            return self._run_spread(table, shared, layers, model_states, batch, train=train)

        def local(rows, replica, shared, layers, model_states, batch):
            with shardings.inside():
                known = (folded(model_states, replica[0], shardings.replicas), self.cut_model.microbatches(batch))
                model = self.cut_model.model(train=train)
                if self.scaled and train:
                    model, known = with_scaled_gradient(model), (known, self._scales(model, shared, known))
                done = self._execute(table, model, rows[:, 0], shared, layers, known)
            sums = jax.tree.map(lambda x: jax.lax.psum(x, shardings.manual), done.sums)
            if not train:
                return sums, {}, {}
            # over fsdp first: else XLA sums whole over both axes at once
            over = shardings.batch_axes[1:]

            def one(path: str, x: jax.Array) -> jax.Array:  # shards are summed over fsdp already
                return (jax.lax.psum(x, over) if over and not shardings.cut(path) else x)[None]

            with jax.named_scope(GRADIENT):
                summed = ({path: one(path, x) for path, x in tree.items()} for tree in (done.shared, done.layers))
                return sums, *summed

        outs = {}, {}
        if train:
            outs = (
                {path: PartitionSpec(("pipe", "data"), *shardings.cut(path)) for path in shared},
                {path: PartitionSpec("data", "pipe", *shardings.cut(path)[1:]) for path in layers},
            )
        rows = PartitionSpec(None, "pipe")
        each = PartitionSpec(shardings.batch_axes)
        sums, shared, layers = jax.shard_map(
            local,
            mesh=self.layout.on,
            axis_names=set(shardings.manual),
            in_specs=(
                rows,
                each,
                PartitionSpec(),
                {path: shardings.held(path) for path in layers},
                PartitionSpec(),
                each,
            ),
            out_specs=(PartitionSpec(), *outs),
            check_vma=False,
        )(table.rows, jnp.arange(shardings.replicas), shared, layers, model_states, batch)
        shared = {path: shardings.summed(path, value, ("pipe", "data")) for path, value in shared.items()}
        layers = {path: shardings.summed(path, value, "data") for path, value in layers.items()}
        return sums, shared, layers

    def _run_spread(
        self, table: Program, shared: dict, layers: dict, model_states: Tree, batch: Mapping, *, train: bool
    ):
        """Runs the table with embedding and head between the stages."""
        shardings = self.shardings
        around = Around(
            mesh=self.layout.on,
            batch_axes=shardings.batch_axes,
            stages=shardings.inside,
            head=shardings.between,
            place=shardings.place,
            place_head=lambda tree: {path: shardings.spread(path, value) for path, value in tree.items()},
        )

        def known(replica, model_states, batch):
            known = folded(model_states, replica[0], shardings.replicas), self.cut_model.microbatches(batch)
            return (known, self._scales(plain, shared, known)) if model is not plain else known

        plain = self.cut_model.model(train=train)
        model = with_scaled_gradient(plain) if self.scaled and train else plain
        stacked = around.known(known)(jnp.arange(shardings.replicas), model_states, batch)
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), stacked)
        embed = Traced(model.embed, shared, one)
        before = embed.reads()[0]
        after = Traced(model.head, shared, one, embed.shapes[0]).reads()[0]
        embedding = {path: value for path, value in shared.items() if before[path]}
        head = {path: value for path, value in shared.items() if after[path]}
        keep: Keep = self.layout.parallel.pipeline.keep
        run = Spread(table, model, around, layers, embedding, head, stacked, keep=keep)
        done = run.run(self.fill)
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), done["ends"]["sums"])
        if not train:
            return sums, {}, {}
        with jax.named_scope(GRADIENT):
            layers, ends = around.reduced(done["stages"]["layers"], done["ends"]["shared"])
            layers = {path: shardings.summed(path, value, "data") for path, value in layers.items()}
            summed = {path: shardings.summed(path, value, "data") for path, value in ends.items()}
        leaves = {path: self.layout.placements[path].leaf for path in shardings.shared}
        return sums, {path: summed.get(path, jnp.zeros(leaf.shape)) for path, leaf in leaves.items()}, layers

    @property
    def scaled(self) -> bool:
        """Whether gradients are of the mean loss in every tick: those of the sum may be beyond float16."""
        return any(leaf.dtype == jnp.float16 for leaf in jax.tree.leaves(self.layout.params))

    def _scales(self, model: Model, shared: Mapping, known: Tree) -> jax.Array:
        """Returns one over the count of all microbatches on all replicas, for each microbatch."""
        if (counts := counts_of(model, shared, known)) is None:
            raise refuse(
                "parameters in float16, and a loss whose count follows from what the model computes",
                rule="stages of a pipeline make gradients of the mean loss in float16, so that they know its count "
                "before the first microbatch",
                fix="a count that follows from the batch; parameters in bfloat16 or float32; or pipe=1",
            )
        total = jax.lax.psum(jnp.sum(counts), self.shardings.batch_axes)
        return jnp.broadcast_to(jnp.where(total == 0, 0.0, 1.0 / total), counts.shape)

    def _execute(self, table: Program, model: Model, rows: jax.Array, shared: Tree, layers: Tree, known: Tree):
        """Runs the table on one stage's arrays."""
        keep, shardings = self.layout.parallel.pipeline.keep, self.shardings
        return execute(
            table, model, rows, shared, layers, known,
            keep=keep, place=shardings.place, shards=shardings.shards, fill=self.fill,
        )  # fmt: skip
