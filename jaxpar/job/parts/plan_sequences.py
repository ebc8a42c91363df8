"""The keys and values that `context` sends, in a plan of a model that calls `jp.attention`; see `specs/sequences`."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr

from jaxpar.errors import JaxparError
from jaxpar.plan.model.splits import SplitTraffic
from jaxpar.sharding.names import Blueprint, format_path
from jaxpar.specs.sequences import AXIS, gathered_arrays, sequences_split, split_dims
from jaxpar.specs.shares import ArrayShares
from jaxpar.specs.trace import summed_loss
from jaxpar.step.numerics import DTYPES

ROWS = 2  # examples of the trace: the analysis of dims ignores those of size 1


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceTrace:
    """The forward pass of a model, traced as in a step with context = 2.

    Attributes:
      jaxpr: The program.
      paths: Paths of the parameters, which are its first arguments.
      batch: Numbers of the arguments that are the batch.
      sizes: The sizes of `context` that divide the dims it splits.
    """

    jaxpr: Jaxpr
    paths: tuple[str, ...]
    batch: range
    sizes: tuple[int, ...]

    def traffic(self, tensor: ArrayShares | None = None) -> tuple[SplitTraffic, ...]:
        """Returns the collectives over `context`, given the dims that `tensor` splits."""
        share = tensor(self.jaxpr, self.paths, self.batch, [-1] * len(self.paths)) if tensor else lambda _: 1.0
        return tuple(
            SplitTraffic(
                axis=AXIS,
                kind=kind,
                payload_per_row=share(array) * size / ROWS,
                payload=0.0,
                times=times,
                backward=kind == "reduce-scatter",
            )
            for array, size, times in gathered_arrays(self.jaxpr)
            for kind in ("all-gather", "reduce-scatter")
        )


def trace_sequences(
    blueprint: Blueprint, loss: Callable, batch: Mapping[str, Any], *, sizes: Collection[int], precision: str
) -> tuple[SequenceTrace | None, str]:
    """Traces the forward pass for sizes of `context`; returns None and the reason if the model supports none.

    Args:
      blueprint: A model that calls `jp.attention`.
      loss: A function of (model, batch), or of (model, batch, key).
      batch: Shapes and dtypes by name; the first dim is that of examples.
      sizes: Sizes to try, of at least 2.
      precision: Dtype of matmuls: "fp32" or "bf16".
    """
    params, model_state = jax.eval_shape(lambda: blueprint.init(jax.random.key(0)))
    rows = {name: jax.ShapeDtypeStruct((ROWS, *leaf.shape[1:]), leaf.dtype) for name, leaf in batch.items()}
    try:
        with sequences_split(blueprint) as names:
            summed = summed_loss(blueprint, loss, DTYPES[precision])
            jaxpr = jax.make_jaxpr(lambda *args: summed(*args)[0])(params, model_state, rows).jaxpr
    except JaxparError as error:  # the model does not support context: a plan says so, and has its other axes
        return None, error.problems[0].got
    if not names:
        return None, f'{blueprint.name} names no dim seq; jp.constrain(x, "batch", "seq", "embed") on its stream does'
    lengths = {variable.aval.shape[dim] for variable, dim in split_dims(jaxpr)}
    divided = tuple(size for size in sizes if all(length % size == 0 for length in lengths))
    if not divided:
        return None, f"none of {', '.join(map(str, sizes))} divides the {max(lengths):,} tokens of a row"
    paths = tuple(format_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params))
    first = len(paths) + len(jax.tree.leaves(model_state))
    return SequenceTrace(jaxpr=jaxpr, paths=paths, batch=range(first, first + len(rows)), sizes=divided), ""
