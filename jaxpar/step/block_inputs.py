"""Offloads layer inputs to host memory, for `remat = "offload"`.

    forward     x ─► layer ─► x ─► layer ─► ...      like "full", which keeps each x on the device
                 └─► host      └─► host              copied to pinned host memory during compute
    backward    x is copied back, the layer recomputed and differentiated

Models need no change: in the jaxpr of the forward pass, this file checkpoints the body of every scan over stacked
parameters (`jp.Decoder`, `nnx.scan`, `nn.scan`), and offloads its carry. XLA's CPU backend has one memory and ignores
memory kinds, so simulated devices compute the same numbers and save no memory.
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
from jaxpar.jaxprs.dataflow import PLAIN_CALLS, Scan, Traced, jaxpr_consts, shapes, unwrap_jaxpr

NAME = "block_input"
_SAME = ("convert_element_type", "sharding_constraint", "copy")  # their output is still a stack of parameters


def offload_block_inputs(function: Callable, model: str) -> Callable:
    """Returns a function of (params, *args) that offloads layer inputs to host memory until the backward pass.

    Args:
      function: A function whose first argument is a tree of parameters.
      model: Name of the model, for messages.

    Raises:
      JaxparError: When called, if no scan runs over stacked parameters.
    """

    def run(params: object, *args: Any) -> Any:
        traced = Traced(function, params, *args)
        jaxpr = traced.closed.jaxpr
        rewritten, count = _rewrite_scans(jaxpr, set(jaxpr.invars[: len(jax.tree.leaves(params))]))
        if not count:
            raise refuse(
                f'remat="offload", and {model} runs no scan over stacked layers',
                rule="layer inputs are offloaded in a scan over stacked layer parameters",
                fix='jax.lax.scan, nnx.scan or nn.scan over the layers (jp.Decoder: scan = true), or remat="full"',
            )
        flat = jaxpr_as_fun(ClosedJaxpr(rewritten, traced.closed.consts))(*jax.tree.leaves((params, *args)))
        return jax.tree.unflatten(traced.outputs, flat)

    return run


def _rewrite_scans(jaxpr: Jaxpr, stacks: set) -> tuple[Jaxpr, int]:
    """Rewrites the scans over layers in a jaxpr, and counts them."""
    eqns, count = [], 0
    for eqn, stack_vars in _walk(jaxpr, stacks):
        layer_scans = 0
        if eqn.primitive.name in PLAIN_CALLS and "jaxpr" in eqn.params:
            closed = eqn.params["jaxpr"]
            inner, layer_scans = _rewrite_scans(unwrap_jaxpr(closed), _inner_stacks(eqn, stack_vars))
            inner_jaxpr = ClosedJaxpr(inner, jaxpr_consts(closed)) if isinstance(closed, ClosedJaxpr) else inner
            eqn = eqn.replace(params={**eqn.params, "jaxpr": inner_jaxpr}) if layer_scans else eqn
        elif _is_layers(eqn, stack_vars):
            eqn, layer_scans = _offload_scan(eqn), 1
        eqns.append(eqn)
        count += layer_scans
    return (jaxpr.replace(eqns=eqns) if count else jaxpr), count


def _walk(jaxpr: Jaxpr, stacks: set) -> Iterable[tuple[JaxprEqn, set]]:
    """Yields each equation, and the set of variables that are stacks of parameters."""
    stack_vars = set(stacks)
    for eqn in jaxpr.eqns:
        yield eqn, stack_vars
        if eqn.primitive.name in _SAME and not isinstance(eqn.invars[0], Literal) and eqn.invars[0] in stack_vars:
            stack_vars |= set(eqn.outvars)


def _inner_stacks(eqn: JaxprEqn, known: set) -> set:
    inner = unwrap_jaxpr(eqn.params["jaxpr"]).invars
    return {arg for arg, var in zip(inner, eqn.invars, strict=True) if not isinstance(var, Literal) and var in known}


def _is_layers(eqn: JaxprEqn, known: set) -> bool:
    """Whether an equation is a scan over parameters with a floating-point carry."""
    if eqn.primitive.name != "scan":
        return False
    scan = Scan(eqn)
    xs = eqn.invars[scan.consts + scan.carry :]
    stacked = any(not isinstance(var, Literal) and var in known for var in xs)
    return stacked and any(map(_is_float, eqn.outvars[: scan.carry]))


def _offload_scan(eqn: JaxprEqn) -> JaxprEqn:
    """Returns a scan whose backward pass recomputes the body from inputs copied back from the host."""
    scan = Scan(eqn)
    closed = ClosedJaxpr(scan.body, scan.body_consts)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[NAME],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def body(*args: jax.Array) -> list:
        carry_indices = range(scan.consts, scan.consts + scan.carry)
        named_args = [
            checkpoint_name(x, NAME) if i in carry_indices and _is_float(var) else x
            for i, (x, var) in enumerate(zip(args, scan.body.invars, strict=True))
        ]
        return jaxpr_as_fun(closed)(*named_args)

    # inside a scan XLA cannot merge the two computations anyway
    checkpointed = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return eqn.replace(params={**eqn.params, "jaxpr": jax.make_jaxpr(checkpointed)(*shapes(scan.body.invars))})


def _is_float(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.floating) and var.aval.ndim > 0
