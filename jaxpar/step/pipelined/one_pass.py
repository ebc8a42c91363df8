"""Checks that the layers run in one pass: each stage runs its layers once, and sends the result on.

one pass      scan over layers 0 ... 11
two passes    scan over layers 0 ... 11, then again over its result: a stage would run 0 1 2, 0 1 2
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from jaxpar.errors import refuse
from jaxpar.jaxprs.dataflow import Scan, after, shapes, variables
from jaxpar.jaxprs.shorter_scan import KEEP_LAYERS


def check_layerwise(name: str, eqns: Sequence[JaxprEqn], stacked: Mapping[Var, str]) -> None:
    """Refuses layers that reduce a stack over dim 0, because a stage would reduce only its layers.

    Args:
      name: Name of the model.
      eqns: Equations of the unpipelined layers.
      stacked: Maps variables of the stacks to paths.
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
    """Whether an equation mixes entries along dim 0 of its input i."""
    kind, params = eqn.primitive.name, eqn.params
    shape, result = (shapes(var_list)[0].shape for var_list in ([eqn.invars[i]], eqn.outvars))
    if kind == "dot_general":
        return 0 in params["dimension_numbers"][0][min(i, 1)]
    if kind == "reshape":  # [layers, ...] to [groups, layers of a group, ...] mixes none
        groups_layers = len(result) == len(shape) + 1 and result[2:] == shape[1:]
        return result[:1] != shape[:1] and not groups_layers
    if kind.startswith(("reduce_", "arg")):
        return 0 in params.get("axes", ())
    return kind.startswith("cum") and params["axis"] == 0


def check_one_pass(name: str, eqns: Sequence[JaxprEqn], stacked: Mapping[Var, str]) -> None:
    """Refuses layers that scan over a stack again, on the result of the first scan, which no stage could do.

    Args:
      name: Name of the model.
      eqns: Equations of the unpipelined layers.
      stacked: Maps variables of the stacks to paths.
    """
    stacks, scans = set(stacked), []
    for eqn in eqns:
        if eqn.primitive.name == "scan":
            inputs = eqn.invars[len(eqn.invars) - Scan(eqn).xs :]
            scans += [eqn] if stacks.intersection(variables(inputs)) else []
        elif (eqn.primitive.name == "reshape" or eqn.primitive.name in KEEP_LAYERS) and stacks.intersection(
            variables(eqn.invars)
        ):
            stacks |= set(eqn.outvars)  # the cast of a stack is a stack
    for i, eqn in enumerate(scans):
        dependents = after(eqns, eqn.outvars)
        if any(dependents.intersection(variables(later.invars)) for later in scans[i + 1 :]):
            raise refuse(
                f"the layers of {name} go through a stack, and then through one again",
                rule="a stage runs its layers once, one after the other, and hands on what they made",
                fix="one scan over layers that have both, or jp.pipelined(layers, x) around one stack and the other "
                "before or after it",
            )
