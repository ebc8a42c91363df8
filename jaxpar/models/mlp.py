"""A multilayer perceptron: the smallest model with a pair of column- and row-sharded matrices."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.dim_names import constrain
from jaxpar.models.layers import weight
from jaxpar.models.settings.classifiers import MLPConfig


class MLP(nnx.Module):
    """Arrays to logits of classes."""

    def __init__(self, settings: MLPConfig, *, rngs: nnx.Rngs):
        s = self.settings = settings
        self.first = weight(rngs, (s.inputs, s.dim), ("inputs", "embed"), s.inputs**-0.5)
        self.up = nnx.List([weight(rngs, (s.dim, s.hidden), ("embed", "mlp"), s.dim**-0.5) for _ in range(s.layers)])
        self.down = nnx.List(
            [weight(rngs, (s.hidden, s.dim), ("mlp", "embed"), s.hidden**-0.5) for _ in range(s.layers)]
        )
        self.head = weight(rngs, (s.dim, s.classes), ("embed", "classes"), s.dim**-0.5)
        self.head_bias = nnx.Param(jnp.zeros((s.classes,)), out_sharding=("classes",))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits [batch, classes] of inputs [batch, ...]."""
        first = self.first[...]
        x = inputs.reshape(inputs.shape[0], -1).astype(first.dtype) @ first
        for up, down in zip(self.up, self.down, strict=True):
            hidden = constrain(jax.nn.relu(x @ up[...]), "batch", "mlp")
            x = x + hidden @ down[...]
        return x @ self.head[...] + self.head_bias[...]
