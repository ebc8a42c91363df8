"""Asynchronous updates of stages of different programs: a stage updates its weights in the middle of the table.

    a tick   the branch of each device ──► messages ──► gradients summed over replicas ──► the update of each stage

`plan_versions` decides which version of the weights a cell reads, here for groups of microbatches. A stage stores the
optimizer state of its own parameters. The optax chain runs on a tree of the whole model in which the parameters of
other stages are empty arrays, so that masks and labels by path apply as usual.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxpar.jaxprs.part_programs import PartProgram
from jaxpar.optim import step_inputs
from jaxpar.pipeline.run.asynchronous import VERSIONS, VersionPlan
from jaxpar.pipeline.run.branch_table import BranchTable, Carry, MicrobatchData
from jaxpar.pipeline.run.stage import Keep
from jaxpar.pipeline.run.stage_buffers import Shapes, StageBuffers, load, store
from jaxpar.pipeline.run.stage_replicas import ReplicaSums, StageReplicas
from jaxpar.pipeline.run.tick_program import COLUMNS
from jaxpar.sharding.names import nest


@dataclass(frozen=True, eq=False)
class OptimizerArrays:
    """The arrays of an optimizer's state.

    Attributes:
      tree: Structure of the state.
      names: Name of each leaf.
      owners: Name of each array that is as large as its parameter to the path of the parameter.
      shapes: Name of each leaf to its shape.
    """

    tree: Any
    names: tuple[str, ...]
    owners: Mapping[str, str]
    shapes: Shapes

    def stage_shapes(self, params: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays of a stage's parameters."""
        return {name: self.shapes[name] for name, path in self.owners.items() if path in params}


class UpdatingBranchTable(BranchTable):
    """A table whose stages update their weights between ticks."""

    def __init__(
        self,
        plan: VersionPlan,
        replicas: StageReplicas,
        parts: Sequence[PartProgram],
        params: Shapes,
        arrays: OptimizerArrays,
        *,
        loss: int,
        keep: Keep,
    ):
        """Lays out buffers and messages.

        Args:
          plan: The versions of the weights that the cells of the table read.
          replicas: As for `BranchTable`, like the next two.
          parts: The parts.
          params: Path to the shape of every parameter.
          arrays: The arrays of the optimizer.
          loss: Index of the loss among the outs of the last part.
          keep: What a forward leaves for its backward.
        """
        super().__init__(plan.program.schedule, replicas, parts, params, loss=loss, train=True, keep=keep)
        self.plan, self.params, self.arrays = plan, params, arrays
        columns = [COLUMNS.index("version"), COLUMNS.index("update")]
        self.rows = np.concatenate([self.rows, plan.program.rows[..., columns]], axis=-1)
        updates = plan.program.rows[..., COLUMNS.index("update")] == 1
        self._replica_sums = ReplicaSums(self.buffers, replicas, updates)
        tick_columns = np.broadcast_to(self._replica_sums.columns[:, None], (*updates.shape, 2))
        self.rows = np.concatenate([self.rows, tick_columns], axis=-1)
        self.states = StageBuffers([arrays.stage_shapes(stage) for stage in self.buffers.stages])

    def run_updates(
        self,
        optimizer: optax.GradientTransformation,
        params: Sequence[jax.Array],
        states: Sequence[jax.Array],
        counts: Mapping[str, jax.Array],
        data: MicrobatchData,
        model_state: Mapping[int, jax.Array],
        *,
        scales: jax.Array,
        batch_axes: Sequence[str],
        frozen: frozenset[str],
    ) -> Carry:
        """Runs the table on one device, with all updates.

        Args:
          optimizer: The chain.
          params: The buffers of the parameters of this device's stage.
          states: The buffers of the optimizer's arrays of these parameters.
          counts: The optimizer's other leaves.
          data: As for `BranchTable.run`.
          model_state: State before the first microbatch, by index.
          scales: 1 / (tokens of its update) for each microbatch.
          batch_axes: Axes of the mesh whose devices run the same stage for other rows.
          frozen: Paths of parameters whose gradients are zero.

        Returns:
          The last carry: the sums `outs`, the `state`, the newest `weights`, the `optimizer` arrays and `counts`, and
          `square`, the sum of squares of the last update's gradients.
        """
        versions = self.plan.versions
        with jax.named_scope(VERSIONS):  # a ring buffer: version n is in slot n % versions
            history = [jnp.broadcast_to(buffer, (versions, *buffer.shape)) for buffer in params]
        carry = self._initial_carry(model_state) | {
            "history": history, "optimizer": list(states), "counts": dict(counts),
            "updates": jnp.zeros((), jnp.int32), "square": jnp.zeros((), jnp.float32),
        }  # fmt: skip

        def read_weights(carry: Carry, row: jax.Array) -> list[jax.Array]:
            with jax.named_scope(VERSIONS):
                return load(carry["history"], row[2] % versions)

        def keep_weights(gradients, newest, states, counts, square):
            return gradients, newest, states, counts, square

        branches = [self._build_update(stage, optimizer, frozen) for stage in range(self.schedule.stages)]

        def update_weights(carry: Carry, row: jax.Array) -> Carry:
            active = (row[3] == 1) & (row[0] > 0)
            newest = load(carry["history"], carry["updates"] % versions)
            stage = jnp.asarray(self.replicas.stages)[lax.axis_index("pipe")]
            gradients = self._replica_sums.add(carry["gradients"], row[4:], active, batch_axes)
            gradients, newest, states, counts, square = lax.switch(
                jnp.where(active, 1 + stage, 0), [keep_weights, *branches],
                gradients, newest, carry["optimizer"], carry["counts"], carry["square"],
            )  # fmt: skip
            count = carry["updates"] + active.astype(jnp.int32)
            with jax.named_scope(VERSIONS):
                history = store(carry["history"], newest, count % versions, active)
            return carry | {
                "gradients": gradients, "history": history, "optimizer": states, "counts": counts,
                "updates": count, "square": square,
            }  # fmt: skip

        carry = self._scan_ticks(data, carry, read_weights, update_weights, scales)
        return carry | {"weights": load(carry["history"], carry["updates"] % versions)}

    def _build_update(self, stage: int, optimizer: optax.GradientTransformation, frozen: frozenset[str]) -> Callable:
        """Returns the branch that updates the parameters of a stage, and begins its sums of gradients at zero."""

        def run(gradients, newest, states, counts, square):
            del square
            params, arrays = self.buffers.read(newest, stage), self.states.read(states, stage)
            grads = {
                path: jnp.zeros_like(params[path]) if path in frozen else value.astype(params[path].dtype)
                for path, value in self.buffers.read(gradients, stage).items()
            }
            total = jnp.asarray(
                sum(jnp.sum(jnp.square(jnp.abs(value).astype(jnp.float32))) for value in grads.values())
            )
            tree, leaves = _full_tree(self.params, params), {**self.arrays.shapes, **arrays, **counts}
            state = jax.tree.unflatten(self.arrays.tree, [_array_or_empty(leaves[name]) for name in self.arrays.names])
            updates, new_state = step_inputs.update(optimizer, _full_tree(self.params, grads), state, tree, None)
            new = _flatten(self.params, optax.apply_updates(tree, updates))
            new_arrays = dict(zip(self.arrays.names, jax.tree.leaves(new_state), strict=True))
            return (
                [jnp.zeros_like(total) for total in gradients],
                self.buffers.fill(stage, {path: new[path] for path in params}),
                self.states.fill(stage, {name: new_arrays[name] for name in arrays}),
                {name: new_arrays[name] for name in counts},
                total,
            )

        return run


def _array_or_empty(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array as it is, and an empty array for a shape."""
    return _empty(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an empty array with as many dims; zero for a scalar."""
    return jnp.zeros((0, *leaf.shape[1:]) if leaf.shape else (), leaf.dtype)


def _full_tree(shapes: Shapes, values: Mapping[str, jax.Array]) -> Any:
    """Returns the tree of all parameters, with empty arrays where there is no value."""
    return nest({tuple(path.split("/")): values.get(path, _empty(leaf)) for path, leaf in shapes.items()})


def _flatten(shapes: Shapes, tree: Any) -> dict[str, jax.Array]:
    values = {}
    for path in shapes:
        value = tree
        for word in path.split("/"):
            value = value[word]
        values[path] = value
    return values
