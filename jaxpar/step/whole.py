"""The gradients of a step whose layers are all on every device: of one microbatch, or summed over several.

    batch ─► microbatches ─► loss sums, gradients ─► accumulated ─► divided once
                 └──────────────── scan ─────────────────┘

The specs of the layout say where each piece lives. `pipelined` does the same for layers spread over stages.
"""

import dataclasses
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import refuse
from jaxpar.models.remat import remat
from jaxpar.models.settings.computing import by_model
from jaxpar.parallel.layout import Layout
from jaxpar.pipeline.jaxprs.beside import beside
from jaxpar.pipeline.jaxprs.dataflow import Traced
from jaxpar.pipeline.jaxprs.narrow import Narrow
from jaxpar.pipeline.jaxprs.promoted import in_bfloat16
from jaxpar.pipeline.jaxprs.summed.once import summed_once
from jaxpar.sharding.names import Compute, Tree, by_path, nest
from jaxpar.step.block_inputs import offloading
from jaxpar.step.checks.given_state import as_made
from jaxpar.step.gradients import Gradients, constrained, one_update
from jaxpar.step.keyed.draws import split_over_examples
from jaxpar.step.keyed.loss import Drawing
from jaxpar.step.losses import Sums, as_sums, divisor
from jaxpar.step.numerics import Numerics
from jaxpar.step.parameters.accumulators import accumulator_dtype, computes_in, divided, is_short, weighted
from jaxpar.step.parameters.frozen import joined, without, zeroed
from jaxpar.step.parameters.gathering import gathered, reads
from jaxpar.step.parameters.overwritten import largest, lowest, only, replaced
from jaxpar.step.state import State


@dataclass(frozen=True, eq=False)
class Whole(Gradients):
    """A model and its loss, run as a whole.

    Attributes:
      layout: Where arrays live.
      loss: (model, batch) to (sum, count), or to a dict of them with the entry `loss`.
      numerics: How it computes.
      frozen: Paths of parameters whose gradients nobody reads: they are zero.
    """

    layout: Layout
    loss: Callable
    numerics: Numerics
    frozen: frozenset[str] = frozenset()

    def gradients(self, params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> tuple[Tree, Sums, Tree]:
        """Returns gradients of the mean loss over all microbatches, the sums, and the rest afterwards."""
        gradients, sums, after = self._trained(params, model_state, batch)
        return zeroed(self.frozen, self.layout, gradients), sums, after

    def _trained(self, params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> tuple[Tree, Sums, Tree]:
        """Returns what `gradients` does, with None for those of frozen parameters."""
        specs = without(self.frozen, self.layout.gradients)
        count = self.numerics.accumulate
        if count == 1:
            params = self._gathered(params, model_state, batch, train=True)
            # no accumulator to keep whole, so stage 1 too can take a reduce-scatter for an all-reduce
            updated = without(self.frozen, self.layout.updated)
            return self._gradients(params, model_state, batch, updated, mean=True)
        # rows i, i + count, ... make microbatch i: each device splits its own rows, nothing moves
        micro = {
            name: jnp.moveaxis(value.reshape(value.shape[0] // count, count, *value.shape[1:]), 1, 0)
            for name, value in batch.items()
        }
        first = jax.tree.map(lambda value: value[0], micro)
        params = self._gathered(params, model_state, first, train=True)

        stored = without(self.frozen, self.layout.params)

        def one(params, model_state, batch, *, mean: bool):
            gradients, sums, model_state = self._gradients(params, model_state, batch, specs, mean=mean)
            return weighted(gradients, sums["loss"][1]) if mean else gradients, sums, model_state

        traced, shapes = jax.make_jaxpr(partial(one, mean=False), return_shape=True)(params, model_state, first)
        # the gradient of a sum of losses may be beyond float16 where that of their mean is not
        short = any(is_short(leaf.dtype) for leaf in jax.tree.leaves(stored))
        mean = short or bool(self._overwritten) or computes_in(traced.jaxpr, jnp.float16)

        def body(carry, batch):
            gradients, sums, state = carry
            more, new, after = one(params, replaced(self._overwritten, state, model_state), batch, mean=mean)
            state = largest(self._overwritten, state, after)
            gradients = constrained(self.layout, jax.tree.map(jnp.add, gradients, more), specs)
            return (gradients, jax.tree.map(jnp.add, sums, new), state), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulator_dtype(x.dtype)), shapes[:2])
        zeros = (constrained(self.layout, zeros[0], specs), zeros[1])
        begun = lowest(self._overwritten, model_state)
        (gradients, sums, model_state), _ = jax.lax.scan(body, (*zeros, begun), micro)
        # in stage 1 the update takes shards: without this they reach into the loop, which gathers every time
        gradients = constrained(self.layout, gradients, specs)
        return divided(gradients, sums["loss"][1], stored), sums, model_state

    @property
    def _overwritten(self) -> frozenset[str]:
        """Paths of the model state whose new value is their gradient, of the mean loss as plain Flax makes it."""
        return self.layout.blueprint.overwritten

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Mapping[str, Any], on_device: Callable
    ) -> tuple[State, dict[str, jax.Array]]:
        """Makes one update, by the gradients of the whole batch."""
        made = self.gradients(state.params, state.model_state, batch)
        if (assigned := self.layout.blueprint.assigned) is not None:
            state = dataclasses.replace(
                state, params=self._params_after_call(assigned, state.params, state.model_state, batch)
            )
        return one_update(self.layout, optimizer, state, made, on_device)

    def _params_after_call(self, assigned: Callable, params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> Tree:
        """Returns the parameters as a call of the model leaves them, where it assigns some: as in one piece, as stored.

        Of this forward pass nothing is computed but what is assigned.
        """
        blueprint, flat = self.layout.blueprint, by_path(params)

        def run(*args: Any) -> dict[str, jax.Array]:
            params, model_state, batch = args
            model = blueprint.bind(params, model_state, partial(self.layout.use, dtype=None), Compute(train=True))
            self.loss(model, batch)
            written = assigned(model)
            return {path: value.astype(flat[path].dtype) for path, value in written.items() if path not in self.frozen}

        args = (params, model_state, dict(batch))
        traced = Traced(run, *args)
        jaxpr = traced.flat.jaxpr
        values = dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        written = jax.tree.unflatten(traced.outputs, Narrow(jaxpr, jaxpr.outvars)(traced.flat.consts, values))
        tree = nest({tuple(path.split("/")): value for path, value in {**flat, **written}.items()})
        return constrained(self.layout, tree, self.layout.stored)

    def evaluate(self, params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> Sums:
        """Returns the sums of a batch: one forward pass, without dropout."""
        params = self._gathered(params, model_state, batch, train=False)
        return self._forward(params, model_state, batch, train=False)[0]

    @property
    def _summed_over(self) -> str:
        """The axis over which sums of layers' gradients are taken out of a scan, or "": see `summed_once`."""
        return "data" if self.layout.sizes["data"] > 1 else "fsdp" if self._cut_by_fsdp else ""

    @property
    def _cut_by_fsdp(self) -> bool:
        """Whether gradients are scattered over `fsdp`, and summed over no other axis but `data`."""
        # what other axes that cut the batch add up would travel whole before the reduce-scatter
        sizes, stage = self.layout.sizes, self.layout.parallel.stage
        alone = self.layout.replicas == sizes["data"] * sizes["fsdp"] and sizes["context"] == 1
        return stage == 3 and alone and sizes["fsdp"] > 1

    def _gathered(self, params: Tree, model_state: Tree, batch: Mapping[str, Any], *, train: bool) -> Tree:
        """Returns the parameters as every microbatch of a step reads them: stages 1 and 2 gather them once."""
        if self.layout.parallel.stage not in (1, 2):
            return params
        forward = partial(self._forward, train=train)
        return gathered(self.layout, params, forward, model_state, batch, dtype=self.numerics.dtype)

    def _uncast(self, params: Tree, model_state: Tree, batch: Mapping[str, Any], train: bool) -> Set[str]:
        """Returns parameters that stage 3 would gather cast and that the loss also reads as stored, for a penalty."""
        if self.numerics.dtype is None or self.layout.parallel.stage != 3:
            return frozenset()
        forward = partial(self._forward, train=train, together=False)
        found = reads(forward, params, model_state, batch, dtype=self.numerics.dtype)
        return {path for path, each in found.items() if each.others}

    def _forward(
        self, params: Tree, model_state: Tree, batch: Mapping[str, Any], *, train: bool, together: bool = True
    ) -> tuple[Sums, Tree]:
        compute = Compute(train=train, dtype=self.numerics.dtype, remat=by_model(self.numerics.remat))
        blueprint = self.layout.blueprint
        read: set[str] = set()

        def use(path: str, value: jax.Array) -> jax.Array:
            read.add(path)
            return self.layout.use(path, value, compute.dtype)

        uncast = self._uncast(params, model_state, batch, train) if together else frozenset()

        def run(params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> tuple[Sums, Tree]:
            params = self.layout.small_stacks(params, compute.dtype, uncast) if together else params
            model = blueprint.bind(params, model_state, use, compute)
            sums = as_sums(self.loss(model, batch), accumulate=self.numerics.accumulate)
            return sums, blueprint.collect(model)

        computed = beside(run) if blueprint.adapters else run
        computed = in_bfloat16(computed) if compute.dtype else computed
        if train and self.numerics.remat == "offload":
            computed = offloading(computed, blueprint.name)
        if isinstance(self.loss, Drawing):
            computed = split_over_examples(computed, self.layout)
        sums, after = computed(params, model_state, batch)
        # a loss may take values out of an NNX model, for a penalty, past what notes where they are used
        if not read and not any(jax.tree.leaves(Traced(run, params, model_state, batch).reads()[0])):
            raise refuse(
                f"the loss reads no parameter of {blueprint.name}",
                rule="a loss calls the model: what it does not read has no gradient",
                fix='model(batch["inputs"]) in the loss',
            )
        return sums, as_made(blueprint.name, model_state, after)

    def _gradients(self, params: Tree, model_state: Tree, batch: Mapping[str, Any], specs: Tree, *, mean: bool):
        """Returns (gradients of the loss sum or mean, sums, rest) of one microbatch, gradients placed by `specs`."""

        def objective(differentiated):
            trained, overwritten = differentiated
            state = joined(overwritten, model_state)
            sums, after = self._forward(joined(trained, params), state, batch, train=True)
            total, count = sums["loss"]
            return (total / jax.lax.stop_gradient(divisor(count)) if mean else total), (sums, after)

        if not self.layout.blueprint.takes_remat:
            objective = remat(objective, by_model(self.numerics.remat))
        differentiated = jax.grad(objective, has_aux=True)
        if axis := self._summed_over:
            rows = max((value.shape[0] for value in batch.values() if value.shape), default=1)
            sizes = self.layout.sizes
            shards = ("fsdp", sizes["fsdp"]) if axis == "data" and self._cut_by_fsdp else None
            differentiated = summed_once(differentiated, axis, sizes[axis], rows=rows, shards=shards)
        overwritten = only(self._overwritten, model_state)
        (gradients, new), (sums, after) = differentiated((without(self.frozen, params), overwritten))
        after = joined(new, after)
        stored = without(self.frozen, self.layout.params)
        gradients = jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), gradients, stored)
        return constrained(self.layout, gradients, specs), sums, after
