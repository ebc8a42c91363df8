"""Gradients of a model whose stages are different programs: any list of callables in `jp.pipelined`, cut into stages.

    params ─► cast ─► sent to the stages that read them ─► the table: a branch for each part ─► sums ─► sent back
                      └────────────────────── once per step ───────────────────────────────────────┘

The model's parts come from tracing its loss: part 0 begins before `jp.pipelined`, and the last part ends with the loss.
All axes of the mesh are manual while the table runs. See `jaxpar.pipeline.run.branch_table`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse
from jaxpar.jaxprs.dataflow import Traced
from jaxpar.jaxprs.lookups import demote_matmuls
from jaxpar.models.stack import SequentialLayers, call_at_layers, intercept_layers
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.specs import update_specs
from jaxpar.pipeline.run.branch_table import BranchTable, Part
from jaxpar.pipeline.run.shard_exchange import ShardExchange
from jaxpar.sharding.names import GRADIENT, SCOPE, Compute, Tree, by_path, nest
from jaxpar.step.gradients import Gradients, apply_gradients
from jaxpar.step.losses import Sums, as_sums
from jaxpar.step.numerics import Numerics
from jaxpar.step.parameters.frozen import zero_frozen
from jaxpar.step.parameters.overwritten import check_overwritten, divide_by_count
from jaxpar.step.pipelined.model_state import ModelStates, salt_by_replica
from jaxpar.step.pipelined.shardings import Shardings
from jaxpar.step.pipelined.split_model import SplitModel
from jaxpar.step.state import State

MANUAL = ("pipe", "data", "fsdp")


@dataclass(frozen=True, eq=False)
class ModelParts:
    """The parts of a model and its loss, as functions of (parameters, (model state, batch), x).

    Attributes:
      layout: A layout whose pipeline has numbers of pieces for its stages.
      loss: (model, batch) to (sum, count), or to a dict of them with the entry `loss`.
      compute: Training or evaluation, dtype, and rematerialization policy.
      cast: Casts a parameter to the dtype of matmuls.
    """

    layout: Layout
    loss: Callable
    compute: Compute
    cast: Callable[[jax.Array], jax.Array]

    def parts(self) -> list[Part]:
        """Returns the parts in order of depth."""
        ends = [*accumulate(self.layout.parallel.pipeline.stages)]
        starts = [0, *ends[:-1]]
        return [partial(self._run, start, end) for start, end in zip(starts, ends, strict=True)]

    def _run(self, start: int, end: int, params: Mapping[str, jax.Array], known: tuple[Tree, Tree], x: Tree) -> Tree:
        (model_state, batch), count = known, sum(self.layout.parallel.pipeline.stages)
        blueprint = self.layout.blueprint
        # a part reads none of the others: XLA drops these zeros
        others = {
            path: jnp.zeros(place.leaf.shape, place.leaf.dtype)
            for path, place in self.layout.placements.items()
            if path not in params
        }
        tree = nest({tuple(path.split("/")): value for path, value in {**params, **others}.items()})
        model = blueprint.bind(tree, model_state, lambda path, value: self.cast(value), self.compute)

        def pieces(layers, own, per_layer):
            _check_pieces(blueprint.name, layers, per_layer, count)
            y = own
            for piece in layers.layers[:start]:  # dropped by XLA: it draws the random keys that come before this part's
                y = piece(y)
            y = x if start else own
            for piece in layers.layers[start:end]:
                y = piece(y)
            return y

        if end < count:
            return call_at_layers(lambda: self.loss(model, batch), pieces)
        with intercept_layers(pieces):
            return as_sums(self.loss(model, batch), accumulate=self.layout.microbatches)


class UnequalStages(Gradients):
    """Gradients of a model and its loss by a table whose parts are different programs.

    Attributes:
      shardings: Shardings of the step's arrays.
      model_states: Computes the model state before each microbatch.
      frozen: Paths of parameters whose gradients the optimizer does not read: these gradients are zero.
    """

    def __init__(self, layout: Layout, loss: Callable, numerics: Numerics, frozen: frozenset[str] = frozenset()):
        check_overwritten(layout)
        _check_layout(layout)
        self.layout, self.loss, self.numerics, self.frozen = layout, loss, numerics, frozen
        self.shardings = Shardings(layout, numerics.dtype)
        self.model_states = ModelStates(self.shardings, layout, loss, numerics, equal_layers=False)
        self._split = SplitModel(self.shardings, loss, numerics)

    def gradients(self, params: Tree, model_state: Tree, batch: Mapping[str, jax.Array]) -> tuple[Tree, Sums, Tree]:
        """Returns the gradients of the mean loss over all microbatches, the loss sums, and the new model state."""
        model_states, after = self.model_states.before_microbatches(params, model_state, batch)
        sums, gradients = self._run(params, model_states, batch, train=True)
        gradients = divide_by_count(gradients, sums["loss"][1], params)
        return zero_frozen(self.frozen, self.layout, gradients), sums, after

    def update(
        self, optimizer: optax.GradientTransformation, state: State, batch: Mapping[str, jax.Array], on_device: Callable
    ) -> tuple[State, dict[str, jax.Array]]:
        """Updates the parameters once, by the gradients of the batch."""
        results = self.gradients(state.params, state.model_state, batch)
        return apply_gradients(self.layout, optimizer, state, results, on_device)

    def evaluate(self, params: Tree, model_state: Tree, batch: Mapping[str, jax.Array]) -> Sums:
        """Returns the loss sums of a batch; runs only the table's forwards."""
        count = self.layout.microbatches
        model_states = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), model_state)
        return self._run(params, model_states, batch, train=False)[0]

    def _run(self, params: Tree, model_states: Tree, batch: Mapping[str, jax.Array], *, train: bool):
        shardings, layout = self.shardings, self.layout
        compute = Compute(train=train, dtype=shardings.dtype, remat=self.numerics.remat)
        parts = ModelParts(layout, self.loss, compute, shardings.cast).parts()
        parts = [demote_matmuls(part) for part in parts] if compute.dtype else parts
        stored = {path: shardings.cast(value) for path, value in by_path(params).items()}
        specs = {path: _manual(place.stored) for path, place in layout.placements.items()}
        rows = PartitionSpec(shardings.batch_axes)

        def local(replica, params, model_states, batch):
            with shardings.table_names():
                known = salt_by_replica(model_states, replica[0], shardings.replicas), self._split.microbatches(batch)
                table = self._table(parts, stored, known, train=train)
                exchange = ShardExchange(table.buffers, specs, layout.sizes)
                with jax.named_scope(f"{SCOPE}parameters sent to the stages"):
                    buffers = exchange.to_stages(params)
                sums, gradients = table.run(jnp.asarray(table.rows)[:, jax.lax.axis_index("pipe")], buffers, known)
            sums = jax.tree.map(lambda x: jax.lax.psum(x, ("pipe", *shardings.batch_axes)), sums)
            if not train:
                return sums, {}
            with jax.named_scope(GRADIENT):
                found = exchange.to_storage(gradients, shardings.batch_axes)
            return sums, {path: found.get(path, jnp.zeros_like(value, jnp.float32)) for path, value in params.items()}

        sums, gradients = jax.shard_map(
            local,
            mesh=layout.device_mesh,
            axis_names=set(layout.sizes),
            in_specs=(rows, specs, PartitionSpec(), rows),
            out_specs=(PartitionSpec(), specs if train else {}),
            check_vma=False,
        )(jnp.arange(shardings.replicas), stored, model_states, batch)
        if not train:
            return sums, {}
        gradients = nest({tuple(path.split("/")): value for path, value in gradients.items()})
        return sums, jax.tree.map(shardings.constrain, gradients, update_specs(layout))

    def _table(self, parts: list[Part], params: Mapping[str, jax.Array], known: Tree, *, train: bool) -> BranchTable:
        """Traces the parts for one microbatch of one device, with the parameters that each reads."""
        whole = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in params.items()}
        microbatch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), known)
        reads, x = [], ()
        for part in parts:
            traced = Traced(part, whole, microbatch, x)
            reads.append({path: whole[path] for path, read in traced.reads()[0].items() if read})
            x = traced.shapes
        return BranchTable(self.layout.schedule, parts, reads, microbatch, train=train)


def _manual(spec: PartitionSpec) -> PartitionSpec:
    """Returns the part of a spec that is over axes of `MANUAL`."""
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return PartitionSpec(*(tuple(axis for axis in axes if axis in MANUAL) or None for axes in entries))


def _check_layout(layout: Layout) -> None:
    """Refuses axes and parameters that parts of different programs do not run with."""
    other = {axis: size for axis, size in layout.sizes.items() if size > 1 and axis not in MANUAL}
    stages = tuple(layout.parallel.pipeline.stages)
    if other:
        axis, size = next(iter(other.items()))
        raise refuse(
            f"pipeline.stages={stages} with {axis}={size}",
            rule=f"stages of different programs run over {', '.join(MANUAL)}: a collective over {axis} inside of one "
            "would wait for stages that run another",
            fix=f"{axis}=1, and fsdp={layout.sizes['fsdp'] * size}",
        )
    if layout.blueprint.adapters:
        raise refuse(
            f"adapters with pipeline.stages={stages}",
            rule="a stage of different programs has gradients of all parameters that it reads",
            fix="pipe=1, or equal layers in one stack",
        )
    if short := [path for path, place in layout.placements.items() if place.leaf.dtype == jnp.float16]:
        raise refuse(
            f"{short[0]} in float16 with pipeline.stages={stages}",
            rule="stages make gradients of the summed loss, which float16 may not hold",
            fix="parameters in bfloat16 or float32, or pipe=1",
        )


def _check_pieces(name: str, layers: Callable, per_layer: tuple, count: int) -> None:
    given = len(layers.layers) if isinstance(layers, SequentialLayers) else 0
    if given != count or per_layer:
        got = f"{given} pieces" if given else "a function"
        raise refuse(
            f"{name} gives jp.pipelined {got}{' and values per layer' if per_layer else ''}, and pipeline.stages cuts "
            f"{count}",
            rule="pipeline.stages has the number of pieces of each stage, in a list that jp.pipelined(pieces, x) runs",
            fix=f"numbers that sum to {given}" if given and not per_layer else "x = jp.pipelined([piece, ...], x)",
        )
