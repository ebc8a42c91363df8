"""Inputs of layers in host memory: `remat = "offload"`.

    forward     x ─► layer ─► x ─► layer ─► ...      as with "full", which keeps each x on the device
                 └─► host      └─► host              here it is copied to pinned memory of the host, beside the compute
    backward    x comes back, the layer is computed again, and its gradient follows

The step is rewritten, and no model: in the jaxpr of its forward pass every scan over stacked parameters, as
`jp.Decoder`, `nnx.scan` and `nn.scan` make them, gets a body that is checkpointed and whose carry is offloaded. XLA for
processors has one memory, and ignores where an array is to be: simulated devices compute the same numbers and free
nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
    jaxpr_as_fun,
)

from jaxpar.errors import refuse
from jaxpar.pipeline.jaxprs.dataflow import Scan, Traced, consts_of, jaxpr_of, shapes

NAME = "block_input"
_CALLS = ("jit", "pjit", "closed_call")
_SAME = ("convert_element_type", "sharding_constraint", "copy")  # a stack of parameters is still one after these


def offloading(function: Callable, model: str) -> Callable:
    """Returns a function of (params, *others) whose layers keep their inputs in host memory for the backward pass.

    Args:
      function: Its first argument is a tree of parameters.
      model: What the user calls the model, for messages.

    Raises:
      JaxparError: At a call, where no scan runs over stacked parameters.
    """

    def run(params: Any, *others: Any) -> Any:
        traced = Traced(function, params, *others)
        jaxpr = traced.closed.jaxpr
        changed, count = _changed(jaxpr, set(jaxpr.invars[: len(jax.tree.leaves(params))]))
        if not count:
            raise refuse(
                f'remat="offload", and {model} runs no scan over stacked layers',
                rule="inputs of layers are offloaded one by one, as a scan over their stacked parameters comes to them",
                fix='jax.lax.scan, nnx.scan or nn.scan over the layers (jp.Decoder: scan = true), or remat="full"',
            )
        flat = jaxpr_as_fun(ClosedJaxpr(changed, traced.closed.consts))(*jax.tree.leaves((params, *others)))
        return jax.tree.unflatten(traced.outputs, flat)

    return run


def _changed(jaxpr: Jaxpr, stacks: set) -> tuple[Jaxpr, int]:
    """Returns a jaxpr whose scans over layers are offloaded, and how many there are."""
    eqns, count = [], 0
    for eqn, known in _walk(jaxpr, stacks):
        more = 0
        if eqn.primitive.name in _CALLS and "jaxpr" in eqn.params:
            closed = eqn.params["jaxpr"]
            inner, more = _changed(jaxpr_of(closed), _inside(eqn, known))
            new = ClosedJaxpr(inner, consts_of(closed)) if isinstance(closed, ClosedJaxpr) else inner
            eqn = eqn.replace(params={**eqn.params, "jaxpr": new}) if more else eqn
        elif _is_layers(eqn, known):
            eqn, more = _offloaded(eqn), 1
        eqns.append(eqn)
        count += more
    return (jaxpr.replace(eqns=eqns) if count else jaxpr), count


def _walk(jaxpr: Jaxpr, stacks: set) -> Iterable[tuple[JaxprEqn, set]]:
    """Yields each equation with the variables so far that are stacks of parameters."""
    known = set(stacks)
    for eqn in jaxpr.eqns:
        yield eqn, known
        if eqn.primitive.name in _SAME and not isinstance(eqn.invars[0], Literal) and eqn.invars[0] in known:
            known |= set(eqn.outvars)


def _inside(eqn: JaxprEqn, known: set) -> set:
    inner = jaxpr_of(eqn.params["jaxpr"]).invars
    return {own for own, var in zip(inner, eqn.invars, strict=True) if not isinstance(var, Literal) and var in known}


def _is_layers(eqn: JaxprEqn, known: set) -> bool:
    """Returns whether an equation runs layers: a scan over parameters, with a carry for their input."""
    if eqn.primitive.name != "scan":
        return False
    scan = Scan(eqn)
    over = eqn.invars[scan.consts + scan.carry :]
    stacked = any(not isinstance(var, Literal) and var in known for var in over)
    return stacked and any(map(_is_float, eqn.outvars[: scan.carry]))


def _offloaded(eqn: JaxprEqn) -> JaxprEqn:
    """Returns a scan whose body is computed again in the backward pass, from inputs that come from the host."""
    scan = Scan(eqn)
    closed = ClosedJaxpr(scan.body, scan.body_consts)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[NAME],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def body(*args: jax.Array) -> list:
        carried = range(scan.consts, scan.consts + scan.carry)
        named = [
            checkpoint_name(x, NAME) if i in carried and _is_float(var) else x
            for i, (x, var) in enumerate(zip(args, scan.body.invars, strict=True))
        ]
        return jaxpr_as_fun(closed)(*named)

    # inside of a scan XLA cannot merge the two computations anyway
    run = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return eqn.replace(params={**eqn.params, "jaxpr": jax.make_jaxpr(run)(*shapes(scan.body.invars))})


def _is_float(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.floating) and var.aval.ndim > 0
