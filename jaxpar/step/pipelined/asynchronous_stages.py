"""Asynchronous updates (PipeDream) of stages of different programs: see `pipeline/run/branch_updates.py`.

params, optimizer ─► sent to the stages ─► the table, with an update in the middle of it ─► sent back
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse
from jaxpar.jaxprs.dataflow import needed_equations, subfunction
from jaxpar.optim.wrappers import advance_schedules, pause_schedules
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.state_specs import optimizer_specs, owner_path
from jaxpar.pipeline.run.asynchronous import plan_versions
from jaxpar.pipeline.run.branch_updates import OptimizerArrays, UpdatingBranchTable
from jaxpar.pipeline.run.shard_exchange import ShardExchange, sum_dtype
from jaxpar.pipeline.run.stage_replicas import StageReplicas
from jaxpar.pipeline.run.tick_program import program
from jaxpar.sharding.names import SCOPE, Tree, format_path, leaves_by_path, nest
from jaxpar.step.gradients import Batch, metrics
from jaxpar.step.numerics import Numerics
from jaxpar.step.pipelined.asynchronous_updates import check_unsharded
from jaxpar.step.pipelined.shardings import table_names
from jaxpar.step.pipelined.unequal_stages import TracedMicrobatch, UnequalStages, manual_spec
from jaxpar.step.state import State


class AsyncUnequalStages(UnequalStages):
    """Gradients of a model by a table whose parts are different programs, and which updates the weights."""

    def __init__(self, layout: Layout, loss: Callable, numerics: Numerics, frozen: frozenset[str] = frozenset()):
        super().__init__(layout, loss, numerics, frozen)
        check_unsharded(layout)
        self.plan = plan_versions(program(layout.schedule), layout.parallel.pipeline.weights)
        self.updates = layout.parallel.pipeline.updates(layout.schedule)

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Batch, on_device: Callable[[Tree], Tree]
    ) -> tuple[State, dict[str, jax.Array]]:
        """Runs the table with all its updates; `grad_norm` is that of the last update."""
        layout, shardings = self.layout, self.shardings
        opt_state = on_device(state.optimizer)
        arrays = self._arrays(opt_state)
        leaves = dict(zip(arrays.names, jax.tree.leaves(opt_state), strict=True))
        of_state = dict(
            zip(arrays.names, jax.tree.leaves(optimizer_specs(layout, opt_state), is_leaf=_is_spec), strict=True)
        )
        stored = dict(sorted(leaves_by_path(state.params).items()))
        specs = {path: manual_spec(layout.placements[path].stored) for path in stored}
        array_specs = {name: manual_spec(of_state[name]) for name in arrays.owners}
        owned = {name: leaves[name] for name in arrays.owners}
        counts = {name: leaf for name, leaf in leaves.items() if name not in owned}
        by_rows, whole = PartitionSpec(shardings.batch_axes), PartitionSpec()

        def local(replica, params, owned, counts, model_state, batch):
            with table_names(layout):
                traced = self._trace(stored, model_state, batch, replica[0], train=True)
                stage_replicas, parts = self._cut_parts(traced.pieces, train=True)
                shapes = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in stored.items()}
                table = UpdatingBranchTable(
                    self.plan, stage_replicas, parts, shapes, arrays, loss=traced.pieces.loss,
                    keep=layout.parallel.pipeline.keep,
                )  # fmt: skip
                self._check_owners(table)
                self._write_note(table, stored, self.plan.versions)
                exchange = ShardExchange(table.buffers, stage_replicas, specs, layout.sizes)
                of_optimizer = ShardExchange(table.states, stage_replicas, array_specs, layout.sizes)
                with jax.named_scope(f"{SCOPE}parameters sent to the stages"):
                    buffers, states = exchange.send_params(params), of_optimizer.send_params(owned)
                result = table.run_updates(
                    pause_schedules(optimizer), buffers, states, counts, traced.data, traced.table_state,
                    scales=self._scales(traced, stage_replicas), frozen=self.frozen,
                    batch_axes=[axis for axis in shardings.batch_axes if layout.sizes[axis] > 1],
                )  # fmt: skip
            first = jnp.asarray(stage_replicas.replica_numbers)[jax.lax.axis_index("pipe")] == 0

            def back(exchange, buffers, before):
                # replicas have equal values: the first of each stage sends
                values = [
                    jnp.where(first, value, jnp.zeros_like(value)).astype(sum_dtype(value.dtype)) for value in buffers
                ]
                found = exchange.send_gradients(values, ())
                return {
                    name: found[name].astype(value.dtype) if name in found else value for name, value in before.items()
                }

            sums = jax.tree.unflatten(traced.pieces.sums, result["outs"])
            sums = jax.tree.map(lambda x: jax.lax.psum(x, ("pipe", *shardings.batch_axes)), sums)
            share = jnp.asarray(stage_replicas.counts)[jnp.asarray(stage_replicas.stages)[jax.lax.axis_index("pipe")]]
            square = jax.lax.psum(result["square"] / share, "pipe")
            new_state = traced.final_state(table.mean_state(result["state"], shardings.batch_axes))
            params = back(exchange, result["weights"], params)
            return params, back(of_optimizer, result["optimizer"], owned), result["counts"], new_state, sums, square

        params, owned, counts, model_state, sums, square = jax.shard_map(
            local,
            mesh=layout.device_mesh,
            axis_names=set(shardings.manual_axes),
            in_specs=(by_rows, specs, array_specs, whole, whole, by_rows),
            out_specs=(specs, array_specs, whole, whole, whole, whole),
            check_vma=False,
        )(jnp.arange(shardings.replicas), stored, owned, counts, state.model_state, batch)
        leaves = owned | counts
        opt_state = jax.tree.unflatten(arrays.tree, [leaves[name] for name in arrays.names])
        params = nest({tuple(path.split("/")): value for path, value in params.items()})
        model_state = jax.tree.unflatten(jax.tree.structure(state.model_state), model_state)
        new = State(state.step + 1, params, advance_schedules(opt_state), model_state)
        return new, metrics(sums, jnp.sqrt(square))

    def _arrays(self, state: Tree) -> OptimizerArrays:
        """Returns the arrays of an optimizer's state.

        Raises:
          JaxparError: If one belongs to a parameter and has another shape, such as Adafactor's.
        """
        leaves, tree = jax.tree_util.tree_flatten_with_path(state)
        names, owners = [], {}
        for number, (keys, leaf) in enumerate(leaves):
            name, owner = f"{number} {format_path(keys)}", owner_path(self.layout, keys)
            names.append(name)
            if owner and leaf.shape == self.layout.placements[owner].leaf.shape:
                owners[name] = owner
            elif leaf.ndim:
                raise refuse(
                    f"an optimizer that keeps {list(leaf.shape)} for {owner or 'the model'}",
                    rule="where weights change in the middle of a step, what the optimizer keeps of a parameter has "
                    "its shape: each stage has its own piece",
                    fix="Adam, SGD or another of that kind, or weights='flush'",
                )
        shapes = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, (_, leaf) in zip(names, leaves, strict=True)
        }
        return OptimizerArrays(tree, tuple(names), owners, shapes)

    def _check_owners(self, table: UpdatingBranchTable) -> None:
        readers: dict[str, int] = {}
        for stage, params in enumerate(table.buffers.stages):
            for path in params:
                if path in readers:
                    raise refuse(
                        f"{path} is read by stages {readers[path]} and {stage}",
                        rule="where weights change in the middle of a table, each belongs to one stage",
                        fix="stages that read it together, or weights='flush'",
                    )
                readers[path] = stage

    def _scales(self, traced: TracedMicrobatch, replicas: StageReplicas) -> jax.Array:
        """Returns 1 / (tokens of a microbatch's update over all replicas), per microbatch."""
        pieces, layout = traced.pieces, self.layout
        count = pieces.outs[jax.tree.unflatten(pieces.sums, range(len(pieces.outs)))["loss"][1]]
        cut = pieces.jaxpr_cut(train=True)
        eqns, reads = needed_equations(pieces.jaxpr.jaxpr.eqns, [count])
        if reads & {*cut.inputs.params, *cut.inputs.state}:
            raise refuse(
                "a loss whose count follows from what the model computes",
                rule="where weights change in the middle of a table, the first microbatch's gradient is divided by the "
                "count before the last is run",
                fix="a count that follows from the batch, or weights='flush'",
            )
        of_data = subfunction(pieces.jaxpr.jaxpr, pieces.jaxpr.consts, cut.inputs.data, eqns, [count])
        counts = jax.lax.map(
            lambda i: jnp.asarray(of_data(*traced.data(i))[0], jnp.float32), jnp.arange(layout.microbatches)
        )
        per_update = self.plan.per_update * replicas.group
        totals = jax.lax.psum(counts, self.shardings.batch_axes).reshape(-1, per_update).sum(1)
        return jnp.repeat(jnp.where(totals == 0, 0.0, 1.0 / totals), per_update)  # if nothing counts the gradient is 0


def _is_spec(value: object) -> bool:
    return isinstance(value, PartitionSpec)
