"""Layers that are run in one pass: each stage runs its own once, and hands on what it made.

one pass      scan over layers 0 ... 11
two passes    scan over layers 0 ... 11, then another over its result: a stage would run 0 1 2, 0 1 2, and hand on
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from jaxpar.errors import refuse
from jaxpar.pipeline.jaxprs.dataflow import Scan, after, shapes, variables
from jaxpar.pipeline.jaxprs.shorten import KEEP_LAYERS


def check_layerwise(name: str, eqns: Sequence[JaxprEqn], stacked: Mapping[Var, str]) -> None:
    """Refuses layers that reduce a stack over its dim 0: a stage would reduce its own layers alone.

    Args:
      name: The model's.
      eqns: Of the layers as one device runs them.
      stacked: Variables of the stacks, to their paths.
    """
    stacks = dict(stacked)
    for eqn in eqns:
        var: Any
        for i, var in enumerate(eqn.invars):
            if isinstance(var, Literal) or var not in stacks:
                continue
            if _mixes_layers(eqn, i):
                raise refuse(
                    f"the layers of {name} read {stacks[var]} of all layers at once, in `{eqn.primitive.name}`",
                    rule="a stage has the parameters of its own layers alone, so that each layer reads its own",
                    fix="the layer's own parameters inside of the scan over layers, and sums of all layers in x, where "
                    "each layer adds its own: x, total = jp.pipelined(layers, (x, jnp.zeros(())))",
                )
            if eqn.primitive.name != "transpose":
                outs: list[Any] = [*eqn.outvars]
                stacks |= {out: stacks[var] for out in outs if out.aval.shape == var.aval.shape}  # elementwise


def _mixes_layers(eqn: JaxprEqn, i: int) -> bool:
    """Returns whether an equation mixes entries along dim 0 of its input i."""
    kind, params = eqn.primitive.name, eqn.params
    read, result = (shapes(each)[0].shape for each in ([eqn.invars[i]], eqn.outvars))
    if kind == "dot_general":
        return 0 in params["dimension_numbers"][0][min(i, 1)]
    if kind == "reshape":
        return result[:1] != read[:1]
    if kind.startswith(("reduce_", "arg")):
        return 0 in params.get("axes", ())
    return kind.startswith("cum") and params["axis"] == 0


def check_one_pass(name: str, eqns: Sequence[JaxprEqn], stacked: Mapping[Var, str]) -> None:
    """Refuses layers that go through the stack again with what they made of it, which no stage could.

    Args:
      name: The model's.
      eqns: Of the layers as one device runs them.
      stacked: Variables of the stacks, to their paths.
    """
    stacks, over = set(stacked), []
    for eqn in eqns:
        if eqn.primitive.name == "scan":
            inputs = eqn.invars[len(eqn.invars) - Scan(eqn).xs :]
            over += [eqn] if stacks.intersection(variables(inputs)) else []
        elif eqn.primitive.name in KEEP_LAYERS and stacks.intersection(variables(eqn.invars)):
            stacks |= set(eqn.outvars)  # a cast of a stack is one
    for i, eqn in enumerate(over):
        made = after(eqns, eqn.outvars)
        if any(made.intersection(variables(other.invars)) for other in over[i + 1 :]):
            raise refuse(
                f"the layers of {name} go through a stack, and then through one again",
                rule="a stage runs its layers once, one after the other, and hands on what they made",
                fix="one scan over layers that have both, or jp.pipelined(layers, x) around one stack and the other "
                "before or after it",
            )
