"""A model and its loss, cut into the three pieces that a pipeline runs apart.

embed ──► layers ──► head and loss
          `jp.pipelined(layers, x)`

The loss function is run up to that call, from there, or only that: each time with the parameters that are there, and
zeros for the others, of which nothing is left.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import JaxparError, refuse
from jaxpar.models.remat import remat
from jaxpar.models.stack import cut, reached
from jaxpar.parallel.techniques.context import tables_in_pieces
from jaxpar.pipeline.jaxprs.lookups import whole_lookups
from jaxpar.pipeline.jaxprs.promoted import in_bfloat16
from jaxpar.pipeline.jaxprs.shorten import shortened
from jaxpar.pipeline.run.gathers import gathered_again
from jaxpar.pipeline.run.traced_model import Model
from jaxpar.sharding.names import SCOPE, Compute, Tree, nest
from jaxpar.step.losses import as_sums
from jaxpar.step.numerics import Numerics
from jaxpar.step.pipelined import layer_keys, layer_state
from jaxpar.step.pipelined.shardings import Shardings
from jaxpar.step.state import salted


@dataclass(frozen=True, eq=False)
class CutModel:
    """A model in pieces, whose parameters are where the table has them.

    Attributes:
      shardings: Where arrays live.
      loss: (model, batch) to (sum, count), or to a dict of them with the entry `loss`.
      numerics: How it computes.
    """

    shardings: Shardings
    loss: Callable
    numerics: Numerics

    def model(self, *, train: bool) -> Model:
        """Returns the three pieces, for training or for an evaluation."""
        compute = Compute(train=train, dtype=self.shardings.dtype, remat=self.numerics.remat)
        shardings, layout, at = self.shardings, self.shardings.layout, {"layers": False}
        blueprint = layout.blueprint

        def use(path: str, value: jax.Array) -> jax.Array:
            if path in layout.others:  # whole on every device while the table runs
                return value
            if (path in shardings.stacked) != at["layers"]:
                raise _misplaced(blueprint.name, path, "outside" if path in shardings.stacked else "inside")
            with jax.named_scope(SCOPE + path.replace("/", ".")):
                return shardings.layer(path, value) if at["layers"] else shardings.cast(value)

        def called(params: Mapping[str, Any], known) -> Callable[[], Any]:
            model_state, batch = known
            # a model is bound with all of its parameters, and a stage holds some: zeros stand for the others, one layer
            # for a stack. `use` refuses a read of them, so that XLA drops them
            absent = {path: place.leaf for path, place in layout.placements.items() if path not in params}
            zeros = {
                path: jnp.zeros((1, *leaf.shape[1:]) if path in shardings.stacked else leaf.shape, leaf.dtype)
                for path, leaf in absent.items()
            }
            tree = nest({tuple(path.split("/")): value for path, value in {**params, **zeros}.items()})
            model = blueprint.bind(tree, model_state, use, compute)
            return lambda: self.loss(model, batch)

        def embed(shared, known):
            found = reached(called(shared, known), lambda layers, x, per_layer: (x, per_layer))
            if found is None:
                raise refuse(
                    f"{blueprint.name} never says where its layers are",
                    rule="a pipeline cuts a model where it calls jp.pipelined(layers, x)",
                    fix="x = jp.pipelined(layers, x) around the stack of equal layers; Decoder and ViT have it",
                )
            x, per_layer = found
            own = layer_state.of_layers(layout, known[0])
            # NNX modules keep their keys themselves; those of Linen are made of the names of layers
            keys = layer_keys.made(partial(each_layer, shared), known) if layout.lists and not own else []
            return x, (per_layer, layer_state.taken(known[0], own), keys)

        def each_layer(shared, known):
            def every(inner, x, per_layer):
                one = [jax.tree.map(lambda leaf, i=i: leaf[i], per_layer) for i in range(len(inner.layers))]
                return [take(layer, x, own) for layer, own in zip(inner.layers, one, strict=True)]

            return reached(called(shared, known), every)

        def take(inner, x, per_layer):
            at["layers"] = True
            try:
                return inner(x, *per_layer)
            finally:
                at["layers"] = False

        def stage(layers, known, per_layer, x, salt):
            per_layer, own, keys = per_layer
            which = layer_state.of_layers(layout, known[0])
            states = known[0]
            known = (layer_state.given(salted(states, salt), which, own), known[1])

            def whole(layers, x):
                return reached(called(layers, known), lambda inner, _, __: take(inner, x, per_layer))

            # all by the first layer's program: each turn binds the model with a stack of one layer, which that reads
            def in_turn(layers, x):
                def one(x, each):
                    i, params, per_layer, own, keys = each
                    state = layer_state.given(salted(states, salt + i), which, own)
                    params = {path: value[None] for path, value in params.items()}
                    run = called(params, (state, known[1]))

                    def layer(x):
                        return reached(run, lambda inner, _, __: take(inner.layers[0], x, per_layer))

                    return layer_keys.drawing_with(keys, layer, x), None

                numbers = jnp.arange(len(next(iter(layers.values()))))
                return jax.lax.scan(one, x, (numbers, layers, per_layer, own, keys))[0]

            run = in_turn if layout.lists else whole
            # a model that says its number of layers scans over all of them; a stage holds fewer
            if blueprint.counts_layers and not per_layer and not layout.lists:
                count = layout.placements[next(iter(layout.stacked))].leaf.shape[0]
                run = shortened(whole, count, blueprint.name)
            run = gathered_again(run) if shardings.per_tick else run
            return (run if blueprint.takes_remat else remat(run, self.numerics.remat))(layers, x)

        def head(shared, known, y):
            with cut(lambda layers, x, per_layer: y):
                return as_sums(called(shared, known)(), accumulate=layout.microbatches)

        pieces = {"embed": embed, "stage": stage, "head": head}
        if compute.dtype:
            pieces = {name: in_bfloat16(piece) for name, piece in pieces.items()}
        if tables_in_pieces(layout):
            whole = lambda x: shardings.constrained(x, ())  # noqa: E731
            pieces = {name: whole_lookups(piece, whole) for name, piece in pieces.items()}
        return Model(name=blueprint.name, layers=shardings.uneven, **pieces)

    def microbatches(self, batch: Mapping[str, jax.Array]) -> Tree:
        """Returns the rows of this device as [microbatches, rows, ...]: rows i, i + count, ... make microbatch i."""
        count = self.shardings.layout.microbatches

        def split(value):
            rows = value.reshape(value.shape[0] // count, count, *value.shape[1:])
            return jnp.moveaxis(rows, 1, 0)

        return {name: split(value) for name, value in batch.items()}


def _misplaced(name: str, path: str, where: str) -> JaxparError:
    """Returns the refusal of a parameter that is read on the wrong side of `jp.pipelined`."""
    return refuse(
        f"{name} reads {path} {where} of its layers",
        rule="the layers of a pipeline read the parameters stacked for them (dim 0 named layers), all of "
        "them and no others: a stage has nothing else",
        fix="pass it through x, or run it before or after jp.pipelined(layers, x); for a stack that runs "
        "there, another name than layers for its dim 0",
    )
