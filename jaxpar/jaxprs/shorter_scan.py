"""Runs a fixed-length `nn.scan` with fewer layers: those of one stage.

    traced for all layers   scan, length 12, over parameters [12, ...] and dropout keys [12]
    run on a stage          scan, length 3,  over parameters [3, ...]  and the first three keys

Linen's `nn.scan(Block, length=12)` fixes the number of layers in the model's code. So jaxpar traces all layers, as on
one device, and then runs the scan over the stack with fewer layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpar.errors import refuse
from jaxpar.jaxprs.dataflow import PLAIN_CALLS, Env, Scan, Traced, consts_of, jaxpr_of, needed_equations

KEEP_LAYERS = ("convert_element_type", "sharding_constraint", "copy")  # leave dim 0 as it is


def shorten_scan(layers: Callable, count: int, name: str) -> Callable:
    """Wraps a function of all layers so that it runs only the layers whose parameters it gets.

    Args:
      layers: Maps (params, x) to y through all layers of a stack, in one scan.
      count: Number of layers in the stack, the length of the scan.
      name: Name of the model, for messages.

    Raises:
      JaxparError: At a call, if any equation other than a single scan over all layers reads the stack.
    """

    def run(params: Any, x: Any) -> Any:
        full = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), params)
        traced = Traced(layers, full, x)
        leaves = jax.tree.leaves((params, x))
        short = set(traced.closed.jaxpr.invars[: len(jax.tree.leaves(params))])
        evaluation = _Evaluation(count, leaves[0].shape[0], name)
        out, _ = evaluation.run(traced.closed.jaxpr, traced.closed.consts, leaves, short)
        if evaluation.scans != 1:
            raise _refusal(name, f"runs {evaluation.scans} scans over them")
        return jax.tree.unflatten(traced.outputs, out)

    return run


class _Evaluation:
    """Runs a jaxpr on arrays some of which have a smaller dim 0 than when it was traced."""

    def __init__(self, count: int, depth: int, name: str):
        self.count, self.depth, self.name, self.scans = count, depth, name, 0

    def run(self, jaxpr: Jaxpr, consts: Sequence, args: Sequence, short: set[Var]) -> tuple[list, list[bool]]:
        """Computes the results; also returns for each whether its dim 0 is shorter than traced."""
        env = Env(jaxpr, consts, zip(jaxpr.invars, args, strict=True))
        eqns, _ = needed_equations(jaxpr.eqns, jaxpr.outvars)  # drops the rest of the embedding
        for eqn in eqns:
            which = [not isinstance(var, Literal) and var in short for var in eqn.invars]
            kind = eqn.primitive.name
            if not any(which):
                env.run(eqn)
            elif kind == "scan":
                short |= self._scan(env, eqn, which)
            elif kind in PLAIN_CALLS:
                inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
                ins = {var for var, flag in zip(jaxpr_of(inner).invars, which, strict=True) if flag}
                out, outs = self.run(jaxpr_of(inner), consts_of(inner), [env[var] for var in eqn.invars], ins)
                env.update(zip(eqn.outvars, out, strict=True))
                short |= {var for var, flag in zip(eqn.outvars, outs, strict=True) if flag}
            elif kind in KEEP_LAYERS:
                env.run(eqn)
                short |= set(eqn.outvars)
            else:
                raise _refusal(self.name, f"reads them in `{kind}`")
        return [env[var] for var in jaxpr.outvars], [
            not isinstance(var, Literal) and var in short for var in jaxpr.outvars
        ]

    def _scan(self, env: Env, eqn: JaxprEqn, which: list[bool]) -> set[Var]:
        """Runs a scan over the stack, and returns its stacked outputs."""
        scan = Scan(eqn)
        first = scan.consts + scan.carry
        if scan.length != self.count or any(which[:first]):
            raise _refusal(self.name, f"reads them in a scan of length {scan.length}")
        self.scans += 1
        for var, short in zip(eqn.invars[first:], which[first:], strict=True):
            if not short:
                env[var] = self._keys(env[var])
        env.run(eqn.replace(params={**eqn.params, "length": self.depth}))
        return set(eqn.outvars[scan.carry :])

    def _keys(self, value: jax.Array) -> jax.Array:
        """Returns PRNG keys for `depth` layers; any keys will do, because each stage has different ones."""
        if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            raise refuse(
                f"the layers of {self.name} scan over {value.dtype}{list(value.shape)}, which is no parameter",
                rule="what each layer has of its own goes through jp.pipelined, which gives each stage its share",
                fix="x = jp.pipelined(lambda x, each: layers(x, each), x, each)",
            )
        return value[: self.depth]


def _refusal(name: str, what: str):
    return refuse(
        f"{name} {what}, inside of jp.pipelined",
        rule="the layers of a pipeline are one scan over the parameters stacked for them",
        fix="jp.pipelined(layers, x) around that scan alone",
    )
