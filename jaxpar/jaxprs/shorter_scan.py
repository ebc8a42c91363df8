"""Runs an `nn.scan` over all layers of a model with the layers of one stage.

    traced for all layers   scan, length 12, over parameters [12, ...] and dropout keys [12]
    run on a stage          scan, length 3,  over parameters [3, ...]  and the first three keys

Linen's `nn.scan(Block, length=12)` fixes the number of layers in the model's code. So jaxpar traces all layers, as on
one device, and then runs the scan over the stack with fewer layers. Stages with different numbers of layers run one
scan, with the largest number of layers, which masks surplus layers:

    scan, length 8   x ──► layer 0 ──► ... ──► layer 6 ──► layer 7 ──► y    on a stage of 8 layers
                     x ──► layer 0 ──► ... ──► layer 6 ─────(x)──────► y    on one of 7: the last iteration is masked

The alternative, a scan over the smallest number of layers and then the others one by one, would copy slices of
parameters, residuals and gradients, which a scan reads and writes in place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]

from jaxpar.errors import refuse
from jaxpar.jaxprs.dataflow import (
    CALLS,
    PLAIN_CALLS,
    REMAT,
    Env,
    Scan,
    Traced,
    jaxpr_consts,
    needed_equations,
    split_groups,
    unwrap_jaxpr,
)

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

    def run(params: object, x: object) -> Any:
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
                ins = {var for var, flag in zip(unwrap_jaxpr(inner).invars, which, strict=True) if flag}
                out, outs = self.run(unwrap_jaxpr(inner), jaxpr_consts(inner), [env[var] for var in eqn.invars], ins)
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


def masked_layers(layers: Callable, params: object, *args: Any) -> Callable | None:
    """Builds a function that maps (count, params, *args) to y through the first `count` layers of a stack.

    Args:
      layers: Maps (params, *args) to y through all layers of a stack.
      params: The stack: arrays or shapes, whose dim 0 is layers.
      args: The other arguments.

    Returns:
      The function; None if the layers are not a single scan over the stack, or if stacked results of the scan are read,
      which would contain results of masked layers.
    """
    traced = Traced(layers, params, *args)
    leaves = len(jax.tree.leaves(params))
    stack = [n < leaves for n in range(len(traced.closed.jaxpr.invars))]

    def run(count: jax.Array, *args: Any) -> Any:
        evaluation = _MaskedEvaluation(count)
        jaxpr, consts = traced.closed.jaxpr, traced.closed.consts
        out = evaluation.run(jaxpr, consts, jax.tree.leaves(args), stack, jaxpr.outvars)
        if evaluation.scans != 1:
            raise _NotOneScan
        return jax.tree.unflatten(traced.outputs, out)

    try:
        jax.eval_shape(run, jnp.zeros((), jnp.int32), params, *args)
    except _NotOneScan:
        return None
    return run


class _NotOneScan(Exception):
    """The layers are not a single scan over their parameters."""


class _MaskedEvaluation:
    """Runs a jaxpr whose scan over a stack masks the layers from `count` on."""

    def __init__(self, count: jax.Array):
        self.count, self.scans = count, 0

    def run(self, jaxpr: Jaxpr, consts: Sequence, args: Sequence, stack: Sequence[bool], outs: Sequence) -> list:
        """Computes the values of `outs`; `stack` marks the arguments that are stacked parameters."""
        env = Env(jaxpr, consts, zip(jaxpr.invars, args, strict=True))
        stacks = {var for var, flag in zip(jaxpr.invars, stack, strict=True) if flag}
        eqns, reads = needed_equations(jaxpr.eqns, outs)
        for eqn in eqns:
            which = [not isinstance(var, Literal) and var in stacks for var in eqn.invars]
            if not any(which):
                env.run(eqn)
            elif eqn.primitive.name == "scan":
                self._scan(env, eqn, which, reads)
            elif eqn.primitive.name in CALLS:
                self._call(env, eqn, which, reads)
            elif eqn.primitive.name in KEEP_LAYERS:
                env.run(eqn)
                stacks |= set(eqn.outvars)
            else:
                raise _NotOneScan
        if stacks.intersection(var for var in outs if not isinstance(var, Literal)):
            raise _NotOneScan
        return [env[var] for var in outs]

    def _call(self, env: Env, eqn: JaxprEqn, which: list[bool], read: set) -> None:
        """Runs a call that reads a stack; checkpoints it if it is checkpointed."""
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        jaxpr, consts = unwrap_jaxpr(inner), jaxpr_consts(inner)
        outs = [(outer, var) for outer, var in zip(eqn.outvars, jaxpr.outvars, strict=True) if outer in read]

        def run(count, *args):
            # `count` is an argument and not from a closure: `jax.checkpoint` traces its arguments
            evaluation = _MaskedEvaluation(count)
            out = evaluation.run(jaxpr, consts, args, which, [var for _, var in outs])
            self.scans += evaluation.scans
            return out

        if eqn.primitive.name in REMAT:
            run = jax.checkpoint(run, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])
        out = run(self.count, *(env[var] for var in eqn.invars))
        env.update(zip([outer for outer, _ in outs], out, strict=True))

    def _scan(self, env: Env, eqn: JaxprEqn, which: list[bool], read: set) -> None:
        """Runs the scan over the stack."""
        scan = Scan(eqn)
        first = scan.consts + scan.carry
        if any(which[:first]) or read.intersection(eqn.outvars[scan.carry :]):
            raise _NotOneScan
        self.scans += 1
        fixed, start, xs = split_groups([env[var] for var in eqn.invars], [scan.consts, scan.carry, scan.xs])
        body = jaxpr_as_fun(ClosedJaxpr(scan.body, scan.body_consts))

        def step(carry, item):
            number, xs = item
            # all stages run all iterations, because a tick takes as long as the stage with the most layers in any case
            results = body(*fixed, *carry, *xs)[: scan.carry]
            return [jnp.where(number < self.count, a, b) for a, b in zip(results, carry, strict=True)], None

        numbers = jnp.arange(scan.length, dtype=jnp.int32)
        name = str(eqn.source_info.name_stack)
        with jax.named_scope(name) if name else jax.named_scope("layers"):
            last, _ = jax.lax.scan(
                step, start, (numbers, xs), **{key: eqn.params[key] for key in ("length", "reverse", "unroll")}
            )
        env.update(zip(eqn.outvars, last, strict=False))
