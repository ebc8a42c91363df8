"""Traces a loss and its gradients on shapes: its matmuls, and an estimate of its compiled program."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxpar.errors import refuse
from jaxpar.models.settings.computing import POLICIES, model_policy
from jaxpar.plan.model.liveness import Estimate, estimate
from jaxpar.plan.model.program import MatmulKind, SizedProgram, TracedMatmul, value
from jaxpar.plan.model.program_reader import read_program
from jaxpar.plan.model.splits import Sizes
from jaxpar.sharding.names import DISPATCH, format_path

Context = Callable[[], AbstractContextManager[Any]]
COUNT_ROWS = 2  # rows at which amounts are counted: a single row could be broadcast


@dataclass(frozen=True, kw_only=True)
class ProgramSplit:
    """How axes split a program.

    Attributes:
      shares: Maps a jaxpr of (parameters, other inputs) to a function of a variable to a device's share of its array.
      trace_context: Context manager in which the split program is traced.
    """

    shares: Callable[[Jaxpr], Callable[[Any], float]]
    trace_context: Context = nullcontext


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A matmul, or several equal ones.

    Attributes:
      flop: FLOP of one, per row.
      times: Number of them in a pass.
      kind: "weights", "batched" (has a batch dim) or "convolution".
    """

    flop: float
    times: int
    kind: MatmulKind


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """Matmuls of a loss and its gradients, and estimates of their compiled program.

    Attributes:
      matmuls: Matmuls of a forward pass.
      backward: Matmuls of a backward pass, without those that remat recomputes.
      programs: Maps each remat policy to the estimate of the compiled program.
      blocks: Number of blocks under remat; 0 if the model has none.
      slots: For each kind of mixture of experts (`jp.mixture`): the elements of its slots per example, and the number
        of such mixtures in a forward pass.
      split_programs: Maps sizes of (context, tensor) to estimates, as in `programs`, of the program that one device
        runs if these axes split the model.
    """

    matmuls: tuple[Matmul, ...]
    backward: tuple[Matmul, ...]
    programs: Mapping[str, Estimate]
    blocks: int
    slots: tuple[tuple[float, int], ...] = ()
    split_programs: Mapping[Sizes, Mapping[str, Estimate]] = field(default_factory=dict)

    def program(self, remat: str, context: int, tensor: int) -> Estimate:
        """Returns the estimate of a device's program under a remat policy; a model without blocks has one for all."""
        programs = self.split_programs.get((context, tensor), self.programs)
        return programs.get(remat, programs["none"])


def trace(
    forward: Callable[[str], Callable],
    params: Any,
    inputs: Callable[[int], Any],
    *,
    takes_remat: bool,
    name: str,
    rows: float = 64.0,
    frozen: Collection[str] = (),
    splits: Mapping[Sizes, ProgramSplit] = MappingProxyType({}),
) -> ModelTrace:
    """Traces a loss and its gradients, without compiling and without arrays.

    Args:
      forward: Remat policy to a function (params, inputs) that returns the loss.
      params: Shapes of the parameters.
      inputs: Rows to the shapes of the other inputs: a batch, and state that is not a parameter.
      takes_remat: Whether the model applies remat to its blocks; remat around a whole model saves nothing.
      name: Name of the model, for messages.
      rows: Rows of a device for which fusions are chosen.
      frozen: Paths of parameters without gradients.
      splits: Maps sizes of (context, tensor) to how they split the program.

    Raises:
      JaxparError: If no saved activation grows with the rows, or if ops depend on the number of rows.
    """
    policies = [name for name in POLICIES if model_policy(name) == name] if takes_remat else ["none"]

    def traced(context: Context) -> dict[str, SizedProgram]:
        with context():
            return {policy: _program(forward(policy), params, inputs, frozen, name) for policy in policies}

    traced_in = {
        context: traced(context) for context in {nullcontext, *(split.trace_context for split in splits.values())}
    }
    programs = traced_in[nullcontext]
    trained = len(jax.tree.leaves(params)) - len(_frozen_places(params, frozen))
    places, gradients = range(len(jax.tree.leaves(params))), range(1, 1 + trained)
    estimates = {
        policy: estimate(program, rows, params=places, gradients=gradients) for policy, program in programs.items()
    }
    split_programs = {
        sizes: {
            policy: estimate(program.split(split.shares(program.jaxpr)), rows, params=places, gradients=gradients)
            for policy, program in traced_in[split.trace_context].items()
            if program.jaxpr is not None
        }
        for sizes, split in splits.items()
    }
    matmuls = [*programs["none"].matmuls()]
    if not any(matmul.flop[1:].any() for matmul, _, backward in matmuls if backward):
        raise refuse(
            f"{name}: its backward pass keeps nothing of a row",
            rule="a plan needs a loss that depends on the parameters and on the rows of the batch",
            fix="a model and a loss that read the batch",
        )
    small = inputs(COUNT_ROWS)
    jaxpr = jax.make_jaxpr(forward("none"))(params, small).jaxpr
    remat_jaxpr = jax.make_jaxpr(forward("full"))(params, small).jaxpr if takes_remat else None
    return ModelTrace(
        matmuls=_count_flop(matmuls, backward=False),
        backward=_count_flop(matmuls, backward=True),
        programs=estimates,
        blocks=_blocks(remat_jaxpr) if remat_jaxpr is not None else 0,
        slots=tuple((elements / COUNT_ROWS, times) for elements, times in _slots(jaxpr)),
        split_programs=split_programs,
    )


def _count_flop(matmuls: Collection[tuple[TracedMatmul, int, bool]], *, backward: bool) -> tuple[Matmul, ...]:
    """Returns the FLOP per row of the matmuls of the forward or the backward pass."""
    return tuple(
        Matmul(flop=float(value(matmul.flop, COUNT_ROWS)) / COUNT_ROWS, times=times, kind=matmul.kind)
        for matmul, times, is_backward in matmuls
        if is_backward == backward
    )


def _program(
    forward: Callable, params: Any, inputs: Callable[[int], Any], frozen: Collection[str], name: str
) -> SizedProgram:
    """Reads the program of a loss and of its gradients with respect to the parameters that are not frozen."""
    leaves, structure = jax.tree.flatten(params)
    fixed = _frozen_places(params, frozen)

    def run(leaves: list[Any], known: Any) -> tuple[Any, Any]:
        def loss(trained: list[Any]) -> Any:
            remaining = iter(trained)
            merged = [leaf if place in fixed else next(remaining) for place, leaf in enumerate(leaves)]
            return forward(jax.tree.unflatten(structure, merged), known)

        return jax.value_and_grad(loss)([leaf for place, leaf in enumerate(leaves) if place not in fixed])

    return read_program(lambda rows: jax.make_jaxpr(run)(leaves, inputs(rows)).jaxpr, name=name)


def _frozen_places(params: Any, frozen: Collection[str]) -> set[int]:
    paths = [format_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)]
    return {place for place, path in enumerate(paths) if path in frozen}


def _slots(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[int, int]]:
    """Yields the elements of the slots of each mixture of experts, and its number of runs."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("custom_vjp_call") and DISPATCH in str(eqn.source_info.name_stack):
            slots: Any = eqn.outvars[0].aval
            yield math.prod(slots.shape), times
        else:
            for inner in _inner(eqn):
                yield from _slots(inner, times * eqn.params["length"] if eqn.primitive.name == "scan" else times)


def _blocks(jaxpr: Jaxpr, times: int = 1) -> int:
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("checkpoint", "remat2"):
            count += times
        else:
            inner_times = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
            count += sum(_blocks(inner, inner_times) for inner in _inner(eqn))
    return count


def _inner(eqn: JaxprEqn) -> list[Any]:
    """Returns the jaxprs inside an equation; of a `cond`, the first branch."""
    if eqn.primitive.name == "cond":
        return [eqn.params["branches"][0].jaxpr]
    closed = [getattr(value, "jaxpr", value) for value in eqn.params.values()]
    return [jaxpr for jaxpr in closed if hasattr(jaxpr, "eqns")]
