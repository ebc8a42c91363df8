"""Traces the parts of a model that a pipeline runs at different times, for a plan."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import jax
from jax.extend.core import Jaxpr

from jaxpar.errors import JaxparError, user_code_errors
from jaxpar.jaxprs.dataflow import Traced, shapes
from jaxpar.parallel.compose import compose
from jaxpar.parallel.declaration import Parallel, Pipeline
from jaxpar.parallel.layout import Layout, other_arrays, per_device
from jaxpar.pipeline.run.model_functions import PipelineModel
from jaxpar.pipeline.run.stage_buffers import Interleaved, slot_shapes
from jaxpar.plan.model.liveness import Estimate
from jaxpar.plan.model.stages import FEW, LayerPrograms, StageTrace, bytes_by_rows, estimate_part
from jaxpar.plan.techniques.base import divisors
from jaxpar.sharding.names import Blueprint, Compute, itemsize, shard_bytes
from jaxpar.step.gradient_kinds import make_gradients
from jaxpar.step.numerics import Numerics
from jaxpar.step.pipelined.split_model import Submodules
from jaxpar.step.pipelined.synchronous import Pipelined
from jaxpar.step.stochastic_loss import carry_key, key_parameter

PIPELINE = Pipeline(keep="residuals", head="last", schedule="1f1b_phased")  # of planned layouts


def find_stages(
    blueprint: Blueprint,
    loss: Callable,
    batch: Mapping[str, object],
    *,
    rows: float,
    devices: int,
    precision: str,
    remats: Collection[str],
) -> tuple[StageTrace | None, str]:
    """Returns the parts of a model whose equal layers a pipeline can cut; or None and the reason.

    Args:
      blueprint: The model.
      loss: A function of (model, batch), or of (model, batch, key).
      batch: Shapes and dtypes by name; the first dim is that of examples.
      rows: Examples of a device, for which fusions are chosen.
      devices: Number of devices to plan for; sizes of `pipe` divide it.
      precision: Dtype of matmuls: "fp32" or "bf16".
      remats: Remat policies to trace.
    """
    layouts, reason = _layouts(blueprint, devices)
    if not layouts:
        return None, reason
    layout = next(iter(layouts.values()))
    errors = user_code_errors(
        f"{blueprint.name} in a pipeline",
        rule="a pipeline traces the layers of a model by themselves",
        fix="change the line of the model or the loss above, or pipe=1",
    )
    try:
        with errors:
            parts = _Parts(layout, loss, batch, precision)
            parts.check()
            return parts.trace(layouts, rows, remats), ""
    except JaxparError as error:  # the plan has no layout with a pipeline, and says why
        return None, error.problems[0].got


def _layouts(blueprint: Blueprint, devices: int) -> tuple[dict[tuple[int, int], Layout], str]:
    """Returns the layouts of pipe and fsdp that compose, and the reason why the first one does not."""
    layouts, reason = {}, "a pipeline has two devices or more"
    for pipe in divisors(devices)[1:]:
        for fsdp in divisors(devices // pipe):
            parallel = Parallel(pipe=pipe, fsdp=fsdp, zero=3 if fsdp > 1 else None, pipeline=PIPELINE)
            try:
                layouts[pipe, fsdp] = compose(blueprint, parallel, pipe * fsdp)
            except JaxparError as error:
                reason = error.problems[0].got if pipe == divisors(devices)[1] and fsdp == 1 else reason
                if fsdp == 1:
                    break
    stacks = [(layout.lists, layout.stacked_paths) for layout in layouts.values()]
    same = zip(layouts.items(), stacks, strict=True)  # another list of layers may be the longest that `pipe` divides
    return {sizes: layout for (sizes, layout), stack in same if stack == stacks[0]}, reason


class _Parts:
    """The parts of a model in a pipeline, traced for any number of rows."""

    def __init__(self, layout: Layout, loss: Callable, batch: Mapping[str, Any], precision: str):
        numerics = Numerics(precision=precision)
        make_gradients(layout, loss, numerics)  # refuses what no pipeline runs
        if key_parameter(loss) is not None:
            layout, loss = carry_key(layout, loss)
        self.gradients = Pipelined(layout, loss, numerics)
        self.declared, self.shardings, self.loss, self.batch = layout, self.gradients.shardings, loss, batch
        self.layout = self.shardings.layout
        self.params, self.state = jax.eval_shape(layout.blueprint.init, jax.random.key(0))
        self.model = cache(self._model)

    def check(self) -> None:
        """Refuses models that a pipeline does not split, as a step does."""
        count = self.layout.microbatches
        batch = {name: _shape(leaf, (2 * count, *leaf.shape[1:])) for name, leaf in self.batch.items()}
        jax.eval_shape(self.gradients.model_states.before_microbatches, self.params, self.state, batch)

    @cached_property
    def span(self) -> int:
        """Number of stacked layers that each callable in `jp.pipelined` runs."""
        compute = Compute(dtype=self.shardings.dtype)
        modules = Submodules(self.shardings, self.loss, compute)
        shared = {path: self._cast(path) for path in self.shardings.shared_keys}
        jax.eval_shape(modules.embed, shared, slot_shapes(self._inputs(FEW)))
        return modules.span

    def trace(self, layouts: Mapping[tuple[int, int], Layout], rows: float, remats: Collection[str]) -> StageTrace:
        """Traces the parts, and counts the parameters of all layouts."""
        leaves = {path: self.layout.placements[path].leaf for path in self.layout.placements}
        stacked = {path: leaves[path].size for path in self.shardings.stacked_keys}
        layers = leaves[next(iter(stacked))].shape[0] // self.span
        layouts = {(pipe, fsdp): layout for (pipe, fsdp), layout in layouts.items() if layers % pipe == 0}
        total = sum(leaf.size for leaf in leaves.values())
        embedding, embedding_gradient, head = self._ends(rows)
        return StageTrace(
            layers=layers,
            layer_parameters=sum(stacked.values()) // layers,
            end_parameters=total - sum(stacked.values()),
            arrays=(len(stacked), len(leaves) - len(stacked)),
            message=bytes_by_rows(lambda n: _bytes(self.model("none", n).x)),
            batch=bytes_by_rows(lambda n: _bytes(self._inputs(n)[1])),
            embedding=embedding,
            embedding_gradient=embedding_gradient,
            head=head,
            programs={remat: self._layer(remat, rows) for remat in remats},
            shards={sizes: _stored_parameters(layout) for sizes, layout in layouts.items()},
            other_state={sizes: per_device(layout, other_arrays(layout)) for sizes, layout in layouts.items()},
            update_kernels=2 * len(self.declared.placements),
            copies=self.shardings.dtype is not None or bool(self.declared.lists),
        )

    def _model(self, remat: str, rows: int) -> PipelineModel:
        split_model = self.gradients.split_model
        parts = replace(split_model, numerics=replace(split_model.numerics, remat=remat)).model(train=True)
        shared, chunk = (
            {path: self._cast(path) for path in paths}
            for paths in (self.shardings.shared_keys, self.shardings.stacked_keys)
        )
        chunk = {path: _shape(leaf, (1, self.span, *leaf.shape[1:])) for path, leaf in chunk.items()}
        return PipelineModel(parts, self.layout.schedule, shared, chunk, self._inputs(rows), forward_only=False)

    def _cast(self, path: str) -> jax.ShapeDtypeStruct:
        leaf = self.layout.placements[path].leaf
        return jax.eval_shape(self.shardings.cast, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))

    def _inputs(self, rows: int) -> Any:
        """Returns the shapes of the model state, with a leading dim of 1, and of the batch."""
        states = jax.tree.map(lambda leaf: _shape(leaf, (1, *leaf.shape)), self.state)
        batch = {name: _shape(leaf, (rows, *leaf.shape[1:])) for name, leaf in self.batch.items()}
        slots = jax.eval_shape(lambda batch: {name: Interleaved(rows[:, None]) for name, rows in batch.items()}, batch)
        return states, slots

    def _layer(self, remat: str, rows: float) -> LayerPrograms:
        """Traces the forward and the backward of one layer."""

        def forward(count: int) -> Jaxpr:
            model = self.model(remat, count)
            return jax.make_jaxpr(model.halves.forward)(*_arguments(model.stage)).jaxpr

        def backward(count: int) -> Jaxpr:
            model = self.model(remat, count)
            return jax.make_jaxpr(model.halves.backward)(
                *_arguments(model.stage), model.halves.residuals, model.x
            ).jaxpr

        params, name = len(self.shardings.stacked_keys), self.layout.blueprint.name
        return LayerPrograms(
            forward=estimate_part(forward, rows, params=params, name=name),
            backward=estimate_part(backward, rows, params=params, gradients=(0, params), name=name),
            kept=bytes_by_rows(lambda count: _bytes(self.model(remat, count).halves.residuals)),
        )

    def _ends(self, rows: float) -> tuple[Estimate, Estimate, Estimate]:
        """Returns the estimates of the embedding, of its gradient, and of the head with its gradient."""
        return (
            self._part(lambda model: model.embed, lambda results, _: ([], results), rows),
            self._part(
                lambda model: model.embed_backward, lambda results, model: (_only_read(model.embed, results),), rows
            ),
            self._part(
                lambda model: model.head, lambda results, model: (_only_read(model.head, results[1]), results[2]), rows
            ),
        )

    def _part(
        self, part: Callable[[PipelineModel], Traced], results: Callable[[Any, PipelineModel], tuple], rows: float
    ) -> Estimate:
        """Estimates the embedding or the head, whose first result is a list of gradients."""

        def trace(count: int) -> Jaxpr:
            model = self.model("none", count)
            traced = part(model)
            return jax.make_jaxpr(lambda *args: results(traced(*args), model))(*_arguments(traced)).jaxpr

        model, name = self.model("none", FEW), self.layout.blueprint.name
        gradients = len(results(part(model).shapes, model)[0])
        params = len(self.shardings.shared_keys)
        return estimate_part(trace, rows, params=params, gradients=(0, gradients), name=name)


def _arguments(traced: Traced) -> tuple[Any, ...]:
    """Returns the shapes of the arguments of a traced function."""
    return jax.tree.unflatten(traced.inputs, shapes(traced.closed.in_avals))


def _only_read(traced: Traced, gradients: Mapping[str, object]) -> list[Any]:
    """Returns the gradients of the parameters that a part reads; all other gradients are zero and never computed."""
    return [gradients[path] for path, is_read in traced.reads()[0].items() if is_read]


def _stored_parameters(layout: Layout) -> int:
    places = layout.placements.values()
    return sum(shard_bytes(p.leaf, p.stored, layout.sizes) // itemsize(p.leaf.dtype) for p in places)


def _shape(leaf: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def _bytes(tree: object) -> float:
    return float(sum(math.prod(leaf.shape) * itemsize(leaf.dtype) for leaf in jax.tree.leaves(tree)))
