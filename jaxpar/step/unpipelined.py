"""Gradients of an unpipelined step, in which every device has all layers: of one microbatch, or summed over several.

    batch ─► microbatches ─► loss sums, gradients ─► accumulated ─► divided once
                 └──────────────── scan ─────────────────┘

The layout has the specs of all arrays. `pipelined` computes the same if the layers are on several stages.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import refuse
from jaxpar.jaxprs.casts import cast_stacks, uncast_gradients
from jaxpar.jaxprs.dataflow import PrunedJaxpr, Traced
from jaxpar.jaxprs.gradient_sums import SMALL
from jaxpar.jaxprs.hoist_gradient_sums import hoist_gradient_sums
from jaxpar.jaxprs.lookups import demote_matmuls
from jaxpar.jaxprs.whole_gradient_sums import keep_accumulated_whole
from jaxpar.models.remat import remat
from jaxpar.models.settings.computing import model_policy
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.read_parameter import gather_small_stacks, read_parameter
from jaxpar.parallel.state_specs import abstract_params, gradient_specs, stored_specs, update_specs
from jaxpar.sharding.names import Compute, Tree, leaves_by_path, nest
from jaxpar.step.block_inputs import offload_block_inputs
from jaxpar.step.checks.input_state import cast_to_initial
from jaxpar.step.frozen_parameters import count_reads, drop_paths, fill_missing, gather_params, zero_frozen
from jaxpar.step.gradients import Gradients, apply_gradients, constrain_tree
from jaxpar.step.losses import Sums, as_sums, nonzero_count
from jaxpar.step.numerics import Numerics
from jaxpar.step.overwritten_state import (
    accumulator_dtype,
    computes_dtype,
    divide_by_count,
    fill_minus_infinity,
    is_short,
    maximum_at_paths,
    multiply_by_count,
    replace_paths,
    select_paths,
)
from jaxpar.step.state import State
from jaxpar.step.stochastic_loss import StochasticLoss, split_over_examples

LAYOUTS_PARTITIONED = (0, 11)  # before that jax, XLA gathers an array whose layout is constrained


@dataclass(frozen=True, eq=False)
class Unpipelined(Gradients):
    """An unpipelined model and its loss.

    Attributes:
      layout: The sharding of all arrays.
      loss: (model, batch) to (sum, count), or to a dict of them with the entry `loss`.
      numerics: Precision, remat and accumulation.
      frozen: Paths of parameters whose gradients the optimizer does not read: these gradients are zero.
    """

    layout: Layout
    loss: Callable
    numerics: Numerics
    frozen: frozenset[str] = frozenset()

    def gradients(self, params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> tuple[Tree, Sums, Tree]:
        """Returns the gradients of the mean loss over all microbatches, the loss sums, and the new model state."""
        gradients, sums, after = self._uncast_gradients(params, model_state, batch)
        gradients = jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), gradients, abstract_params(self.layout))
        return gradients, sums, after

    def _uncast_gradients(
        self, params: Tree, model_state: Tree, batch: Mapping[str, object]
    ) -> tuple[Tree, Sums, Tree]:
        """Returns the same as `gradients`, but without the last cast of gradients to the dtype of the parameters."""
        gradients, sums, after = self._trained(params, model_state, batch)
        return zero_frozen(self.frozen, self.layout, gradients), sums, after

    def _trained(self, params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> tuple[Tree, Sums, Tree]:
        """Returns the same as `_uncast_gradients`, with None for frozen parameters."""
        specs = drop_paths(self.frozen, gradient_specs(self.layout))
        count = self.numerics.accumulate
        if count == 1:
            params = self._gathered(params, model_state, batch, train=True)
            # without an unsharded accumulator, stage 1 can use a reduce-scatter in place of an all-reduce too
            updated = drop_paths(self.frozen, update_specs(self.layout))
            return self._gradients(params, model_state, batch, updated, mean=True)
        # rows i, i + count, ... are microbatch i: each device splits its own rows, so no row moves
        micro = {
            name: jnp.moveaxis(value.reshape(value.shape[0] // count, count, *value.shape[1:]), 1, 0)
            for name, value in batch.items()
        }
        first = jax.tree.map(lambda value: value[0], micro)
        params = self._gathered(params, model_state, first, train=True)

        stored = drop_paths(self.frozen, abstract_params(self.layout))

        def one(params, model_state, batch, *, mean: bool):
            gradients, sums, model_state = self._gradients(params, model_state, batch, specs, mean=mean)
            return multiply_by_count(gradients, sums["loss"][1]) if mean else gradients, sums, model_state

        traced, shapes = jax.make_jaxpr(partial(one, mean=False), return_shape=True)(params, model_state, first)
        # the gradient of a sum of losses may overflow float16 where that of the mean does not
        short = any(is_short(leaf.dtype) for leaf in jax.tree.leaves(stored))
        overwritten = self.layout.blueprint.overwritten  # their new value is the mean loss's gradient, as in plain Flax
        mean = short or bool(overwritten) or computes_dtype(traced.jaxpr, jnp.float16)

        def body(carry, batch):
            gradients, sums, state = carry
            increment, new_sums, after = one(params, replace_paths(overwritten, state, model_state), batch, mean=mean)
            state = maximum_at_paths(overwritten, state, after)
            gradients = constrain_tree(self.layout, jax.tree.map(jnp.add, gradients, increment), specs)
            return (gradients, jax.tree.map(jnp.add, sums, new_sums), state), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulator_dtype(x.dtype)), shapes[:2])
        zeros = (constrain_tree(self.layout, zeros[0], specs), zeros[1])
        initial = fill_minus_infinity(overwritten, model_state)
        (gradients, sums, model_state), _ = jax.lax.scan(body, (*zeros, initial), micro)
        # in stage 1 the update reads shards: without this constraint XLA shards inside the loop, and gathers every turn
        gradients = constrain_tree(self.layout, gradients, specs)
        return divide_by_count(gradients, sums["loss"][1], stored), sums, model_state

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Mapping[str, Any], on_device: Callable
    ) -> tuple[State, dict[str, jax.Array]]:
        """Updates the parameters once, by the gradients of the batch."""
        results = self._uncast_gradients(state.params, state.model_state, batch)
        if (assigned := self.layout.blueprint.assigned) is not None:
            state = dataclasses.replace(
                state, params=self._params_after_call(assigned, state.params, state.model_state, batch)
            )
        return apply_gradients(self.layout, optimizer, state, results, on_device)

    def _params_after_call(
        self, assigned: Callable, params: Tree, model_state: Tree, batch: Mapping[str, object]
    ) -> Tree:
        """Returns the stored parameters after a forward pass, which assigns some of them.

        It runs only the equations of the assigned values.
        """
        blueprint, flat = self.layout.blueprint, leaves_by_path(params)

        def run(*args: Any) -> dict[str, jax.Array]:
            params, model_state, batch = args
            model = blueprint.bind(
                params, model_state, partial(read_parameter, self.layout, dtype=None), Compute(train=True)
            )
            self.loss(model, batch)
            written = assigned(model)
            return {path: value.astype(flat[path].dtype) for path, value in written.items() if path not in self.frozen}

        args = (params, model_state, dict(batch))
        traced = Traced(run, *args)
        jaxpr = traced.flat.jaxpr
        values = dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        written = jax.tree.unflatten(traced.outputs, PrunedJaxpr(jaxpr, jaxpr.outvars)(traced.flat.consts, values))
        tree = nest({tuple(path.split("/")): value for path, value in {**flat, **written}.items()})
        return constrain_tree(self.layout, tree, stored_specs(self.layout))

    def evaluate(self, params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> Sums:
        """Returns the loss sums of a batch: one forward pass, without dropout."""
        params = self._gathered(params, model_state, batch, train=False)
        return self._forward(params, model_state, batch, train=False)[0]

    def _gathered(self, params: Tree, model_state: Tree, batch: Mapping[str, object], *, train: bool) -> Tree:
        """Gathers the parameters once per step in ZeRO stages 1 and 2; else returns them unchanged."""
        if self.layout.parallel.stage not in (1, 2):
            return params
        forward = partial(self._forward, train=train)
        return gather_params(self.layout, params, forward, model_state, batch, dtype=self.numerics.dtype)

    def _uncast(self, params: Tree, model_state: Tree, batch: Mapping[str, object], train: bool) -> Set[str]:
        """Paths of parameters that the loss also reads uncast, e.g. for a penalty; ZeRO-3 would gather them cast."""
        if self.numerics.dtype is None or self.layout.parallel.stage != 3:
            return frozenset()
        forward = partial(self._forward, train=train, together=False)
        uses = count_reads(forward, params, model_state, batch, dtype=self.numerics.dtype)
        return {path for path, use in uses.items() if use.other_reads}

    def _forward(
        self, params: Tree, model_state: Tree, batch: Mapping[str, object], *, train: bool, together: bool = True
    ) -> tuple[Sums, Tree]:
        compute = Compute(train=train, dtype=self.numerics.dtype, remat=model_policy(self.numerics.remat))
        blueprint = self.layout.blueprint
        used_paths: set[str] = set()

        def use(path: str, value: jax.Array) -> jax.Array:
            used_paths.add(path)
            return read_parameter(self.layout, path, value, compute.dtype)

        uncast = self._uncast(params, model_state, batch, train) if together else frozenset()

        def run(params: Tree, model_state: Tree, batch: Mapping[str, object]) -> tuple[Sums, Tree]:
            params = gather_small_stacks(self.layout, params, compute.dtype, uncast) if together else params
            model = blueprint.bind(params, model_state, use, compute)
            sums = as_sums(self.loss(model, batch), accumulate=self.numerics.accumulate)
            return sums, blueprint.collect(model)

        computed = run
        if blueprint.adapters:
            from jaxpar.jaxprs.low_rank_path import separate_low_rank  # a model without adapters does not load it

            computed = separate_low_rank(run)
        computed = demote_matmuls(computed) if compute.dtype else computed
        computed = cast_stacks(computed) if compute.dtype and train else computed
        if activations := self.layout.parallel.activations:
            from jaxpar.step.line_names import name_lines  # a step that names no lines does not load it

            computed = name_lines(computed, activations, all_used=train)
        if train and self.numerics.remat == "offload":
            computed = offload_block_inputs(computed, blueprint.name)
        if isinstance(self.loss, StochasticLoss):
            computed = split_over_examples(computed, self.layout)
        sums, after = computed(params, model_state, batch)
        # a loss may read values of an NNX model directly, e.g. for a penalty, without passing `use`
        if not used_paths and not any(jax.tree.leaves(Traced(run, params, model_state, batch).reads()[0])):
            raise refuse(
                f"the loss reads no parameter of {blueprint.name}",
                rule="a loss calls the model: what it does not read has no gradient",
                fix='model(batch["inputs"]) in the loss',
            )
        return sums, cast_to_initial(blueprint.name, model_state, after)

    def _gradients(self, params: Tree, model_state: Tree, batch: Mapping[str, Any], specs: Tree, *, mean: bool):
        """Returns (gradients of the loss sum or mean, sums, model state) of one microbatch, sharded by `specs`."""

        def objective(differentiated):
            trained, overwritten = differentiated
            state = fill_missing(overwritten, model_state)
            sums, after = self._forward(fill_missing(trained, params), state, batch, train=True)
            total, count = sums["loss"]
            return (total / jax.lax.stop_gradient(nonzero_count(count)) if mean else total), (sums, after)

        if not self.layout.blueprint.takes_remat:
            objective = remat(objective, model_policy(self.numerics.remat))
        differentiated = jax.grad(objective, has_aux=True)
        if _on_devices(self.layout) and jax.__version_info__ >= LAYOUTS_PARTITIONED:
            from jaxpar.jaxprs.stack_layouts import keep_stack_layouts

            differentiated = keep_stack_layouts(differentiated)
        if axis := _summed_over(self.layout):
            rows = max((value.shape[0] for value in batch.values() if value.shape), default=1)
            sizes = self.layout.sizes
            cuts = {"fsdp": _cut_by_fsdp, "expert": _cut_by_expert} if axis == "data" else {}
            shards = next(((name, sizes[name]) for name, cut in cuts.items() if cut(self.layout)), None)
            limit = SMALL if shards and shards[0] == "fsdp" and _between_machines(self.layout) else math.inf
            differentiated = hoist_gradient_sums(
                differentiated, axis, sizes[axis], rows=rows, shards=shards, limit=limit
            )
        # stages 1 and 2 shard the gradients that they have cast
        uncast = self.numerics.accumulate == 1 and self.layout.parallel.stage not in (1, 2)
        differentiated = uncast_gradients(differentiated) if uncast else differentiated
        overwritten = select_paths(self.layout.blueprint.overwritten, model_state)

        def sharded(trees: tuple[Tree, Tree]) -> Any:
            (gradients, new_overwritten), others = differentiated(trees)
            if not uncast:
                stored = drop_paths(self.frozen, abstract_params(self.layout))
                gradients = jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), gradients, stored)
            return (constrain_tree(self.layout, gradients, specs), new_overwritten), others

        trained = drop_paths(self.frozen, params)
        count = len(jax.tree.leaves(trained))
        reduced = keep_accumulated_whole(sharded, ["fsdp"], count) if self.layout.sizes["fsdp"] > 1 else sharded
        (gradients, new_overwritten), (sums, after) = reduced((trained, overwritten))
        return gradients, sums, fill_missing(new_overwritten, after)


def _cut_by_fsdp(layout: Layout) -> bool:
    """Whether gradients are reduce-scattered over `fsdp` and summed over no other axis than `data`."""
    # sums over other axes that split the batch would be sent unsharded before the reduce-scatter
    sizes, stage = layout.sizes, layout.parallel.stage
    only_data_and_fsdp = layout.replicas == sizes["data"] * sizes["fsdp"] and sizes["context"] == 1
    return stage == 3 and only_data_and_fsdp and sizes["fsdp"] > 1


def _cut_by_expert(layout: Layout) -> bool:
    """Whether gradients are reduce-scattered over `expert` and summed over no other axis than `data`, on GPUs.

    Simulated devices have no streams: collectives run one after another, explicit or not.
    """
    sizes, experts = layout.sizes, layout.sizes.get("expert", 1)
    alone = experts > 1 and layout.replicas == sizes["data"] * experts and sizes["context"] == 1
    return alone and layout.parallel.stage == 3 and _on_devices(layout)


def _on_devices(layout: Layout) -> bool:
    """Whether the mesh has devices that are not simulated, or not there: XLA compiles other programs for them."""
    return layout.mesh is not None and layout.mesh.devices.flat[0].platform != "cpu"


def _between_machines(layout: Layout) -> bool:
    """Whether the mesh has devices of several machines, between which sums of large shards overlap in the scan.

    They overlap with the gathers and reduce-scatters over `fsdp` inside of machines, which use other links.
    """
    return layout.mesh is None or len({device.process_index for device in layout.mesh.devices.flat}) > 1


def _summed_over(layout: Layout) -> str:
    """Returns the axis over which layer gradients are summed after the scan instead of in it, or ""."""
    if layout.sizes["data"] > 1:
        return "data"
    return "fsdp" if _cut_by_fsdp(layout) else "expert" if _cut_by_expert(layout) else ""
