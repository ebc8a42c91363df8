"""Functions of one part of a model: its forward, and the gradients of its messages, or of the loss in the last part.

    forward       params, inputs              ─►  messages to later parts, residuals
    backward      params, inputs, residuals   ─►  gradients of the parameters and of the messages received
                  without residuals: recomputes the forward

The inputs of a part are (data, state, messages received). Floating-point leaves of messages have gradients.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxpar.jaxprs.dataflow import shapes
from jaxpar.jaxprs.part_programs import PartProgram
from jaxpar.jaxprs.split_backward import Halves, halves
from jaxpar.pipeline.run.stage_buffers import load
from jaxpar.sharding.names import AGAIN, BACKWARD, Tree, is_float


class PartFunctions:
    """The functions of a part. Parameters are dicts by index.

    Args:
      program: The part.
      params: Shapes of its parameters.
      keep_residuals: Whether its forward leaves residuals for its backward.

    Attributes:
      targets: Parts that send gradients to this one.
      halves: Its forward and backward if it keeps residuals, else None.
    """

    def __init__(self, program: PartProgram, params: Mapping[int, jax.ShapeDtypeStruct], *, keep_residuals: bool):
        self.program = program
        self.targets = [target for target, variables in program.sends.items() if floats(shapes(variables))]
        self.halves = self._trace_halves(params) if keep_residuals else None

    def _trace_halves(self, params: Mapping[int, jax.ShapeDtypeStruct]) -> Halves:
        inputs = self.program.inputs
        received = {source: shapes(variables) for source, variables in self.program.receives.items()}
        state = {i: shapes([inputs.state[i]])[0] for i in self.program.reads_state}
        input_shapes = shapes(inputs.data), state, received
        return halves(self._float_messages, params, input_shapes, floats(received), split=False, whole=True)

    def _float_messages(self, params: Tree, inputs: tuple, values: Sequence[jax.Array]) -> list:
        """Returns the floating-point values that the part sends to each of `targets`.

        Args:
          params: The parameters.
          inputs: The inputs.
          values: The floating-point leaves of what it received.
        """
        data, state, x = inputs
        sent, _, _ = self.program.run(params, data, state, _replace_floats(x, values))
        return [floats(sent[target]) for target in self.targets]

    def forward(self, params: Tree, inputs: tuple) -> tuple[dict, list, dict, list | None]:
        """Returns the messages, outs and new state as `PartProgram.run` does, and the residuals or None."""
        sent, outs, state = self.program.run(params, *inputs)
        if self.halves is None:
            return sent, outs, state, None
        y, residuals = self.halves.forward(params, inputs, floats(inputs[2]))
        new = {target: _replace_floats(sent[target], leaves) for target, leaves in zip(self.targets, y, strict=True)}
        return sent | new, outs, state, residuals

    def backward(self, params: Tree, inputs: tuple, residuals: list | None, g: Tree) -> tuple[Tree, list]:
        """Returns gradients of the parameters and of the floats received, given those of the floats sent."""
        if self.halves is not None:
            with jax.named_scope(BACKWARD):
                return self.halves.backward(params, inputs, floats(inputs[2]), residuals, g)
        with jax.named_scope(AGAIN):
            _, pull = jax.vjp(lambda params, x: self._float_messages(params, inputs, x), params, floats(inputs[2]))
        with jax.named_scope(BACKWARD):
            return pull(g)

    def loss_backward(
        self, params: Tree, inputs: tuple, loss: int, scales: jax.Array | None, microbatch: jax.Array
    ) -> tuple[Tree, list, list]:
        """Returns gradients of the loss, as `backward` does, and the outs of the last part.

        Args:
          params: The parameters.
          inputs: The inputs.
          loss: Index of the loss among the outs.
          scales: The cotangent of each microbatch's loss; None for 1. Shape [microbatches].
          microbatch: Number of the microbatch.
        """

        def run(params, x):
            data, state, received = inputs
            _, outs, _ = self.program.run(params, data, state, _replace_floats(received, x))
            return outs[loss], outs

        with jax.named_scope(AGAIN):
            y, pull, outs = jax.vjp(run, params, floats(inputs[2]), has_aux=True)
        with jax.named_scope(BACKWARD):
            scale = jnp.ones_like(y) if scales is None else load(scales, microbatch).astype(y.dtype)
            return *pull(scale), outs


def floats(tree: Tree) -> list:
    """Returns the floating-point leaves, which have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def _replace_floats(tree: Tree, values: Sequence[jax.Array]) -> Tree:
    """Replaces the floating-point leaves of a tree."""
    leaves = iter(values)
    return jax.tree.map(lambda leaf: next(leaves) if is_float(leaf) else leaf, tree)
