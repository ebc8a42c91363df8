"""Splits a model on one device into the parts that a pipeline splits it into; each part can run alone.

embed ──► block: one of the equal layers ──► head and loss

`step/pipelined/split_model.py` splits the model likewise for the stages of a mesh.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.models.remat import remat
from jaxpar.models.stack import call_at_layers, intercept_layers
from jaxpar.parallel.compose import as_blueprint
from jaxpar.sharding.names import Blueprint, Compute, Tree, nest
from jaxpar.sharding.nnx.hooks import step_hooks
from jaxpar.sharding.rules import name_stacks
from jaxpar.step.losses import as_sums
from jaxpar.step.numerics import Numerics
from jaxpar.step.stochastic_loss.loss import traceable_loss


@dataclass(frozen=True, eq=False)
class Pieces:
    """A model and its loss in three parts; `known` is (model state other than parameters, batch).

    Attributes:
      blueprint: The model.
      loss: Maps (model, batch) to (sum, count), or to a dict of such pairs with the entry `loss`.
      compute: Dtype and remat of the model.
      count: Number of layers in its stack.
      stacked: Paths of the parameters with a leading dim of layers.
    """

    blueprint: Blueprint
    loss: Callable
    compute: Compute
    count: int
    stacked: frozenset[str]

    @staticmethod
    def from_model(model: object, loss: Callable, numerics: Numerics) -> "Pieces":
        """Splits a model, which has any form that `compose` takes.

        Raises:
          JaxparError: If it has no stack of equal layers, or several.
        """
        blueprint = as_blueprint(model)
        leaves = name_stacks(blueprint.leaves)
        stacked = {path: leaf for path, leaf in leaves.items() if leaf.names and leaf.names[0] == "layers"}
        counts = {leaf.shape[0] for leaf in stacked.values()}
        if len(counts) != 1:
            raise refuse(
                f"{blueprint.name} has {len(counts)} stacks of layers",
                rule="a model whose layers are measured has one stack of equal layers, between an embedding and a head",
                fix="parameters stacked along a dim 0 named layers, as Decoder and ViT have them",
            )
        compute = Compute(train=True, dtype=numerics.dtype, remat=numerics.remat)
        return Pieces(blueprint, traceable_loss(loss), compute, counts.pop(), frozenset(stacked))

    def arrays(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns the parameters outside of the stack, and those of one layer, all filled with 0.02."""
        found = {path: jnp.full(self._shape(path), 0.02, leaf.dtype) for path, leaf in self.blueprint.leaves.items()}
        shared = {path: value for path, value in found.items() if path not in self.stacked}
        return shared, {path: found[path] for path in self.stacked}

    def _shape(self, path: str) -> tuple[int, ...]:
        shape = self.blueprint.leaves[path].shape
        return (1, *shape[1:]) if path in self.stacked else shape

    def _called(self, params: Mapping[str, Any], known: tuple[Tree, Mapping[str, Any]]) -> Callable[[], Any]:
        model_state, batch = known
        leaves = {
            path: params[path] if path in params else jnp.zeros(self._shape(path), leaf.dtype)
            for path, leaf in self.blueprint.leaves.items()
        }
        dtype = self.compute.dtype

        def use(_: str, value: jax.Array) -> jax.Array:
            return value if dtype is None or not jnp.issubdtype(value.dtype, jnp.floating) else value.astype(dtype)

        tree = nest({tuple(path.split("/")): value for path, value in leaves.items()})
        model = self.blueprint.bind(tree, model_state, use, self.compute)
        return lambda: self.loss(model, batch)

    @step_hooks()
    def embed(self, shared: Mapping[str, Any], known: tuple[Tree, Mapping[str, Any]]) -> tuple[Any, tuple]:
        """Returns the input of the first layer, and the inputs that differ by layer."""
        found = call_at_layers(self._called(shared, known), lambda layers, x, per_layer: (x, per_layer))
        if found is None:
            raise refuse(
                f"{self.blueprint.name} never says where its layers are",
                rule="a model whose layers are measured calls jp.pipelined(layers, x) once",
                fix="x = jp.pipelined(layers, x) around the stack of equal layers; Decoder and ViT have it",
            )
        return found

    @step_hooks()
    def block(self, one: Mapping[str, Any], known: tuple[Tree, Mapping[str, Any]], mine: tuple, x: Any) -> Any:
        """Applies one layer to x."""

        def run(one, x):
            return call_at_layers(self._called(one, known), lambda layers, _, __: layers(x, *mine))

        return run(one, x) if self.blueprint.takes_remat else remat(run, self.compute.remat)(one, x)

    @step_hooks()
    def head(self, shared: Mapping[str, Any], known: tuple[Tree, Mapping[str, Any]], y: Any) -> jax.Array:
        """Returns the loss for the output of the last layer."""
        with intercept_layers(lambda layers, x, per_layer: y):
            return as_sums(self._called(shared, known)(), accumulate=1)["loss"][0]
