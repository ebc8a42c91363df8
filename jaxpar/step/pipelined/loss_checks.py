"""Checks in the traced loss that a pipeline may split it: layers in one pass, and a loss that reads their output alone.

    one pass      scan over layers 0 ... 11
    two passes    scan over layers 0 ... 11, then again over its result: a stage would run 0 1 2, 0 1 2

    embed ──► x ──► layers ──► x ──► head and loss      the last stage has x, and does not run earlier layers
                       └──► sown sums, hidden states, parameters      on one device a loss can read them too

The unpipelined loss is traced once, with marks on x before and after the layers; the head consists of the equations
from the second mark to the sums.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpar.errors import JaxparError, refuse
from jaxpar.hlo.source_frames import equation_frame
from jaxpar.jaxprs.dataflow import Scan, dependent_variables, needed_equations, shapes, variables
from jaxpar.jaxprs.shorter_scan import KEEP_LAYERS
from jaxpar.sharding.names import Tree
from jaxpar.step.pipelined.layer_state import makes_keys


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
                    rule="a stage has only the parameters of its own layers, so a layer may read only its own",
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
        dependents = dependent_variables(eqns, eqn.outvars)
        if any(dependents.intersection(variables(later.invars)) for later in scans[i + 1 :]):
            raise refuse(
                f"the layers of {name} go through a stack, and then through one again",
                rule="a stage runs its layers once, one after the other, and hands on what they made",
                fix="one scan over layers that have both, or jp.pipelined(layers, x) around one stack and the other "
                "before or after it",
            )


BEFORE, AFTER = "pipelined: x before the layers", "pipelined: x after the layers"


def mark(x: Tree, name: str) -> Tree:
    """Marks the arrays of x in the trace, by an identity with a name."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), x)


class MarkedLoss:
    """The jaxpr of a loss in which x is marked before and after the layers."""

    def __init__(self, name: str, jaxpr: Jaxpr, sums: Sequence[object]):
        """Finds the layers between the marks.

        Args:
          name: Name of the model.
          jaxpr: The unpipelined loss.
          sums: Variables of the loss's sums and counts.

        Raises:
          JaxparError: If the layers are not at the top level of the jaxpr.
        """
        self.name, self.eqns, self.sums = name, jaxpr.eqns, sums
        places = {mark: [i for i, eqn in enumerate(self.eqns) if _is_mark(eqn, mark)] for mark in (BEFORE, AFTER)}
        if not all(places.values()):
            raise refuse(
                f"{name} calls jp.pipelined inside of a loop, a branch or a derivative",
                rule="a pipeline cuts a model where it calls jp.pipelined(layers, x), outside of all of these",
                fix="the loop, branch or derivative inside of the layers, or pipe=1",
            )
        self.before, self.after = ([self.eqns[i] for i in places[mark]] for mark in (BEFORE, AFTER))
        self.first, self.last = places[BEFORE][-1], places[AFTER][0]

    def layers(self) -> list[JaxprEqn]:
        """Returns the equations that compute the layers' output from x and closed-over values."""
        eqns = [eqn for eqn in self.eqns[: self.last] if not _is_mark(eqn, BEFORE)]
        return needed_equations(eqns, (var for eqn in self.after for var in eqn.invars))[0]

    def check(self, params: Mapping[Var, str]) -> None:
        """Refuses a loss or an embedding that reads arrays of the layers, which its stage does not have.

        Args:
          params: Maps variables of the layers' parameters to paths.
        """
        layer_eqn_ids = {id(eqn) for eqn in self.eqns[self.first + 1 : self.last]}
        # key equations are ignored: keys depend on the number of earlier draws, which differs on a stage
        head, reads = needed_equations(
            [e for e in self.eqns if not _is_mark(e, AFTER) and not makes_keys(e)], self.sums
        )
        of_layers = [eqn for eqn in head if id(eqn) in layer_eqn_ids]
        if of_layers:
            raise _layer_output_error(self.name, head, of_layers[-1])
        _, embed_vars = needed_equations(
            self.eqns[: self.first + 1], (var for eqn in self.before for var in eqn.invars)
        )
        for var, path in params.items():
            if var in reads or var in embed_vars:
                raise _layer_parameter_error(self.name, path)


def _is_mark(eqn: JaxprEqn, name: str) -> bool:
    return eqn.primitive.name == "name" and eqn.params.get("name") == name


def _layer_output_error(name: str, head: Sequence[JaxprEqn], eqn: JaxprEqn) -> JaxparError:
    reads = {var for item in head for var in item.invars if not isinstance(var, Literal)}
    arrays = ", ".join(f"{item.dtype}{list(item.shape)}" for item in shapes(var for var in eqn.outvars if var in reads))
    return refuse(
        f"the loss of {name} reads {arrays} that its layers make beside x, {_line_text(eqn)}",
        rule="the layers of a pipeline return x and nothing else: what they sow, append to a list or set as an "
        "attribute stays on their stage",
        fix="x may be a tree, and an auxiliary loss rides along in it: x, aux = jp.pipelined(layers, (x, "
        "jnp.zeros(()))), with layers that return (x, aux + their own); or pipe=1",
    )


def _layer_parameter_error(name: str, path: str) -> JaxparError:
    return refuse(
        f"{name} or its loss reads {path} outside of its layers",
        rule="parameters of layers are read inside of them, on the stage that runs them: a stage has nothing else, so "
        "that none can add up those of all layers",
        fix="for a penalty on parameters the optimizer's: optax.add_decayed_weights(rate) in its chain, or adamw(..., "
        "weight_decay=rate); or a sum that goes through x, to which each layer adds its own: x, penalty = "
        "jp.pipelined(layers, (x, jnp.zeros(()))). Another use of it goes into the layers of jp.pipelined(layers, x)",
    )


def _line_text(eqn: JaxprEqn) -> str:
    """Names the source line of an equation: `in __call__, net.py:12`."""
    frame = equation_frame(eqn)
    if frame is None:
        return f"by `{eqn.primitive.name}`"
    return f"in {frame.function.rpartition('<locals>.')[2]}, {Path(frame.file).name}:{frame.line}"
