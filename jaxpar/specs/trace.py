"""Traces a model's loss and its gradients on shapes, as a step on one device computes them."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params

from jaxpar.errors import JaxparError, refuse, user_code_errors
from jaxpar.jaxprs.lookups import demote_matmuls
from jaxpar.jaxprs.low_rank_path import separate_low_rank
from jaxpar.models.islands import use_islands
from jaxpar.optim.patterns import matching, unmatched
from jaxpar.parallel.compose import compose
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.read_parameter import read_parameter
from jaxpar.sharding.author.explicit import sharding_translation
from jaxpar.sharding.names import Blueprint, Compute, format_path
from jaxpar.sharding.nnx_hooks import step_hooks
from jaxpar.specs.activation_marks import MARK, mark_activations
from jaxpar.specs.program import ELEMENTWISE, TracedProgram, follow_dims
from jaxpar.specs.sequences import sequence_pieces, sequences_split
from jaxpar.step.line_names import lines_used
from jaxpar.step.losses import as_sums
from jaxpar.step.numerics import DTYPES
from jaxpar.step.stochastic_loss import traceable_loss

LARGEST = 30_000  # most equations: about a minute. Not a time limit, as all processes of a job must decide the same


class TracedLoss:
    """Traces the mean loss as a function of (params, model state, batch), for the examples of one device."""

    def __init__(
        self,
        blueprint: Blueprint,
        loss: Callable,
        batch: Mapping[str, Any],
        *,
        rows: float,
        precision: str,
        sequences: bool = False,
    ):
        """Sets the shapes of the arguments.

        Args:
          blueprint: The model.
          loss: A function of (model, batch), or of (model, batch, key).
          batch: Arrays, or their shapes and dtypes, by name; dim 0 is examples.
          rows: Examples on a device; a fraction if it has parts of rows.
          precision: Dtype of matmuls: "fp32" or "bf16".
          sequences: Whether `context` splits the dims of tokens that the model names; the program then has
            their names.
        """
        self.blueprint = blueprint
        self._sequences = sequences
        params, model_state = jax.eval_shape(lambda: blueprint.init(jax.random.key(0)))
        traced = max(math.ceil(rows), 2)
        local = {name: jax.ShapeDtypeStruct((traced, *leaf.shape[1:]), leaf.dtype) for name, leaf in batch.items()}
        self._share = rows / traced
        self.islands: set[str] = set()  # that the model called in the traces so far
        self.arguments = params, model_state, local
        self._whole_batch = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch.items()}
        self._mean = _mean_loss(blueprint, loss, DTYPES[precision])
        self._marked_mean = mark_activations(self._mean, ELEMENTWISE)

    def lines(self, activations: Mapping[str, Sequence[str | None]]) -> set[str]:
        """Returns the keys of `activations` (lines of source) that match an array of the forward pass.

        Like a step, this traces the global batch: for a single example, some JAX functions compute other arrays.
        """
        params, model_state, _ = self.arguments
        with self._tracing():
            jaxpr = jax.make_jaxpr(self._mean)(params, model_state, self._whole_batch).jaxpr
        return lines_used(jaxpr, len(jax.tree.leaves(params)), activations)

    def program(self, frozen: Collection[str] = ()) -> TracedProgram:
        """Follows the dims of all arrays of the loss and of its gradients.

        Args:
          frozen: Patterns of paths of parameters that have no gradient.

        Raises:
          JaxparError: If a pattern matches no parameter, if the model or the loss does not accept the batch, or if the
            program has more than `LARGEST` equations.
        """
        params, *others = self.arguments
        structure = jax.tree.structure(params)
        leaves = {format_path(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
        if problems := unmatched("frozen", frozen, [*leaves]):
            raise JaxparError(*problems)
        fixed = {*matching(leaves, frozen), *(path for path, leaf in leaves.items() if not _is_float(leaf))}
        trained = [path for path in leaves if path not in fixed]

        def gradients(params: Any, *others: Any) -> Any:
            given = dict(zip(leaves, jax.tree.leaves(params), strict=True))

            def objective(values: list[Any]) -> Any:
                everything = given | dict(zip(trained, values, strict=True))
                return self._marked_mean(jax.tree.unflatten(structure, [everything[path] for path in leaves]), *others)

            return jax.value_and_grad(objective)([given[path] for path in trained])

        with self._tracing() as names:
            closed = jax.make_jaxpr(gradients)(params, *others)
        self._check_size(_size(closed.jaxpr))
        first, numbers = len(leaves) + len(jax.tree.leaves(others[0])), count(1)
        batch = range(first, first + len(jax.tree.leaves(others[1])))
        of_leaf = [-1 if path in fixed else next(numbers) for path in leaves]
        program = follow_dims(closed.jaxpr, [*leaves], batch, of_leaf, share=self._share)
        if names:
            program.name_of_piece = dict.fromkeys(sequence_pieces(program, closed.jaxpr), min(names))
        return program

    def _check_size(self, equations: int) -> None:
        if equations > LARGEST:
            raise refuse(
                f"loss and gradients of {self.blueprint.name} in {equations:,} equations: no specs were found, and "
                "only names of your own, annotations, and rules for matrices cut any dim",
                rule=f"programs of up to {LARGEST:,} equations are followed, in about a minute",
                fix="nnx.scan or nn.scan over equal layers, which traces one of them; or specs for fewer layers, whose "
                "paths and activations the whole model then has as names of its own",
            )

    @contextmanager
    def _tracing(self) -> Iterator[set[str]]:
        errors = user_code_errors(
            f"{self.blueprint.name} and its loss",
            rule="model and loss accept the batch",
            fix="change the line of the model or the loss above",
        )
        from jaxpar.models.experts import active_experts  # loaded only where a model is traced

        # outside of a step, shardings in the model's own code have no effect
        split = sequences_split(self.blueprint) if self._sequences else nullcontext(set[str]())
        with (
            errors,
            sharding_translation(),
            step_hooks(),
            split as names,
            use_islands({"mixture": active_experts}) as called,
        ):
            yield names
        self.islands |= called


def _size(jaxpr: Jaxpr) -> int:
    """Returns the number of equations, including those of inner jaxprs, without marks of activations."""
    return sum((eqn.primitive.name != MARK) + sum(map(_size, jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _mean_loss(blueprint: Blueprint, loss: Callable, dtype: Any) -> Callable:
    summed = summed_loss(blueprint, loss, dtype)

    def mean(params: Any, model_state: Any, batch: Any) -> Any:
        total, examples = summed(params, model_state, batch)
        return total / jax.lax.stop_gradient(examples)

    return mean


def summed_loss(
    blueprint: Blueprint, loss: Callable, dtype: Any, *, remat: str = "none", accumulate: int = 1
) -> Callable:
    """Returns the (sum, count) of a loss as a function of (params, model state, batch), as a step computes it.

    Args:
      blueprint: The model.
      loss: A function of (model, batch), or of (model, batch, key).
      dtype: Dtype of matmuls, or None for the model's own.
      remat: Policy of recomputation.
      accumulate: Microbatches of a step; with several a loss that is a mean is refused.
    """
    layout = compose(blueprint, Parallel(), 1)

    def run(params: Any, model_state: Any, batch: Any) -> Any:
        compute = Compute(dtype=dtype, remat=remat)
        model = blueprint.bind(params, model_state, partial(read_parameter, layout, dtype=dtype), compute)
        return as_sums(traceable_loss(loss)(model, batch), accumulate=accumulate)["loss"]

    computed = separate_low_rank(run) if blueprint.adapters else run
    return demote_matmuls(computed) if dtype else computed
