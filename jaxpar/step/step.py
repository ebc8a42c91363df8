"""One training step: one compiled program.

    batch ─► microbatches ─► loss sums, gradients ─► accumulated ─► divided once ─► optimizer ─► state
                 └──────────────── scan ─────────────────┘

The layout has a spec for each array; XLA inserts the collectives.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.stages import Wrapped

from jaxpar.optim.eval_params import eval_arrays, eval_arrays_reader, eval_params
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.base import Choose, refuse_choice
from jaxpar.sharding.names import Tree
from jaxpar.step import state as states
from jaxpar.step.checks.input_state import check_eval_params, check_matches_step, check_not_donated, place_scalars
from jaxpar.step.compiler import Compiler, UnfinishedPrograms
from jaxpar.step.evaluation_loss import check_measures, with_measures
from jaxpar.step.frozen_parameters import check_eight_bits, check_reference, frozen_paths
from jaxpar.step.gradient_kinds import make_gradients
from jaxpar.step.gradients import Gradients, check_sync_round
from jaxpar.step.losses import Sums
from jaxpar.step.memory_error import (
    READ_ONLY_PROGRAMS,
    OutOfMemoryError,
    explain_compile_error,
    explain_error,
    is_out_of_memory,
)
from jaxpar.step.numerics import Numerics, are_finite
from jaxpar.step.shard_batch import BatchPlacement
from jaxpar.step.state import State

# The update of a state by one batch: gradients, the optimizer, the guard, and the sync round that ends a step.

# Guarded updates: if numbers are not finite, or the loss is too high, the step changes nothing.


def guard_update(update: Callable, on_device: Callable, scalar_metrics: Callable) -> Callable:
    """Guards an update: skips it if the loss, the gradients or the new parameters are not finite.

    It also skips an update if the loss is above the limit. Devices all-reduce one bool about their parameter shards.

    Args:
      update: (state, batch) to (state, metrics).
      on_device: Moves an optimizer state to device memory.
      scalar_metrics: Converts the metrics of `update` to scalars.

    Returns:
      A function that maps (state, batch, limit) to (state, metrics). If the bool `skipped` in the metrics is true, the
      state is unchanged bit for bit, except for the step count.
    """

    def _update(state: State, batch: Mapping, limit: jax.Array):
        new_state, metrics = update(state, batch)
        scalars = scalar_metrics(metrics)
        loss, norm = scalars["loss"], scalars["grad_norm"]
        is_valid = jnp.isfinite(loss) & jnp.isfinite(norm) & (loss <= limit) & are_finite(new_state.params)
        params, optimizer, model_state, exchange = jax.tree.map(
            lambda new, old: jnp.where(is_valid, new, old),
            (new_state.params, new_state.optimizer, new_state.model_state, new_state.exchange),
            (state.params, on_device(state.optimizer), state.model_state, state.exchange),
        )
        return State(new_state.step, params, optimizer, model_state, exchange), metrics | {"skipped": ~is_valid}

    return _update


def optimizer_loader(shardings: State, *, offload: bool) -> Callable[..., Any]:
    """Returns a function of (optimizer state, its shardings) that moves the state to device memory.

    The shardings default to those of the whole optimizer state. Without `offload` the function is the identity.
    """

    def load(optimizer: object, placed: object = None) -> Any:
        if not offload:
            return optimizer
        placed = shardings.optimizer if placed is None else placed
        return jax.tree.map(lambda x, s: jax.device_put(x, s.with_memory_kind("device")), optimizer, placed)

    return load


def update_programs(
    gradients: Gradients,
    optimizer: optax.GradientTransformation,
    shardings: State,
    load: Callable[..., Any],
    *,
    guard: bool,
) -> Callable[[int], Any]:
    """Returns a function that maps a sync round (0 for none) to the jitted update whose step ends with it.

    An update is a function of (state, batch), or of (state, batch, limit of the loss) if it is guarded. It reuses the
    buffers of the state.
    """

    def update(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        return gradients.update(optimizer, state, batch, load)

    whole_update = guard_update(update, load, gradients.scalar_metrics) if guard else update

    @cache
    def program(sync_round: int) -> Any:
        def synchronized(state: State, batch: Batch, *limit: jax.Array):
            state, metrics = whole_update(state, batch, *limit)
            return gradients.synchronize(state, metrics, sync_round)

        return jax.jit(synchronized if sync_round else whole_update, donate_argnums=0, out_shardings=(shardings, None))

    return program


def evaluation_program(gradients: Gradients, shardings: State, load: Callable[..., Any]) -> Any:
    """Returns the jitted evaluation of a batch, without dropout or an update.

    Its arguments are params, model state, batch, the optimizer's arrays that define the parameters to evaluate (or
    None), and the state of the exchange.
    """

    def measure(params: Tree, model_state: Tree, batch: Batch, averages: Tree = None, exchange: Tree = ()) -> Sums:
        if averages is not None:
            averaged = eval_params(load(averages, eval_arrays(shardings.optimizer)), params)
            params = jax.lax.with_sharding_constraint(averaged, shardings.params)  # computed where they are stored
        return gradients.evaluate(*gradients.global_model(params, model_state, exchange), batch)

    return jax.jit(measure)


Batch = Mapping[str, Any]
Loss = Callable[..., Any]  # (model, batch), or (model, batch, key), to sums and counts
NONE: Mapping[str, Callable] = MappingProxyType({})


class Step:
    """A compiled training step: `state, metrics = step(state, batch)`.

    It is compiled once per batch shape, at the first call, and donates the input state.

    Attributes:
      compiler: Traces, checks and compiles the programs of the step, and records what their traces show.
      gradients: Differentiates the model and computes its updates.
      shardings: The sharding of every array of the state.
      programs: The compiled programs, by name and batch shape.
      placement: Shards batches of updates.
      evaluation: The jitted program of `evaluate`.
      unfinished: The programs that were sent to simulated devices.
      explain: Maps (step, kind of program, batch, XLA's error) to the error to raise if a device is out of memory.
    """

    def __init__(
        self,
        layout: Layout,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        numerics: Numerics,
        *,
        guard: bool = False,
        seed: int = 0,
        measures: Mapping[str, Callable] = NONE,
        choose: Choose = refuse_choice,
        explain: Callable[..., OutOfMemoryError] | None = None,
    ):
        abstract = states.abstract(layout, optimizer)  # checks types of layout and optimizer
        messages = states.optimizer_traffic(layout, abstract)
        layout = replace(layout, frozen=frozen_paths(layout, optimizer), opt_state_messages=messages)
        check_eight_bits(layout)
        if layout.blueprint.has_reference:
            check_reference(layout)
        self.loss, self.optimizer, self.numerics, self.guard, self.seed = loss, optimizer, numerics, guard, seed
        self.explain = explain
        self.compiler = Compiler(layout, loss, numerics, choose)
        self.shardings = states.shardings(layout, abstract, offload=numerics.offload)
        self.gradients = make_gradients(layout, loss, numerics, frozen=layout.frozen, seed=seed)
        check_eval_params(layout.parallel.exchange, abstract.optimizer)
        self._read_averages = eval_arrays_reader(abstract.optimizer) if eval_arrays(abstract.optimizer) else None
        check_measures(layout, measures)
        evaluated = self.gradients
        if measures:
            evaluated = make_gradients(
                layout, with_measures(loss, measures), numerics, frozen=layout.frozen, seed=seed
            )  # fmt: skip
        self.placement = BatchPlacement(layout=layout, accumulate=numerics.accumulate)
        self._whole_placement = BatchPlacement(layout=layout)
        self.programs: dict[Any, Any] = {}
        self.unfinished = UnfinishedPrograms(8 if layout.simulated else None)
        load = optimizer_loader(self.shardings, offload=numerics.offload)
        self._updates = update_programs(self.gradients, optimizer, self.shardings, load, guard=guard)
        self.evaluation = evaluation_program(evaluated, self.shardings, load)
        self._differentiated = jax.jit(self.gradients.gradients)
        self._last: tuple[jax.Array | None, int] = (None, 0)  # the latest step count, on devices and on the host

    @property
    def layout(self) -> Layout:
        """The sharding of all arrays. After the first call, its notes describe how the loss computes its logits."""
        return self.compiler.layout

    def __repr__(self) -> str:
        name, precision = getattr(self.loss, "__name__", type(self.loss).__name__), self.numerics.matmuls.compute
        mesh, count = self.layout.summary().partition(":")[0], len(self.programs)
        return f"<step: {mesh}; loss {name}, {precision}, {count} compiled program{'s' * (count != 1)}>"

    def _repr_html_(self) -> str:
        """Draws the layout for notebooks."""
        return self.layout._repr_html_()

    def __call__(self, state: State, batch: Batch, *, limit: float = math.inf) -> tuple[State, dict[str, jax.Array]]:
        """Runs one training step.

        Args:
          state: The result of `init_state` or of the previous step; its buffers are donated.
          batch: Name to array; dim 0 of every array is the global batch.
          limit: The loss above which a guarded step makes no update; other steps ignore it.

        Returns:
          The new state, and scalar metrics: each entry of the loss function divided by its count, `tokens` (the count
          of `loss`), `grad_norm` (global, before clipping, of the parameters whose gradients the optimizer reads), and
          `skipped` if the step guards. If nothing in the batch counts, `tokens` is 0, the loss is nan, and the update
          uses zero gradients: weight decay and momentum still apply.
        """
        check_not_donated(state)
        batch = self.put(batch)
        number = self._number(state)
        sync_round = self.gradients.sync_round(number)
        key = _signature(f"exchange {sync_round}" if sync_round else "train", batch)
        if key not in self.programs:
            state = self._check_state(state)
            with explain_compile_error(self, key), self.compiler.compile_context():
                lowered = self.lower(state, batch, sync_round=sync_round)
                self.programs[key] = self.compiler.compile(key[0], lowered, is_update=True)
        limits = (np.float32(limit),) if self.guard else ()
        new_state, raw_metrics = self._run(key, state, lambda state: (state, batch, *limits))
        self._last = (new_state.step, number)
        metrics = self.gradients.scalar_metrics(raw_metrics)
        self.unfinished.add(metrics)
        return new_state, metrics

    def evaluate(self, state: State, batch: Batch) -> Sums:
        """Returns the sums and counts of one batch at `state.eval_params`, without dropout or an update."""

        def averages(state: State) -> tuple[Any, Tree]:
            return self._read_averages(state.optimizer) if self._read_averages else None, state.exchange

        batch = self._whole_placement.put(batch)  # any size that the mesh divides: only updates use microbatches
        return self._run_without_update("eval", self.evaluation, state, batch, averages)

    @property
    def parts(self) -> int:
        """The number of parts of a batch whose gradient norms estimate the gradient noise; see `part_norm`.

        Raises:
          JaxparError: If the layout never computes the gradient of one part by itself.
        """
        from jaxpar.step.per_replica.part_norms import num_parts

        return num_parts(self.layout, self.numerics)

    def part_norm(self, state: State, batch: Batch) -> jax.Array:
        """Returns the root mean square of the gradient norms of equal parts of a batch. Shape [].

        Runs a forward and a backward pass; replicas exchange one scalar.

        Raises:
          JaxparError: If the layout never computes the gradient of one part by itself.
        """
        return self._run_without_update("parts", self._part_norm_program, state, self.put(batch))

    def compute_gradients(self, params: Tree, model_state: Tree, batch: Batch) -> tuple[Tree, Sums, Tree]:
        """Returns gradients of a batch's mean loss, its sums, and the model state afterwards; nothing is updated.

        Use this to apply gradients outside of the step, possibly to newer parameters than those they were computed at.
        """
        batch = self.put(batch)
        with self.compiler.user_code(batch):
            return self._differentiated(params, model_state, batch)

    def compile_gradients(self, params: Tree, model_state: Tree, batch: Batch) -> Callable[[Tree, Tree, Batch], Any]:
        """Returns the compiled program of `compute_gradients` for arguments of these shapes; it is thread-safe.

        Place its batches with `put`.
        """
        batch = self.put(batch)
        with self.compiler.user_code(batch):
            return self._differentiated.lower(params, model_state, batch).compile()

    def lower(self, state: State, batch: Batch, *, sync_round: int = 0):
        """Returns the step lowered for these shapes, as `jax.jit(...).lower` does, and checks its precision.

        Args:
          state: Arrays, or the shapes from `abstract`.
          batch: Arrays or shapes.
          sync_round: The number of the sync round that ends the step, from 1; 0 for none, unless replicas sync in every
            step.

        Raises:
          JaxparError: If the exchange has no sync round of this number, or the step refuses the batch.
        """
        check_sync_round(self.gradients, sync_round)
        batch = self.placement.shapes(batch)
        always = self.gradients.sync_round(1) if self.gradients.sync_every == 1 else 0
        return self.compiler.lower_update(self._updates(sync_round or always), state, batch, guard=self.guard)

    def abstract(self) -> State:
        """Returns the state as shapes, dtypes and shardings: enough for `lower`, without allocating it."""
        shapes = states.abstract(self.layout, self.optimizer)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings)

    def put(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the batch on its devices; arrays that are already there are not moved.

        Raises:
          JaxparError: If an entry is no array of numbers, or its first dim does not split.
        """
        return self.placement.put(batch)

    @property
    def memory_bytes(self) -> int | None:
        """Bytes per device that the compiled updates need, as XLA reports them; None before the first."""
        analyses = [
            program.memory_analysis() for key, program in self.programs.items() if key[0] not in READ_ONLY_PROGRAMS
        ]
        peaks = [x.argument_size_in_bytes + x.output_size_in_bytes - x.alias_size_in_bytes + x.temp_size_in_bytes
                  for x in analyses if x is not None]  # fmt: skip
        return max(peaks, default=None)

    @cached_property
    def _part_norm_program(self) -> Any:
        from jaxpar.step.per_replica.part_norms import part_norm_function

        return jax.jit(
            part_norm_function(self.layout, self.loss, self.numerics, frozen=self.layout.frozen, seed=self.seed)
        )

    def _number(self, state: State) -> int:
        """Returns the number of the next step, from 1; 0 if the exchange does not need it.

        Reads the count from the devices only if the state is not the previous step's output: reading it waits for that
        step.
        """
        if not self.gradients.sync_every:
            return 0
        last_step, number = self._last
        return (number if state.step is last_step else int(state.step)) + 1

    def _run_without_update(
        self, kind: str, program: Wrapped, state: State, batch: Batch, more: Callable[[State], tuple] = lambda state: ()
    ) -> Any:
        """Runs a program that updates nothing.

        Args:
          kind: Name of the program.
          program: A jitted function of parameters, model state, batch and the results of `more`.
          state: The state that it reads.
          batch: On its devices.
          more: Returns further inputs, computed from the state.
        """

        def arguments(state: State) -> tuple:
            return state.params, state.model_state, batch, *more(state)

        check_not_donated(state)
        key = _signature(kind, batch)
        if key not in self.programs:
            state = self._check_state(state)
            with explain_compile_error(self, key), self.compiler.compile_context():
                lowered = self.compiler.lower(program, batch, *arguments(state))
                self.programs[key] = self.compiler.compile(kind, lowered, is_update=False)
        result = self._run(key, state, arguments)
        self.unfinished.add(result)
        return result

    def _run(self, key: object, state: State, arguments: Callable[[State], tuple]) -> Any:
        try:
            return self.programs[key](*arguments(state))
        except (TypeError, ValueError, RuntimeError) as error:
            if self.explain and is_out_of_memory(error):
                raise explain_error(self, error, key) from error
            valid_state = self._check_state(state)  # checked only after JAX raised, so that a valid step pays nothing
            if valid_state is state:
                raise
        return self.programs[key](*arguments(valid_state))

    def _check_state(self, state: State) -> State:
        """Places scalars that the user assigned to the state; refuses a state of another step."""
        expected = states.abstract(self.layout, self.optimizer)
        state = place_scalars(state, expected, self.shardings)
        check_matches_step(state, expected, self.shardings)
        return state


def _signature(kind: str, batch: Batch):
    return kind, tuple(
        sorted(
            ((str(name), value.shape, str(value.dtype), value.sharding) for name, value in batch.items()),
            key=lambda entry: entry[0],
        )
    )
