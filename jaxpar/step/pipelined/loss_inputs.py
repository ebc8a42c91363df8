"""The arrays that a loss reads of the layers of a pipeline: x alone.

    embed ──► x ──► layers ──► x ──► head and loss      the last stage of a pipeline has x, and runs no other layers
                       └──► sown sums, hidden states, parameters      one device has them too, so that a loss reads them

The whole loss is traced once, with the layers in it. x is marked in that trace before the layers and after them: what
the sums follow from, back to the second mark, is what the head computes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpar.errors import JaxparError, refuse
from jaxpar.hlo.attribution import equation_frame
from jaxpar.pipeline.jaxprs.dataflow import needed, shapes
from jaxpar.sharding.names import Tree
from jaxpar.step.pipelined.layer_keys import makes_keys

BEFORE, AFTER = "pipelined: x before the layers", "pipelined: x after the layers"


def mark(x: Tree, name: str) -> Tree:
    """Returns x, its arrays named in the trace."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), x)


class MarkedLoss:
    """A loss as a jaxpr, in which x is marked before the layers and after them."""

    def __init__(self, name: str, jaxpr: Jaxpr, sums: Sequence[Any]):
        """Finds the layers.

        Args:
          name: The model's.
          jaxpr: Of the whole loss.
          sums: Variables of its sums and counts.

        Raises:
          JaxparError: If the layers are not among the equations of the jaxpr itself.
        """
        self.name, self.eqns, self.sums = name, jaxpr.eqns, sums
        places = {which: [i for i, eqn in enumerate(self.eqns) if _is_mark(eqn, which)] for which in (BEFORE, AFTER)}
        if not all(places.values()):
            raise refuse(
                f"{name} calls jp.pipelined inside of a loop, a branch or a derivative",
                rule="a pipeline cuts a model where it calls jp.pipelined(layers, x), outside of all of these",
                fix="the loop, branch or derivative inside of the layers, or pipe=1",
            )
        self.before, self.after = ([self.eqns[i] for i in places[which]] for which in (BEFORE, AFTER))
        self.first, self.last = places[BEFORE][-1], places[AFTER][0]

    def layers(self) -> list[JaxprEqn]:
        """Returns the equations that make the output of the layers, from x and from what they enclose."""
        eqns = [eqn for eqn in self.eqns[: self.last] if not _is_mark(eqn, BEFORE)]
        return needed(eqns, (var for eqn in self.after for var in eqn.invars))[0]

    def check(self, params: Mapping[Var, str]) -> None:
        """Refuses a loss or an embedding that reads arrays of the layers which a stage does not have.

        Args:
          params: Variables of the parameters of the layers, to their paths.
        """
        inside = {id(eqn) for eqn in self.eqns[self.first + 1 : self.last]}
        # keys are left out: they follow from how many were drawn before, and a stage has others
        head, reads = needed([e for e in self.eqns if not _is_mark(e, AFTER) and not makes_keys(e)], self.sums)
        of_layers = [eqn for eqn in head if id(eqn) in inside]
        if of_layers:
            raise _beside_x(self.name, head, of_layers[-1])
        _, embedded = needed(self.eqns[: self.first + 1], (var for eqn in self.before for var in eqn.invars))
        for var, path in params.items():
            if var in reads or var in embedded:
                raise _outside(self.name, path)


def _is_mark(eqn: JaxprEqn, name: str) -> bool:
    return eqn.primitive.name == "name" and eqn.params.get("name") == name


def _beside_x(name: str, head: Sequence[JaxprEqn], eqn: JaxprEqn) -> JaxparError:
    """Returns the refusal of a loss that reads the results of an equation of the layers."""
    read = {var for each in head for var in each.invars if not isinstance(var, Literal)}
    shown = ", ".join(f"{each.dtype}{list(each.shape)}" for each in shapes(var for var in eqn.outvars if var in read))
    return refuse(
        f"the loss of {name} reads {shown} that its layers make beside x, {_line(eqn)}",
        rule="the layers of a pipeline return x and nothing else: what they sow, append to a list or set as an "
        "attribute stays on their stage",
        fix="x may be a tree, and an auxiliary loss rides along in it: x, aux = jp.pipelined(layers, (x, "
        "jnp.zeros(()))), with layers that return (x, aux + their own); or pipe=1",
    )


def _outside(name: str, path: str) -> JaxparError:
    """Returns the refusal of a parameter of the layers that is read before them or after them."""
    return refuse(
        f"{name} or its loss reads {path} outside of its layers",
        rule="parameters of layers are read inside of them, on the stage that runs them: a stage has nothing else, so "
        "that none can add up those of all layers",
        fix="for a penalty on parameters the optimizer's: optax.add_decayed_weights(rate) in its chain, or adamw(..., "
        "weight_decay=rate); or a sum that goes through x, to which each layer adds its own: x, penalty = "
        "jp.pipelined(layers, (x, jnp.zeros(()))). Another use of it goes into the layers of jp.pipelined(layers, x)",
    )


def _line(eqn: JaxprEqn) -> str:
    """Returns the line of the user's code that made an equation: `in __call__, net.py:12`."""
    frame = equation_frame(eqn)
    if frame is None:
        return f"by `{eqn.primitive.name}`"
    return f"in {frame.function.rpartition('<locals>.')[2]}, {Path(frame.file).name}:{frame.line}"
