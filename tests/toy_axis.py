"""An axis of a mesh that jaxpar knows nothing of, with what it needs to be trained and planned, in one file.

toy    splits dims called wide, and its devices see other examples: each gathers the arrays that it splits, once
       for all of a microbatch, and scatters their gradients
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.mesh.axes import Axis
from jaxpar.mesh.collective import Collective
from jaxpar.parallel.techniques.base import Technique, unsplit_axis_problems
from jaxpar.plan.causes import Style
from jaxpar.plan.techniques import base as plan

AXIS = Axis(name="toy", meaning="splits the dim called wide, sees other examples", splits=("wide",), splits_batch=True)
TECHNIQUE = Technique(axis="toy", idle=lambda layout: unsplit_axis_problems(layout, "toy", "named wide"))


def step(model, candidate, software):
    for kind, size in (("all-gather", software.wire[0]), ("reduce-scatter", software.wire[1])):
        travels = Collective(
            kind=kind, axes=("toy",), dtype="f32", group=candidate.size("toy"), times=candidate.microbatches,
            payload=size * model.parameters_by_dim.get("wide", 0), backward=kind == "reduce-scatter",
        )  # fmt: skip
        yield plan.SentCollective(collective=travels)


def gathered(model, candidate, software, recipe):
    used = np.greater(candidate.size("toy"), 1)
    return {"toy": np.where(used, software.wire[0] * model.parameters_by_dim.get("wide", 0), 0.0)}


TWIN = plan.PlanTechnique(
    axis="toy", step=step, bytes=gathered, cause="toy",
    styles={"toy": Style(letter="Y", shade=160, light="#aa3377", dark="#dd77aa")},
)  # fmt: skip


class Wide(nnx.Module):
    """Two matrices that share a dim called wide."""

    def __init__(self, dim=256, wide=1024, name="wide", *, rngs):
        split = nnx.with_partitioning(nnx.initializers.normal(0.3), (None, name))
        back = nnx.with_partitioning(nnx.initializers.normal(0.3), (name, None))
        self.up = nnx.Linear(dim, wide, kernel_init=split, rngs=rngs)
        self.down = nnx.Linear(wide, dim, kernel_init=back, rngs=rngs)

    def __call__(self, x):
        """Returns the same shape."""
        return self.down(nnx.tanh(self.up(x)))


def loss(model, batch):
    """Returns the sum of squared errors of copying what comes in, and how many numbers that are."""
    error = (model(batch["x"]) - batch["x"]) ** 2
    return jnp.sum(error), error.size


class Examples:
    """Rows drawn by chance."""

    def batch(self, step, size):
        """Returns so many of a step."""
        return {"x": np.random.default_rng(step).normal(size=(size, 256)).astype(np.float32)}


examples = Examples()
JOB = """
[model]
name = "toy_axis:Wide"
[data]
source = "toy_axis:examples"
[train]
loss = "toy_axis:loss"
global_batch = 1024
"""
