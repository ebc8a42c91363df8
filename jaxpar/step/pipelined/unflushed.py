"""A step without a flush: as many updates as the table makes, each by the stage that its parameters live on.

A parameter outside of the stack belongs to the first stage or to the last, by which of them reads it. The others carry
a copy along that nobody reads, and take the owner's at the end of the step. Schedules go on once a step: see `pace`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse
from jaxpar.optim.pace import advanced, standing
from jaxpar.parallel.layout import Layout
from jaxpar.pipeline.jaxprs.dataflow import Traced
from jaxpar.pipeline.run.program import program
from jaxpar.pipeline.run.unflushed import UnflushedTable, plan, updating
from jaxpar.sharding.names import GRADIENT, SCOPE, Tree, nest, path_of, pick
from jaxpar.step.gradients import Batch, metrics
from jaxpar.step.losses import Sums
from jaxpar.step.numerics import Numerics
from jaxpar.step.pipelined.counts import counts_of
from jaxpar.step.pipelined.equal_layers import layers_of
from jaxpar.step.pipelined.model_state import folded
from jaxpar.step.pipelined.run import Pipelined
from jaxpar.step.state import State


class Unflushed(Pipelined):
    """A model and its loss, run by a table that updates the weights as it goes."""

    def __init__(self, layout: Layout, loss: Callable, numerics: Numerics, frozen: frozenset[str] = frozenset()):
        super().__init__(layout, loss, numerics, frozen)
        weights = layout.parallel.pipeline.weights
        if layout.sizes["fsdp"] > 1:
            raise refuse(
                f"weights={weights!r} with fsdp={layout.sizes['fsdp']}",
                rule="a stage that updates its weights in the middle of a step holds them whole",
                fix=f"fsdp=1 and data={layout.sizes['data'] * layout.sizes['fsdp']}, or weights='flush'",
            )
        if layout.lists:
            raise refuse(
                f"weights={weights!r} with a list of layers, {layers_of(layout)}",
                rule="where weights change in the middle of a step, the layers are stored as a stack",
                fix="layers stacked by nnx.vmap or nn.scan, or weights='flush'",
            )
        if self.shardings.uneven:
            raise refuse(
                f"weights={weights!r} with layers={self.shardings.uneven}",
                rule="where weights change in the middle of a step, every stage has as many layers",
                fix="layers=(), or weights='flush'",
            )
        self.plan = plan(program(self.schedule), weights)
        self.updates = layout.updates_per_step
        if layout.replicas > 1:
            self.notes = (
                "weights change between ticks, so gradients are reduced over the replicas in every one of them",
            )

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Batch, on_device: Callable[[Any], Any]
    ) -> tuple[State, dict[str, jax.Array]]:
        """Makes as many updates as the table does; `grad_norm` is that of the last one."""
        params, kept, sums, model_state, norm = self._updated(
            optimizer, state.params, on_device(state.optimizer), state.model_state, batch
        )
        return State(state.step + 1, params, kept, model_state), metrics(sums, norm)

    def _updated(
        self, optimizer: optax.GradientTransformation, params: Tree, state: Any, model_state: Tree, batch: Mapping
    ) -> tuple[Tree, Any, Sums, Tree, jax.Array]:
        """Returns (params, optimizer state, sums, model state, norm of the last update's gradients) after a batch."""
        self._check_state(state)
        model_states, after = self.model_states.each(params, model_state, batch)
        shared = {path: pick(params, words) for path, words in self.shardings.shared.items()}
        layers = {path: pick(params, words) for path, words in self.shardings.stacked.items()}
        # what an optimizer keeps of a stack is cut with it, one piece on each stage; the rest is whole on all of them
        specs = jax.tree.map(
            lambda spec: PartitionSpec("pipe") if spec[:1] == ("pipe",) else PartitionSpec(),
            self.layout.optimizer_specs(state),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

        def local(rows, replica, shared, layers, state, model_states, batch):
            model = self.cut_model.model(train=True)
            with self.shardings.inside():
                known = (folded(model_states, replica[0], self.shardings.replicas), self.cut_model.microbatches(batch))
                owners = self._owners(model, shared, known)
                table = UnflushedTable(
                    plan=self.plan,
                    model=model,
                    update=updating(standing(optimizer), self._join, self._split, self._reduce),
                    place=self.shardings.place,
                    keep=self.layout.parallel.pipeline.keep,
                    fill=self.fill,
                )
                done = table.train(
                    rows[:, 0], (shared, layers), state, known, scales=self._scales(model, shared, known)
                )
            stage = jax.lax.axis_index("pipe")

            # every stage has updated its own copy of what is shared, but only one has its gradients: that one's is sent
            # to all, as a sum with zeros of the others
            def owned(path: str, value: jax.Array) -> jax.Array:
                with jax.named_scope(SCOPE + (path.replace("/", ".") or "model_state")):
                    mine = jnp.where(stage == owners.get(path, 0), value, jnp.zeros_like(value))
                    return jax.lax.psum(mine, "pipe")

            def settled(keys, spec, value):
                return value if spec == PartitionSpec("pipe") else owned(self._owner_path(keys), value)

            shared, layers = done.params
            # what is frozen is equal on all stages
            shared = {path: value if path in self.frozen else owned(path, value) for path, value in shared.items()}
            state = jax.tree_util.tree_map_with_path(settled, specs, done.optimizer)
            sums, square = jax.tree.map(lambda x: jax.lax.psum(x, self.shardings.manual), (done.sums, done.square))
            return shared, layers, state, sums, square / self.shardings.replicas

        each, whole, split = PartitionSpec(self.shardings.batch_axes), PartitionSpec(), PartitionSpec("pipe")
        shared, layers, state, sums, square = jax.shard_map(
            local,
            mesh=self.layout.on,
            axis_names=set(self.shardings.manual),
            in_specs=(PartitionSpec(None, "pipe"), each, whole, split, specs, whole, each),
            out_specs=(whole, split, specs, whole, whole),
            check_vma=False,
        )(self.plan.program.rows, jnp.arange(self.shardings.replicas), shared, layers, state, model_states, batch)
        return self._tree(shared, layers), advanced(state), sums, after, jnp.sqrt(square)

    def _check_state(self, state: Any) -> None:
        """Refuses an optimizer whose state for a stack cannot be cut as the stack is, such as Adafactor's."""
        for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
            owner = self.layout.owner(keys)
            if owner in self.shardings.stacked and leaf.ndim and leaf.shape != self.layout.placements[owner].leaf.shape:
                raise refuse(
                    f"an optimizer that keeps {list(leaf.shape)} for {owner}",
                    rule="where weights change in the middle of a step, what the optimizer keeps of a parameter has "
                    "its shape: each stage has its own piece",
                    fix="Adam, SGD or another of that kind, or weights='flush'",
                )

    def _tree(self, shared: Mapping, layers: Mapping) -> Tree:
        stacked = {self.shardings.stacked[path]: value for path, value in layers.items()}
        return nest({self.shardings.shared[path]: value for path, value in shared.items()} | stacked)

    def _join(self, shared: Mapping, chunks: Mapping) -> Tree:
        return self._tree(shared, {path: value[0] for path, value in chunks.items()})

    def _split(self, tree: Tree) -> tuple[dict, dict]:
        shared = {path: pick(tree, words) for path, words in self.shardings.shared.items()}
        return shared, {path: pick(tree, words)[None] for path, words in self.shardings.stacked.items()}

    def _reduce(self, gradients: tuple[Mapping, Mapping]) -> list[dict[str, jax.Array]]:
        """Returns the gradients of shared parameters and of layers, summed over replicas; frozen ones are zero."""

        def one(path: str, x: jax.Array) -> jax.Array:
            return jnp.zeros_like(x) if path in self.frozen else jax.lax.psum(x, self.shardings.batch_axes)

        with jax.named_scope(GRADIENT):
            return [{path: one(path, x) for path, x in tree.items()} for tree in gradients]

    def _owner_path(self, keys) -> str:
        words = path_of(keys).split("/")
        return next((p for i in range(len(words)) if (p := "/".join(words[i:])) in self.shardings.shared), "")

    def _owners(self, model, shared: Mapping, known: Tree) -> dict[str, int]:
        """Returns the stage that reads each shared parameter."""
        one = jax.tree.map(lambda x: x[0], known)
        embed = Traced(model.embed, shared, one)
        head = Traced(lambda *args: model.head(*args)["loss"], shared, one, embed.shapes[0])
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
        """Returns one over the tokens of the update that each microbatch belongs to, over all replicas."""
        if (counts := counts_of(model, shared, known)) is None:
            raise refuse(
                "a loss whose count follows from what the model computes",
                rule="where weights change in the middle of a table, the first microbatch's gradient is divided by the "
                "count before the last is run",
                fix="a count that follows from the batch, or weights='flush'",
            )
        per_update = jax.lax.psum(counts, self.shardings.batch_axes).reshape(-1, self.plan.per_update).sum(1)
        scales = jnp.where(per_update == 0, 0.0, 1.0 / per_update)  # where nothing counts there is no gradient
        return jnp.repeat(scales, self.plan.per_update)
