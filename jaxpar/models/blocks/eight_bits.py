"""A frozen matrix in 8 bits: whole numbers from -127 to 127, and what each output is multiplied by.

    W  [*inputs, *outputs]  ≈  held  [*inputs, *outputs]  int8   x   scales  [*outputs]  float32
    x @ W                   ≈  (x @ held) * scales

One scale per output commutes with the matmul, so that no matrix of floats is kept: what runs the matmul converts one
layer's whole numbers, which bfloat16 has all of, and the backward pass does so again.

The rounding is LLM.int8's for weights (Dettmers et al. 2022, arXiv:2208.07339, section 2), without its outliers; a
frozen base of fewer bits beside adapters is QLoRA's (Dettmers et al. 2023, arXiv:2305.14314), which keeps 4.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import refuse

DTYPE = jnp.dtype(jnp.int8)
STEP = np.float32(1 / 127)  # of the largest entry; -128 has no opposite. XLA makes a division by 127 a product too
Index = tuple[slice, ...]


def rounded(matrix: jax.Array, *, lead: int, inputs: int) -> tuple[jax.Array, jax.Array]:
    """Returns the whole numbers and the scales of a matrix, the largest entry of each output as 127.

    Args:
      matrix: Shape [*lead, *inputs, *outputs], floating point.
      lead: Dims of a stack.
      inputs: Dims that a matmul is over.

    Returns:
      held: Its shape, int8. Times the scales, each entry is within half of its output's scale of what it was.
      scales: Shape [*lead, *outputs], float32; 1 where all entries of an output are zero.
    """
    wide, over = matrix.astype(jnp.float32), tuple(range(lead, lead + inputs))
    most = jnp.max(jnp.abs(wide), axis=over, keepdims=True)
    scales = jnp.where(most * STEP > 0, most * STEP, 1.0)
    return jnp.round(wide / scales).astype(DTYPE), jnp.squeeze(scales, over)


def as_floats(held: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """Returns the matrix [*inputs, *outputs] of whole numbers [*inputs, *outputs] and scales [*outputs]."""
    return (held.astype(jnp.float32) * scales).astype(dtype)


def keeping(run: Callable, x: jax.Array, held: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns `run(x, held, scales)`, which is linear in x, and of which the backward pass keeps the last two alone.

    Left to itself JAX keeps `held` converted to floats: for a scan over layers all of them, as large as the base was.
    """
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)

    @jax.custom_vjp
    def kept(x, held, scales):
        return run(x, held, scales)

    def forward(x, held, scales):
        return run(x, held, scales), (held, scales)

    def backward(kept, gradient):
        (back,) = jax.linear_transpose(lambda x: run(x, *kept), like)(gradient)
        return back, None, None

    kept.defvjp(forward, backward)
    return kept(x, held, scales)


@dataclass(frozen=True, eq=False)
class Rounded:
    """A matrix that lies in files, rounded where it is indexed: one layer of a stack is read at a time.

    Attributes:
      path: What it is called, for messages.
      value: What has `shape` and is indexed by slices. Shape [*lead, *inputs, *outputs].
      lead: Dims of a stack.
      inputs: Dims that a matmul is over.
      known: Scales that have been found, by layer and outputs.
    """

    path: str
    value: Any
    lead: int
    inputs: int
    known: dict[str, np.ndarray] = field(default_factory=dict)

    def held(self, index: Index) -> np.ndarray:
        """Returns a part of the whole numbers, int8."""
        ranges = [range(*each.indices(size)) for each, size in zip(index, self.value.shape, strict=True)]
        part = np.empty([len(each) for each in ranges], np.int8)
        for at in product(*map(enumerate, ranges[: self.lead])):
            layer = tuple(slice(i, i + 1) for _, i in at)
            scales = self._scales(layer, index[self.lead + self.inputs :])
            read = np.asarray(self.value[(*layer, *index[self.lead :])], np.float32)
            part[tuple(slice(to, to + 1) for to, _ in at)] = np.rint(read / scales)
        return part

    def scales(self, index: Index) -> np.ndarray:
        """Returns a part of the scales, float32; `index` is of their dims."""
        ranges = [range(*each.indices(size)) for each, size in zip(index, self.value.shape, strict=False)][: self.lead]
        layers = [tuple(slice(i, i + 1) for i in at) for at in product(*ranges)]
        over = tuple(range(self.lead, self.lead + self.inputs))
        found = [np.squeeze(self._scales(layer, index[self.lead :]), over) for layer in layers]
        outputs = found[0].shape[self.lead :]
        return np.stack(found).reshape(*map(len, ranges), *outputs)

    def _scales(self, layer: Index, outputs: Index) -> np.ndarray:
        """Returns the scales of some outputs of one layer, with dims of 1 for the stack and the inputs."""
        key = str((layer, outputs))
        if key not in self.known:
            read = np.asarray(self.value[(*layer, *(slice(None),) * self.inputs, *outputs)], np.float32)
            most = np.abs(read).max(axis=tuple(range(self.lead, self.lead + self.inputs)), keepdims=True)
            if not np.isfinite(most).all():
                raise refuse(
                    f"{self.path} has entries that are not finite",
                    rule="a matrix that is kept in 8 bits is finite: its largest entry is 127",
                    fix='adapters without base = "int8", or a checkpoint that is sound',
                )
            scales = most * STEP
            self.known[key] = np.where(scales > 0, scales, np.float32(1))
        return self.known[key]
