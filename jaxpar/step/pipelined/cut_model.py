"""A model and its loss, cut into the three pieces that a pipeline runs apart.

embed ──► layers ──► head and loss
          `jp.pipelined(layers, x)`
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpar.parallel.techniques.context import tables_in_pieces
from jaxpar.pipeline.jaxprs.beside import beside
from jaxpar.pipeline.jaxprs.lookups import whole_lookups
from jaxpar.pipeline.jaxprs.promoted import in_bfloat16
from jaxpar.pipeline.run.traced_model import Model
from jaxpar.sharding.names import Compute, Tree
from jaxpar.step.numerics import Numerics
from jaxpar.step.pipelined.pieces import Pieces
from jaxpar.step.pipelined.shardings import Shardings


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
        shardings, layout = self.shardings, self.shardings.layout
        compute = Compute(train=train, dtype=shardings.dtype, remat=self.numerics.remat)
        model = Pieces(shardings, self.loss, compute)
        pieces = {"embed": model.embed, "stage": model.stage, "head": model.head}
        if layout.blueprint.adapters:
            pieces = {name: beside(piece) for name, piece in pieces.items()}
        if compute.dtype:
            pieces = {name: in_bfloat16(piece) for name, piece in pieces.items()}
        if tables_in_pieces(layout):
            whole = lambda x: shardings.constrained(x, ())  # noqa: E731
            pieces = {name: whole_lookups(piece, whole) for name, piece in pieces.items()}
        return Model(name=layout.blueprint.name, layers=shardings.uneven, **pieces)

    def microbatches(self, batch: Mapping[str, jax.Array]) -> Tree:
        """Returns the rows of this device as [microbatches, rows, ...]: rows i, i + count, ... make microbatch i."""
        count = self.shardings.layout.microbatches

        def split(value):
            rows = value.reshape(value.shape[0] // count, count, *value.shape[1:])
            return jnp.moveaxis(rows, 1, 0)

        return {name: split(value) for name, value in batch.items()}
