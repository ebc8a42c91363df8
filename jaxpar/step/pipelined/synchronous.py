"""Gradients of a step whose layers are spread over `pipe`.

    params ─► cast ─► moved to the stages ─► gathered over fsdp ─► the table ─► summed over fsdp, data, pipe ─► back
                                             └─────────── once per step ─────────────────────────────┘

Outside of the table XLA partitions all arrays. Inside it `pipe`, `data` and `fsdp` are manual, so that gradients are
reduced only after the last microbatch, except that zero=2 and gather="tick" reduce-scatter them in every tick; XLA
partitions `tensor`, so that blocks need no code for it.

    shardings    shardings outside and inside of the table
    split_model  the model in three parts
    submodules   each part as a function of its stage's parameters
    equal_layers checks that the layers of a list have equal programs
    model_state  the model state before each microbatch
    loss_inputs  checks that a loss reads only the layers' output x
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse
from jaxpar.jaxprs.dataflow import Traced
from jaxpar.parallel.head_placement import merge_lists_into_stacks
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.state_specs import abstract_params
from jaxpar.pipeline.run.execute import execute
from jaxpar.pipeline.run.model_functions import PipelineFunctions
from jaxpar.pipeline.run.spread_head import ShardMaps, SpreadTable
from jaxpar.pipeline.run.stage import Keep
from jaxpar.pipeline.run.stage_buffers import load
from jaxpar.pipeline.run.tick_program import Program, program
from jaxpar.sharding.names import GRADIENT, SCOPE, Tree, nest, pick
from jaxpar.step.frozen_parameters import zero_frozen
from jaxpar.step.gradients import Gradients, apply_gradients
from jaxpar.step.losses import Sums
from jaxpar.step.numerics import Numerics
from jaxpar.step.overwritten_state import check_overwritten, divide_by_count
from jaxpar.step.pipelined.model_state import ModelStates, salt_by_replica
from jaxpar.step.pipelined.shardings import (
    Shardings,
    constrain_tree_in_table,
    gather_for_table,
    move_to_stages,
    move_to_storage,
    shard_end_gradient,
    spread_head_names,
    stack_layers,
    sum_gradients,
    table_names,
    table_spec,
    unstack_layers,
)
from jaxpar.step.pipelined.split_model import SplitModel, loss_counts, with_scaled_gradient
from jaxpar.step.state import State


class Pipelined(Gradients):
    """Gradients of a model and its loss by the table of a pipeline.

    Attributes:
      shardings: Shardings of the step's arrays.
      split_model: The model in three parts.
      model_states: Computes the model state before each microbatch.
      frozen: Paths of parameters whose gradients the optimizer does not read: these gradients are zero.
    """

    def __init__(self, layout: Layout, loss: Callable, numerics: Numerics, frozen: frozenset[str] = frozenset()):
        check_overwritten(layout)
        self.layout, self.schedule, self.frozen = layout, layout.schedule, frozen
        self.shardings = Shardings(merge_lists_into_stacks(layout), numerics.dtype)
        self.split_model = SplitModel(self.shardings, loss, numerics)
        self.model_states = ModelStates(self.shardings, layout, loss, numerics)
        self.fill = 0.0  # initial value of buffers: a test sets it to nan

    def gradients(self, params: Tree, model_state: Tree, batch: Mapping[str, jax.Array]) -> tuple[Tree, Sums, Tree]:
        """Returns the gradients of the mean loss over all microbatches, the loss sums, and the new model state."""
        model_states, after = self.model_states.before_microbatches(params, model_state, batch)
        params = stack_layers(self.layout, params)
        sums, shared, layers = self._run(params, model_states, batch, train=True)
        with jax.named_scope(GRADIENT):
            layers = move_to_storage(self.shardings.layout, layers)
        gradients = nest(
            {self.shardings.shared_keys[path]: value for path, value in shared.items()}
            | {self.shardings.stacked_keys[path]: value for path, value in layers.items()}
        )
        gradients = unstack_layers(
            self.layout, divide_by_count(gradients, jnp.ones(()) if self.scales_by_count else sums["loss"][1], params)
        )
        return zero_frozen(self.frozen, self.layout, gradients), sums, after

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Mapping[str, jax.Array], on_device: Callable
    ) -> tuple[State, dict[str, jax.Array]]:
        """Updates the parameters once, by the gradients of the batch."""
        results = self.gradients(state.params, state.model_state, batch)
        return apply_gradients(self.layout, optimizer, state, results, on_device)

    def evaluate(self, params: Tree, model_state: Tree, batch: Mapping[str, jax.Array]) -> Sums:
        """Returns the loss sums of a batch; runs only the table's forwards, without residuals."""
        self.model_states.trace_loss(
            params, model_state, batch, train=False
        )  # refuses models that a pipeline cannot split
        model_states = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.schedule.microbatches, *x.shape)), model_state)
        return self._run(stack_layers(self.layout, params), model_states, batch, train=False)[0]

    def _run(self, params: Tree, model_states: Tree, batch: Mapping[str, jax.Array], *, train: bool):
        shardings, layout = self.shardings, self.shardings.layout
        table = program(self.schedule, forward_only=not train)
        shared = {
            path: gather_for_table(layout, path, shardings.cast(pick(params, words)))
            for path, words in shardings.shared_keys.items()
        }
        layers = {path: pick(params, words) for path, words in shardings.stacked_keys.items()}
        if not shardings.per_tick:  # else they are cast where they are gathered, and gradients keep the stored dtype
            layers = {path: shardings.cast(value) for path, value in layers.items()}
        with jax.named_scope(f"{SCOPE}layers dealt to the stages"):
            layers = move_to_stages(layout, layers)
        if not shardings.per_tick:
            layers = {path: gather_for_table(layout, path, value) for path, value in layers.items()}

        if self.layout.parallel.pipeline.head == "spread":
            return self._run_spread(table, shared, layers, model_states, batch, train=train)

        def local(rows, replica, shared, layers, model_states, batch):
            with table_names(layout):
                known = (
                    salt_by_replica(model_states, replica[0], shardings.replicas),
                    self.split_model.microbatches(batch),
                )
                model = self.split_model.model(train=train)
                if self.scales_by_count and train:
                    model, known = with_scaled_gradient(model), (known, self._scales(model, shared, known))
                result = self._execute(table, model, rows[:, 0], shared, layers, known)
            sums = jax.tree.map(lambda x: jax.lax.psum(x, shardings.manual_axes), result.sums)
            if not train:
                return sums, {}, {}
            # fsdp is summed first: otherwise XLA sums unsharded gradients over both axes at once
            sum_axes = shardings.batch_axes[1:]

            def sum_leaf(path: str, x: jax.Array) -> jax.Array:  # shards are already summed over fsdp
                return (jax.lax.psum(x, sum_axes) if sum_axes and not shardings.gradient_axes(path) else x)[None]

            with jax.named_scope(GRADIENT):
                summed = (
                    {path: sum_leaf(path, x) for path, x in tree.items()} for tree in (result.shared, result.layers)
                )
                return sums, *summed

        grad_specs = {}, {}
        if train:
            grad_specs = (
                {path: PartitionSpec(("pipe", "data"), *shardings.gradient_axes(path)) for path in shared},
                {path: PartitionSpec("data", "pipe", *shardings.gradient_axes(path)[1:]) for path in layers},
            )
        rows = PartitionSpec(None, "pipe")
        batch_spec = PartitionSpec(shardings.batch_axes)
        sums, shared, layers = jax.shard_map(
            local,
            mesh=self.layout.device_mesh,
            axis_names=set(shardings.manual_axes),
            in_specs=(
                rows,
                batch_spec,
                PartitionSpec(),
                {path: table_spec(shardings, path) for path in layers},
                PartitionSpec(),
                batch_spec,
            ),
            out_specs=(PartitionSpec(), *grad_specs),
            check_vma=False,
        )(table.rows, jnp.arange(shardings.replicas), shared, layers, model_states, batch)
        shared = {path: sum_gradients(layout, path, value, ("pipe", "data")) for path, value in shared.items()}
        layers = {path: sum_gradients(layout, path, value, "data") for path, value in layers.items()}
        return sums, shared, layers

    def _run_spread(
        self, table: Program, shared: dict, layers: dict, model_states: Tree, batch: Mapping, *, train: bool
    ):
        shardings, layout = self.shardings, self.shardings.layout
        shard_maps = ShardMaps(
            mesh=self.layout.device_mesh,
            batch_axes=shardings.batch_axes,
            stages=partial(table_names, layout),
            head=partial(spread_head_names, shardings),
            constrain=partial(constrain_tree_in_table, layout),
            shard_head=lambda tree: {path: shard_end_gradient(shardings, path, value) for path, value in tree.items()},
        )

        def known_inputs(replica, model_states, batch):
            salted = salt_by_replica(model_states, replica[0], shardings.replicas)
            inputs = salted, self.split_model.microbatches(batch)
            return (inputs, self._scales(unscaled, shared, inputs)) if model is not unscaled else inputs

        unscaled = self.split_model.model(train=train)
        model = with_scaled_gradient(unscaled) if self.scales_by_count and train else unscaled
        stacked = shard_maps.map_inputs(known_inputs)(jnp.arange(shardings.replicas), model_states, batch)
        microbatch = jax.eval_shape(lambda inputs: load(jax.tree.map(lambda x: x[0], inputs), 0), stacked)
        embed = Traced(model.embed, shared, microbatch)
        embed_reads = embed.reads()[0]
        head_reads = Traced(model.head, shared, microbatch, embed.shapes[0]).reads()[0]
        embedding = {path: value for path, value in shared.items() if embed_reads[path]}
        head = {path: value for path, value in shared.items() if head_reads[path]}
        keep: Keep = self.layout.parallel.pipeline.keep
        run = SpreadTable(table, model, shard_maps, layers, embedding, head, stacked, keep=keep)
        result = run.run(self.fill)
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), result["ends"]["sums"])
        if not train:
            return sums, {}, {}
        with jax.named_scope(GRADIENT):
            layers, ends = shard_maps.reduce_gradients(result["stages"]["layers"], result["ends"]["shared"])
            layers = {path: sum_gradients(layout, path, value, "data") for path, value in layers.items()}
            summed = {path: sum_gradients(layout, path, value, "data") for path, value in ends.items()}
        leaves = {path: self.layout.placements[path].leaf for path in shardings.shared_keys}
        return sums, {path: summed.get(path, jnp.zeros(leaf.shape)) for path, leaf in leaves.items()}, layers

    @property
    def scales_by_count(self) -> bool:
        """Whether ticks compute gradients of the mean loss, because gradients of the sum may overflow float16."""
        return any(leaf.dtype == jnp.float16 for leaf in jax.tree.leaves(abstract_params(self.layout)))

    def _scales(self, model: PipelineFunctions, shared: Mapping, known: Tree) -> jax.Array:
        """Returns 1 / (count of all microbatches on all replicas), once per microbatch."""
        if (counts := loss_counts(model, shared, known, self.schedule.microbatches)) is None:
            raise refuse(
                "parameters in float16, and a loss whose count follows from what the model computes",
                rule="stages of a pipeline make gradients of the mean loss in float16, so that they know its count "
                "before the first microbatch",
                fix="a count that follows from the batch; parameters in bfloat16 or float32; or pipe=1",
            )
        total = jax.lax.psum(jnp.sum(counts), self.shardings.batch_axes)
        return jnp.broadcast_to(jnp.where(total == 0, 0.0, 1.0 / total), counts.shape)

    def _execute(
        self, table: Program, model: PipelineFunctions, rows: jax.Array, shared: Tree, layers: Tree, known: Tree
    ):
        keep, shardings = self.layout.parallel.pipeline.keep, self.shardings
        return execute(
            table, model, rows, shared, layers, known,
            keep=keep, constrain=partial(constrain_tree_in_table, shardings.layout), shards=shardings.shards,
            fill=self.fill,
        )  # fmt: skip
