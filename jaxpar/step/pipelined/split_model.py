"""Splits a model and its loss into the three parts that a pipeline runs separately.

    embed ──► layers ──► head and loss
              `jp.pipelined(layers, x)`

Each part runs the loss function: until `jp.pipelined(layers, x)`, from there on, or only the layers. It runs with the
stage's parameters, and with zeros for all others, which XLA removes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import JaxparError, refuse
from jaxpar.jaxprs.dataflow import Traced, needed_equations, split_groups, subfunction
from jaxpar.jaxprs.lookups import demote_matmuls, replicate_lookups
from jaxpar.jaxprs.low_rank_path import separate_low_rank
from jaxpar.jaxprs.shorter_scan import shorten_scan
from jaxpar.models.remat import remat
from jaxpar.models.stack import SequentialLayers, call_at_layers, intercept_layers
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.context import splits_tables
from jaxpar.pipeline.run.model_functions import PipelineFunctions
from jaxpar.pipeline.run.parameter_moves import regather_in_backward
from jaxpar.pipeline.run.stage_buffers import Interleaved, load, slot_shapes
from jaxpar.sharding.names import SCOPE, Blueprint, Compute, Tree, nest
from jaxpar.step.losses import as_sums
from jaxpar.step.numerics import Numerics
from jaxpar.step.pipelined import layer_state
from jaxpar.step.pipelined.shardings import Shardings, constrain_in_table, read_in_layer
from jaxpar.step.state import fold_in_number

Parameters = Mapping[str, Any]


@dataclass(eq=False)
class Submodules:
    """Embedding, consecutive layers, and head with loss, for `pipeline.run.model_functions.PipelineFunctions`.

    `known` is (model state, batch).

    Attributes:
      shardings: The shardings of the pipelined step.
      loss: (model, batch) to (sum, count), or to a dict of them with the entry `loss`.
      compute: Training or evaluation, dtype, and rematerialization policy.
      is_tracing_layers: Whether the layers are being traced; they may read only stacked parameters.
      span: Number of layers that each callable in `jp.pipelined` runs; known after the embedding is traced.
    """

    shardings: Shardings
    loss: Callable
    compute: Compute
    is_tracing_layers: bool = False
    span: int = 1

    @property
    def layout(self) -> Layout:
        """The layout of the model's parameters."""
        return self.shardings.layout

    @property
    def blueprint(self) -> Blueprint:
        """The model."""
        return self.shardings.layout.blueprint

    def embed(self, shared: Parameters, known) -> tuple[Tree, Tree]:
        """Returns the input of the layers, and the per-layer values.

        Raises:
          JaxparError: If the model never calls `jp.pipelined`.
        """
        call_args = call_at_layers(self._bind_loss(shared, known), lambda *call: call)
        if call_args is None:
            raise refuse(
                f"{self.blueprint.name} never says where its layers are",
                rule="a pipeline cuts a model where it calls jp.pipelined(layers, x)",
                fix="x = jp.pipelined(layers, x) around the stack of equal layers; Decoder and ViT have it",
            )
        layers, x, per_layer = call_args
        if isinstance(layers, SequentialLayers) and self.layout.lists:
            self.span = _layer_count(self.layout) // len(layers.layers)
        state_leaves = layer_state.leaf_indices(self.layout, known[0])
        # NNX modules store their keys; Linen derives them from layer names
        needs_keys = self.layout.lists and not state_leaves
        keys = (
            layer_state.compute_keys(lambda known, x: self._run_every_layer(shared, known, x), known, x)
            if needs_keys
            else []
        )
        # the table splits these like parameters, with one entry per layer
        if self.span > 1:
            per_layer, keys = jax.tree.map(lambda leaf: jnp.repeat(leaf, self.span, axis=0), (per_layer, keys))
        return x, (per_layer, layer_state.read_leaves(known[0], state_leaves), keys)

    def stage(self, layers: Parameters, known, per_layer, x: Tree, salt) -> Tree:
        """Runs consecutive layers."""
        per_layer, state, keys = per_layer
        states, batch = known
        state_leaves = layer_state.leaf_indices(self.layout, states)

        def run_stack(layers, x):
            run = self._bind_loss(
                layers, (layer_state.write_leaves(fold_in_number(states, salt), state_leaves, state), batch)
            )
            return call_at_layers(run, lambda inner, _, __: self._run_layers(inner, x, per_layer))

        # all layers run the first one's program: each iteration binds the model to the layers of one callable
        def run_list(layers, x):
            def run_iteration(x, xs):
                i, params, state, per_layer, keys = xs
                if self.span == 1:
                    params, state = jax.tree.map(lambda leaf: leaf[None], (params, state))
                run = self._bind_loss(
                    params, (layer_state.write_leaves(fold_in_number(states, salt + i), state_leaves, state), batch)
                )

                def layer(x):
                    return call_at_layers(run, lambda inner, _, __: self._run_layers(inner.layers[0], x, per_layer))

                return layer_state.run_with_keys(keys, layer, x), None

            iterations = len(next(iter(layers.values()))) // self.span
            layer_xs, call_xs = (layers, state), (per_layer, keys)
            if self.span > 1:
                shape = iterations, self.span
                layer_xs = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), layer_xs)
                call_xs = jax.tree.map(lambda leaf: leaf[:: self.span], call_xs)
            return jax.lax.scan(run_iteration, x, (jnp.arange(iterations), *layer_xs, *call_xs))[0]

        run = run_list if self.layout.lists else self._shorten_to_stage(run_stack, per_layer)
        run = regather_in_backward(run) if self.shardings.per_tick else run
        return (run if self.blueprint.takes_remat else remat(run, self.compute.remat))(layers, x)

    def head(self, shared: Parameters, known, y: Tree) -> dict:
        """Returns the loss sums, given the output of the layers."""
        with intercept_layers(lambda layers, x, per_layer: y):
            return as_sums(self._bind_loss(shared, known)(), accumulate=self.layout.microbatches)

    def _bind_loss(self, params: Parameters, known) -> Callable[[], Any]:
        """Returns a function that calls the loss with the stage's parameters."""
        model_state, batch = known
        # binding needs all parameters, and a stage has some: zeros replace the others, one layer for a stack.
        # `_read_parameter` refuses to read them, so XLA drops them
        missing = {path: place.leaf for path, place in self.layout.placements.items() if path not in params}
        stacked = self.shardings.stacked_keys
        zeros = {
            path: jnp.zeros((1, *leaf.shape[1:]) if path in stacked else leaf.shape, leaf.dtype)
            for path, leaf in missing.items()
        }
        tree = nest({tuple(path.split("/")): value for path, value in {**params, **zeros}.items()})
        model = self.blueprint.bind(tree, model_state, self._read_parameter, self.compute)
        return lambda: self.loss(model, batch)

    def _read_parameter(self, path: str, value: jax.Array) -> jax.Array:
        """Casts or gathers a parameter where the model reads it."""
        if path in self.layout.other_state:  # replicated on every device while the table runs
            return value
        stacked = path in self.shardings.stacked_keys
        if stacked != self.is_tracing_layers:
            raise _misplaced_error(self.blueprint.name, path, "outside" if stacked else "inside")
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            return read_in_layer(self.shardings, path, value) if self.is_tracing_layers else self.shardings.cast(value)

    def _run_layers(self, inner: Callable, x: Tree, per_layer) -> Tree:
        """Runs layers, and refuses reads of parameters outside of the stack."""
        self.is_tracing_layers = True
        try:
            return inner(x, *per_layer)
        finally:
            self.is_tracing_layers = False

    def _run_every_layer(self, shared: Parameters, known, x: Tree) -> Any:

        def run_all(inner, _, per_layer):
            layer_values = [jax.tree.map(lambda leaf, i=i: leaf[i], per_layer) for i in range(len(inner.layers))]
            return [
                self._run_layers(layer, x, values) for layer, values in zip(inner.layers, layer_values, strict=True)
            ]

        return call_at_layers(self._bind_loss(shared, known), run_all)

    def _shorten_to_stage(self, layers: Callable, per_layer) -> Callable:
        """Shortens the scan of a model with a fixed number of layers to those of one stage."""
        if not self.blueprint.counts_layers or per_layer:
            return layers
        return shorten_scan(layers, _layer_count(self.layout), self.blueprint.name)


def _layer_count(layout: Layout) -> int:
    return layout.placements[next(iter(layout.stacked_paths))].leaf.shape[0]


def _misplaced_error(name: str, path: str, where: str) -> JaxparError:
    return refuse(
        f"{name} reads {path} {where} of its layers",
        rule="the layers of a pipeline read the parameters stacked for them (dim 0 named layers), all of "
        "them and no others: a stage has nothing else",
        fix="pass it through x, or run it before or after jp.pipelined(layers, x); for a stack that runs "
        "there, another name than layers for its dim 0",
    )


@dataclass(frozen=True, eq=False)
class SplitModel:
    """A model in three parts, with parameters sharded for the pipeline's table.

    Attributes:
      shardings: The shardings of the pipelined step.
      loss: (model, batch) to (sum, count), or to a dict of them with the entry `loss`.
      numerics: Precision, remat and accumulation.
    """

    shardings: Shardings
    loss: Callable
    numerics: Numerics

    def model(self, *, train: bool) -> PipelineFunctions:
        """Returns the three parts, for training or evaluation."""
        shardings, layout = self.shardings, self.shardings.layout
        compute = Compute(train=train, dtype=shardings.dtype, remat=self.numerics.remat)
        model = Submodules(shardings, self.loss, compute)
        parts = {"embed": model.embed, "stage": model.stage, "head": model.head}
        if layout.blueprint.adapters:
            parts = {name: separate_low_rank(part) for name, part in parts.items()}
        if compute.dtype:
            parts = {name: demote_matmuls(part) for name, part in parts.items()}
        if splits_tables(layout):
            gather = lambda x: constrain_in_table(layout, x, ())  # noqa: E731
            parts = {name: replicate_lookups(part, gather) for name, part in parts.items()}
        return PipelineFunctions(name=layout.blueprint.name, layers=tuple(layout.parallel.pipeline.layers), **parts)

    def microbatches(self, batch: Mapping[str, jax.Array]) -> Tree:
        """Makes slots of this device's rows: rows i, i + count, ... are microbatch i."""
        count = self.shardings.layout.microbatches
        return {
            name: Interleaved(value.reshape(value.shape[0] // count, count, *value.shape[1:]))
            for name, value in batch.items()
        }


# Computes the loss count of each microbatch before its forward pass, and scales loss gradients by it.
#
#     the batch ─► the count's equations in the head ─► counts ─► 1 / their sum ─► the cotangent of each loss
#
# float16 gradients need this: the gradient of a sum of losses may exceed 65504 where that of the mean does not.


def loss_counts(
    model: PipelineFunctions, shared: Mapping[str, object], inputs: Tree, microbatches: int
) -> jax.Array | None:
    """Returns the loss count of each microbatch of this device, or None if it depends on the model's output.

    Args:
      model: The three parts of the model.
      shared: Parameters outside of the layers.
      inputs: Inputs with a slot for each microbatch.
      microbatches: Number of microbatches.
    """
    microbatch = slot_shapes(inputs)
    x, _ = Traced(model.embed, shared, microbatch).shapes
    traced = Traced(lambda known, shared, x: model.head(shared, known, x)["loss"][1], microbatch, shared, x)
    if any(jax.tree.leaves(traced.reads()[1:])):
        return None
    # runs only the head's equations for the count, on the batch: computes no logits
    jaxpr = traced.flat.jaxpr
    ins, *_ = split_groups(jaxpr.invars, [len(jax.tree.leaves(microbatch))])
    eqns, _ = needed_equations(jaxpr.eqns, jaxpr.outvars)
    count = subfunction(jaxpr, traced.flat.consts, ins, eqns, jaxpr.outvars)
    return jax.lax.map(lambda i: jnp.asarray(count(*jax.tree.leaves(load(inputs, i)))[0]), jnp.arange(microbatches))


def with_scaled_gradient(model: PipelineFunctions) -> PipelineFunctions:
    """Replaces a model's input `known` by (known, scale), and multiplies its loss gradients by the scale."""

    def head(shared: Tree, known: tuple[Tree, jax.Array], y: Tree) -> dict[str, tuple[jax.Array, jax.Array]]:
        sums = model.head(shared, known[0], y)
        return sums | {"loss": (_scale_gradient(sums["loss"][0], known[1]), sums["loss"][1])}

    return replace(
        model,
        embed=lambda shared, known: model.embed(shared, known[0]),
        stage=lambda layers, known, *args: model.stage(layers, known[0], *args),
        head=head,
    )


@jax.custom_vjp
def _scale_gradient(loss: jax.Array, scale: jax.Array) -> jax.Array:
    del scale
    return loss


def _forward(loss: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return loss, scale


def _backward(scale: jax.Array, g: jax.Array) -> tuple[jax.Array, Any]:
    return g * scale, jnp.zeros_like(scale)


_scale_gradient.defvjp(_forward, _backward)
