"""The three pieces of a model, each a function of the parameters that are there.

The loss function is run up to `jp.pipelined(layers, x)`, from there, or only that: each time with the parameters that
are there, and zeros for the others, of which nothing is left.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import JaxparError, refuse
from jaxpar.models.remat import remat
from jaxpar.models.stack import InTurn, cut, reached
from jaxpar.parallel.layout import Layout
from jaxpar.pipeline.jaxprs.shorten import shortened
from jaxpar.pipeline.run.gathers import gathered_again
from jaxpar.sharding.names import SCOPE, Blueprint, Compute, Tree, nest
from jaxpar.step.losses import as_sums
from jaxpar.step.pipelined import layer_keys, layer_state
from jaxpar.step.pipelined.shardings import Shardings
from jaxpar.step.state import salted

Parameters = Mapping[str, Any]


@dataclass(eq=False)
class Pieces:
    """A model's embedding, consecutive layers, and head with the loss: `pipeline.run.traced_model.Model` says of what.

    What is `known` is (state of the model, batch).

    Attributes:
      shardings: Where arrays live.
      loss: (model, batch) to (sum, count), or to a dict of them with the entry `loss`.
      compute: Whether it trains, its dtype, and what its layers recompute in their backward pass.
      in_layers: Whether the layers are what is traced now: they read the stacked parameters and no others.
      span: Members of a list that each callable in `jp.pipelined` runs. Set once the embedding is traced.
    """

    shardings: Shardings
    loss: Callable
    compute: Compute
    in_layers: bool = False
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
        """Returns the input of the layers, and what each of them has of its own.

        Raises:
          JaxparError: If the model never calls `jp.pipelined`.
        """
        found = reached(self._called(shared, known), lambda *call: call)
        if found is None:
            raise refuse(
                f"{self.blueprint.name} never says where its layers are",
                rule="a pipeline cuts a model where it calls jp.pipelined(layers, x)",
                fix="x = jp.pipelined(layers, x) around the stack of equal layers; Decoder and ViT have it",
            )
        layers, x, per_layer = found
        if isinstance(layers, InTurn) and self.layout.lists:
            self.span = self._count // len(layers.layers)
        own = layer_state.of_layers(self.layout, known[0])
        # NNX modules keep their keys themselves; those of Linen are made of the names of layers
        listed = self.layout.lists and not own
        keys = layer_keys.made(lambda known, x: self._each_layer(shared, known, x), known, x) if listed else []
        # the table cuts these as it cuts parameters, with an entry for each member
        if self.span > 1:
            per_layer, keys = jax.tree.map(lambda leaf: jnp.repeat(leaf, self.span, axis=0), (per_layer, keys))
        return x, (per_layer, layer_state.taken(known[0], own), keys)

    def stage(self, layers: Parameters, known, per_layer, x: Tree, salt) -> Tree:
        """Returns the output of consecutive layers."""
        per_layer, own, keys = per_layer
        states, batch = known
        which = layer_state.of_layers(self.layout, states)

        def whole(layers, x):
            run = self._called(layers, (layer_state.given(salted(states, salt), which, own), batch))
            return reached(run, lambda inner, _, __: self._taken(inner, x, per_layer))

        # all by the first layer's program: each turn binds the model with a stack of the layers that one callable runs
        def in_turn(layers, x):
            def one(x, each):
                i, params, own, per_layer, keys = each
                if self.span == 1:
                    params, own = jax.tree.map(lambda leaf: leaf[None], (params, own))
                run = self._called(params, (layer_state.given(salted(states, salt + i), which, own), batch))

                def layer(x):
                    return reached(run, lambda inner, _, __: self._taken(inner.layers[0], x, per_layer))

                return layer_keys.drawing_with(keys, layer, x), None

            turns = len(next(iter(layers.values()))) // self.span
            of_members, of_calls = (layers, own), (per_layer, keys)
            if self.span > 1:
                shape = turns, self.span
                of_members = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), of_members)
                of_calls = jax.tree.map(lambda leaf: leaf[:: self.span], of_calls)
            return jax.lax.scan(one, x, (jnp.arange(turns), *of_members, *of_calls))[0]

        run = in_turn if self.layout.lists else self._of_a_stage(whole, per_layer)
        run = gathered_again(run) if self.shardings.per_tick else run
        return (run if self.blueprint.takes_remat else remat(run, self.compute.remat))(layers, x)

    def head(self, shared: Parameters, known, y: Tree) -> dict:
        """Returns the sums of the loss, given the output of the layers."""
        with cut(lambda layers, x, per_layer: y):
            return as_sums(self._called(shared, known)(), accumulate=self.layout.microbatches)

    def _called(self, params: Parameters, known) -> Callable[[], Any]:
        """Returns a call of the loss, given the parameters that are there."""
        model_state, batch = known
        # a model is bound with all of its parameters, and a stage holds some: zeros stand for the others, one layer
        # for a stack. `_use` refuses a read of them, so that XLA drops them
        absent = {path: place.leaf for path, place in self.layout.placements.items() if path not in params}
        stacked = self.shardings.stacked
        zeros = {
            path: jnp.zeros((1, *leaf.shape[1:]) if path in stacked else leaf.shape, leaf.dtype)
            for path, leaf in absent.items()
        }
        tree = nest({tuple(path.split("/")): value for path, value in {**params, **zeros}.items()})
        model = self.blueprint.bind(tree, model_state, self._use, self.compute)
        return lambda: self.loss(model, batch)

    def _use(self, path: str, value: jax.Array) -> jax.Array:
        """Returns a parameter as the model reads it."""
        if path in self.layout.others:  # whole on every device while the table runs
            return value
        stacked = path in self.shardings.stacked
        if stacked != self.in_layers:
            raise _misplaced(self.blueprint.name, path, "outside" if stacked else "inside")
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            return self.shardings.layer(path, value) if self.in_layers else self.shardings.cast(value)

    def _taken(self, inner: Callable, x: Tree, per_layer) -> Tree:
        """Returns the output of layers, which read the stacked parameters."""
        self.in_layers = True
        try:
            return inner(x, *per_layer)
        finally:
            self.in_layers = False

    def _each_layer(self, shared: Parameters, known, x: Tree) -> Any:
        """Returns the outputs of all layers, each given x."""

        def every(inner, _, per_layer):
            one = [jax.tree.map(lambda leaf, i=i: leaf[i], per_layer) for i in range(len(inner.layers))]
            return [self._taken(layer, x, own) for layer, own in zip(inner.layers, one, strict=True)]

        return reached(self._called(shared, known), every)

    def _of_a_stage(self, layers: Callable, per_layer) -> Callable:
        """Returns layers as a stage runs them: a model that says its number of layers scans over all, a stage fewer."""
        if not self.blueprint.counts_layers or per_layer:
            return layers
        return shortened(layers, self._count, self.blueprint.name)

    @property
    def _count(self) -> int:
        """Layers of the whole model."""
        return self.layout.placements[next(iter(self.layout.stacked))].leaf.shape[0]


def _misplaced(name: str, path: str, where: str) -> JaxparError:
    """Returns the refusal of a parameter that is read on the wrong side of `jp.pipelined`."""
    return refuse(
        f"{name} reads {path} {where} of its layers",
        rule="the layers of a pipeline read the parameters stacked for them (dim 0 named layers), all of "
        "them and no others: a stage has nothing else",
        fix="pass it through x, or run it before or after jp.pipelined(layers, x); for a stack that runs "
        "there, another name than layers for its dim 0",
    )
