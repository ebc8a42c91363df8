"""Splits a model and its loss into the three parts that a pipeline runs separately.

embed ──► layers ──► head and loss
          `jp.pipelined(layers, x)`
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpar.jaxprs.lookups import replicate_lookups
from jaxpar.jaxprs.low_rank_path import separate_low_rank
from jaxpar.jaxprs.mixed_matmuls import demote_matmuls
from jaxpar.parallel.techniques.context import splits_tables
from jaxpar.pipeline.run.traced_model import Model
from jaxpar.sharding.names import Compute, Tree
from jaxpar.step.numerics import Numerics
from jaxpar.step.pipelined.shardings import Shardings
from jaxpar.step.pipelined.submodules import Submodules


@dataclass(frozen=True, eq=False)
class SplitModel:
    """A model in three parts, with parameters sharded for the pipeline's table.

    Attributes:
      shardings: Where arrays live.
      loss: (model, batch) to (sum, count), or to a dict of them with the entry `loss`.
      numerics: Precision, remat and accumulation.
    """

    shardings: Shardings
    loss: Callable
    numerics: Numerics

    def model(self, *, train: bool) -> Model:
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
            gather = lambda x: shardings.constrain_in_table(x, ())  # noqa: E731
            parts = {name: replicate_lookups(part, gather) for name, part in parts.items()}
        return Model(name=layout.blueprint.name, layers=shardings.layers_per_stage, **parts)

    def microbatches(self, batch: Mapping[str, jax.Array]) -> Tree:
        """Splits this device's rows to [microbatches, rows, ...]: rows i, i + count, ... are microbatch i."""
        count = self.shardings.layout.microbatches

        def split(value):
            rows = value.reshape(value.shape[0] // count, count, *value.shape[1:])
            return jnp.moveaxis(rows, 1, 0)

        return {name: split(value) for name, value in batch.items()}
