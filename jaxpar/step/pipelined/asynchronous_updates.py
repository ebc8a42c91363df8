"""Asynchronous updates (PipeDream): during a step, each stage updates the weights that it owns.

A shared parameter belongs to the first or the last stage, whichever reads it. Other stages hold an unused copy, and
receive the owner's values at the end of the step. Schedules advance once per step: see `optim/wrappers.py`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse
from jaxpar.jaxprs.dataflow import Traced
from jaxpar.optim.wrappers import advance_schedules, pause_schedules
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.state_specs import optimizer_specs, owner_path
from jaxpar.pipeline.run.asynchronous import AsynchronousTable, plan_versions, stage_update
from jaxpar.pipeline.run.stage_buffers import slot_shapes
from jaxpar.pipeline.run.tick_program import program
from jaxpar.sharding.names import GRADIENT, SCOPE, Tree, format_path, nest, pick
from jaxpar.step.gradients import Batch, metrics
from jaxpar.step.losses import Sums
from jaxpar.step.numerics import Numerics
from jaxpar.step.pipelined.equal_layers import format_layers
from jaxpar.step.pipelined.model_state import salt_by_replica
from jaxpar.step.pipelined.shardings import Shardings, constrain_tree_in_table, table_names
from jaxpar.step.pipelined.split_model import loss_counts
from jaxpar.step.pipelined.synchronous import Pipelined
from jaxpar.step.state import State


def check_unsharded(layout: Layout) -> None:
    """Refuses to update weights that `fsdp` shards in the middle of a step."""
    if layout.sizes["fsdp"] > 1:
        raise refuse(
            f"weights={layout.parallel.pipeline.weights!r} with fsdp={layout.sizes['fsdp']}",
            rule="a stage that updates its weights during a step stores them unsharded",
            fix=f"fsdp=1 and data={layout.sizes['data'] * layout.sizes['fsdp']}, or weights='flush'",
        )


class AsyncPipelined(Pipelined):
    """Gradients of a model by a table that updates the weights during the step."""

    def __init__(self, layout: Layout, loss: Callable, numerics: Numerics, frozen: frozenset[str] = frozenset()):
        super().__init__(layout, loss, numerics, frozen)
        weights = layout.parallel.pipeline.weights
        check_unsharded(layout)
        if layout.lists:
            raise refuse(
                f"weights={weights!r} with a list of layers, {format_layers(layout)}",
                rule="where weights change in the middle of a step, the layers are stored as a stack",
                fix="layers stacked by nnx.vmap or nn.scan, or weights='flush'",
            )
        if layers := layout.parallel.pipeline.layers:
            raise refuse(
                f"weights={weights!r} with layers={tuple(layers)}",
                rule="where weights change in the middle of a step, every stage has as many layers",
                fix="layers=(), or weights='flush'",
            )
        self.plan = plan_versions(program(self.schedule), weights)
        self.updates = layout.parallel.pipeline.updates(layout.schedule)
        if layout.replicas > 1:
            self.notes = (
                "weights change between ticks, so gradients are reduced over the replicas in every one of them",
            )

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Batch, on_device: Callable[[Tree], Tree]
    ) -> tuple[State, dict[str, jax.Array]]:
        """Runs the table with all its updates; `grad_norm` is that of the last update."""
        params, opt_state, sums, model_state, norm = self._run_updates(
            optimizer, state.params, on_device(state.optimizer), state.model_state, batch
        )
        return State(state.step + 1, params, opt_state, model_state), metrics(sums, norm)

    def _run_updates(
        self, optimizer: optax.GradientTransformation, params: Tree, state: Tree, model_state: Tree, batch: Mapping
    ) -> tuple[Tree, Any, Sums, Tree, jax.Array]:
        """Runs the table; returns (params, optimizer state, sums, model state, norm of the last update's gradients)."""
        self._check_state(state)
        model_states, after = self.model_states.before_microbatches(params, model_state, batch)
        shared = {path: pick(params, words) for path, words in self.shardings.shared_keys.items()}
        layers = {path: pick(params, words) for path, words in self.shardings.stacked_keys.items()}
        # optimizer state of a stack is split with it over the stages; other state is replicated
        specs = jax.tree.map(
            lambda spec: PartitionSpec("pipe") if spec[:1] == ("pipe",) else PartitionSpec(),
            optimizer_specs(self.layout, state),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

        def local(rows, replica, shared, layers, state, model_states, batch):
            model = self.split_model.model(train=True)
            with table_names(self.shardings.layout):
                inputs = (
                    salt_by_replica(model_states, replica[0], self.shardings.replicas),
                    self.split_model.microbatches(batch),
                )
                owners = self._owners(model, shared, inputs)
                table = AsynchronousTable(
                    plan=self.plan,
                    model=model,
                    update=stage_update(pause_schedules(optimizer), self._join, self._split, self._reduce),
                    constrain=partial(constrain_tree_in_table, self.shardings.layout),
                    keep=self.layout.parallel.pipeline.keep,
                    fill=self.fill,
                )
                result = table.train(
                    rows[:, 0], (shared, layers), state, inputs, scales=self._scales(model, shared, inputs)
                )
            stage = jax.lax.axis_index("pipe")

            # every stage updated its copy of shared parameters, but only the owner has their gradients: its copy is
            # sent to all, as a sum with zeros from the others
            def copy_from_owner(path: str, value: jax.Array) -> jax.Array:
                with jax.named_scope(SCOPE + (path.replace("/", ".") or "model_state")):
                    masked = jnp.where(stage == owners.get(path, 0), value, jnp.zeros_like(value))
                    return jax.lax.psum(masked, "pipe")

            def copy_leaf(keys, spec, value):
                return (
                    value
                    if spec == PartitionSpec("pipe")
                    else copy_from_owner(_owner_path(self.shardings, keys), value)
                )

            shared, layers = result.params
            # frozen parameters are equal on all stages
            shared = {
                path: value if path in self.frozen else copy_from_owner(path, value) for path, value in shared.items()
            }
            state = jax.tree_util.tree_map_with_path(copy_leaf, specs, result.optimizer)
            sums, square = jax.tree.map(
                lambda x: jax.lax.psum(x, self.shardings.manual_axes), (result.sums, result.square)
            )
            return shared, layers, state, sums, square / self.shardings.replicas

        data_spec = PartitionSpec(self.shardings.batch_axes)
        replicated, pipe_spec = PartitionSpec(), PartitionSpec("pipe")
        shared, layers, state, sums, square = jax.shard_map(
            local,
            mesh=self.layout.device_mesh,
            axis_names=set(self.shardings.manual_axes),
            in_specs=(PartitionSpec(None, "pipe"), data_spec, replicated, pipe_spec, specs, replicated, data_spec),
            out_specs=(replicated, pipe_spec, specs, replicated, replicated),
            check_vma=False,
        )(self.plan.program.rows, jnp.arange(self.shardings.replicas), shared, layers, state, model_states, batch)
        return _tree(self.shardings, shared, layers), advance_schedules(state), sums, after, jnp.sqrt(square)

    def _check_state(self, state: Tree) -> None:
        """Refuses an optimizer whose state cannot be split like the stack, such as Adafactor's."""
        for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
            owner = owner_path(self.layout, keys)
            if (
                owner in self.shardings.stacked_keys
                and leaf.ndim
                and leaf.shape != self.layout.placements[owner].leaf.shape
            ):
                raise refuse(
                    f"an optimizer that keeps {list(leaf.shape)} for {owner}",
                    rule="where weights change in the middle of a step, what the optimizer keeps of a parameter has "
                    "its shape: each stage has its own piece",
                    fix="Adam, SGD or another of that kind, or weights='flush'",
                )

    def _join(self, shared: Mapping, chunks: Mapping) -> Tree:
        return _tree(self.shardings, shared, {path: value[0] for path, value in chunks.items()})

    def _split(self, tree: Tree) -> tuple[dict, dict]:
        shared = {path: pick(tree, words) for path, words in self.shardings.shared_keys.items()}
        return shared, {path: pick(tree, words)[None] for path, words in self.shardings.stacked_keys.items()}

    def _reduce(self, gradients: tuple[Mapping, Mapping]) -> list[dict[str, jax.Array]]:
        """Sums gradients of shared parameters and layers over replicas; those of frozen parameters are zero."""

        def reduce_leaf(path: str, x: jax.Array) -> jax.Array:
            return jnp.zeros_like(x) if path in self.frozen else jax.lax.psum(x, self.shardings.batch_axes)

        with jax.named_scope(GRADIENT):
            return [{path: reduce_leaf(path, x) for path, x in tree.items()} for tree in gradients]

    def _owners(self, model, shared: Mapping, known: Tree) -> dict[str, int]:
        microbatch = slot_shapes(known)
        embed = Traced(model.embed, shared, microbatch)
        head = Traced(lambda *args: model.head(*args)["loss"], shared, microbatch, embed.shapes[0])
        first, last = embed.reads()[0], head.reads()[0]
        for path in shared:
            if first[path] and last[path]:
                raise refuse(
                    f"{path} is read before the layers and after them",
                    rule="where weights change in the middle of a table, each belongs to one stage",
                    fix="an untied embedding, or weights='flush'",
                )
        return {path: self.schedule.stages - 1 if last[path] else 0 for path in shared}

    def _scales(self, model, shared: Mapping, known: Tree) -> jax.Array:
        """Returns 1 / (tokens of a microbatch's update over all replicas), per microbatch."""
        if (counts := loss_counts(model, shared, known, self.schedule.microbatches)) is None:
            raise refuse(
                "a loss whose count follows from what the model computes",
                rule="where weights change in the middle of a table, the first microbatch's gradient is divided by the "
                "count before the last is run",
                fix="a count that follows from the batch, or weights='flush'",
            )
        per_update = jax.lax.psum(counts, self.shardings.batch_axes).reshape(-1, self.plan.per_update).sum(1)
        scales = jnp.where(per_update == 0, 0.0, 1.0 / per_update)  # if nothing counts the gradient is 0
        return jnp.repeat(scales, self.plan.per_update)


def _tree(shardings: Shardings, shared: Mapping, layers: Mapping) -> Tree:
    stacked = {shardings.stacked_keys[path]: value for path, value in layers.items()}
    return nest({shardings.shared_keys[path]: value for path, value in shared.items()} | stacked)


def _owner_path(shardings: Shardings, keys) -> str:
    words = format_path(keys).split("/")
    return next((p for i in range(len(words)) if (p := "/".join(words[i:])) in shardings.shared_keys), "")
