"""Layers that are run in one pass: each stage runs its own once, and hands on what it made.

one pass      scan over layers 0 ... 11
two passes    scan over layers 0 ... 11, then another over its result: a stage would run 0 1 2, 0 1 2, and hand on
"""

from jaxpar.errors import refuse
from jaxpar.pipeline.jaxprs.dataflow import Scan, Traced, after, variables
from jaxpar.pipeline.jaxprs.shorten import KEEP_LAYERS


def check_one_pass(name: str, layers: Traced, stacked: list[bool]) -> None:
    """Refuses layers that go through the stack again with what they made of it, which no stage could.

    Args:
      name: The model's.
      layers: The layers as one device runs them.
      stacked: Which of their inputs are stacks.
    """
    jaxpr = layers.flat.jaxpr
    stacks = {var for var, yes in zip(jaxpr.invars, stacked, strict=True) if yes}
    over = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            inputs = eqn.invars[len(eqn.invars) - Scan(eqn).xs :]
            over += [eqn] if stacks.intersection(variables(inputs)) else []
        elif eqn.primitive.name in KEEP_LAYERS and stacks.intersection(variables(eqn.invars)):
            stacks |= set(eqn.outvars)  # a cast of a stack is one
    for i, eqn in enumerate(over):
        made = after(jaxpr.eqns, eqn.outvars)
        if any(made.intersection(variables(other.invars)) for other in over[i + 1 :]):
            raise refuse(
                f"the layers of {name} go through a stack, and then through one again",
                rule="a stage runs its layers once, one after the other, and hands on what they made",
                fix="one scan over layers that have both, or jp.pipelined(layers, x) around one stack and the other "
                "before or after it",
            )
