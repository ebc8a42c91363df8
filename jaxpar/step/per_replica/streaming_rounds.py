"""Steps of `streaming` as one program, which overlaps a fragment's all-reduce with the next steps.

    step s ─► its fragment departs ─────── all-reduce ────────────────► arrives and is applied
              └─► steps s + 1 to s + delay, in one loop ──────────────┘

XLA overlaps a collective with the instructions between its start and the first read of its result. Three measures put
the steps there: the steps are one loop, which XLA schedules as a unit; the fragment is one vector, so that no
instruction splits it earlier; and the read of the vector also reads a parameter from after the loop. On GPUs a compiler
option allows many concurrent collectives; otherwise XLA would not overlap the all-reduce with a loop that contains
collectives over `fsdp` or `tensor`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.exchange.averaging.streaming import Streaming
from jaxpar.mesh.xla import compile_with
from jaxpar.step.checks.input_state import check_not_donated
from jaxpar.step.gradients import Batch
from jaxpar.step.per_replica.replicas import PerReplica
from jaxpar.step.state import State
from jaxpar.step.step import Step

AT_ONCE = {"xla_gpu_experimental_parallel_collective_overlap_limit": 16}  # number of collectives: more than a loop has


class Round:
    """The steps from a fragment's departure to its arrival: `state, metrics = Round(step)(state, batches)`.

    The result equals that of one call of `step` per batch, up to rounding.

    Attributes:
      step: The training step.
      steps: Number of steps: `delay` + 1.
    """

    def __init__(self, step: Step):
        """Wraps a step whose exchange is `streaming`.

        Raises:
          JaxparError: If it has another exchange, or the settings of `streaming` do not allow overlap.
        """
        exchange = step.layout.parallel.exchange
        if not isinstance(exchange, Streaming) or not isinstance(step.gradients, PerReplica) or step.guard:
            raise refuse(
                f"a round with exchange {exchange}" + " and a guard" * step.guard,
                rule="a fragment travels while steps are made with streaming, in a step that does not guard",
                fix='exchange=jp.Exchange("streaming", delay=2) and guard=False',
            )
        distance = exchange.every // exchange.fragments
        if not 0 < exchange.delay < distance or exchange.wire != "fp32":
            raise refuse(
                f"a round with exchange {exchange}",
                rule=f"one fragment travels at a time, in fp32: delay is 1 to every / fragments - 1 = {distance - 1}",
                fix=f"delay = {max(1, min(exchange.delay, distance - 1))}, fewer fragments, wire = 'fp32'",
            )
        self.step, self.exchange, self.gradients = step, exchange, step.gradients
        self.trained_state = step.gradients.trained_state
        self.steps = exchange.delay + 1
        self._programs: dict[Any, Any] = {}

    def is_first_step(self, number: int) -> bool:
        """Whether a fragment departs after this step, counted from 1."""
        return number % (self.exchange.every // self.exchange.fragments) == 0

    def __call__(self, state: State, batches: Sequence[Batch]) -> tuple[State, list[dict[str, jax.Array]]]:
        """Runs the steps. The input state is donated.

        Args:
          state: The state before the step after which a fragment departs.
          batches: One batch per step.

        Returns:
          The new state, and the metrics of each step.

        Raises:
          JaxparError: If no fragment departs after the next step, or the number of batches is wrong.
        """
        check_not_donated(state)
        first = int(state.step) + 1
        batches = [self.step.put(batch) for batch in batches]
        key = (first % self.exchange.every, *((name, x.shape, str(x.dtype)) for name, x in sorted(batches[0].items())))
        if key not in self._programs:
            self._programs[key] = compile_with(self.lower(state, batches, first=first), self.options)
        state, raw_metrics = self._programs[key](state, batches)
        return state, [self.gradients.scalar_metrics(metrics) for metrics in raw_metrics]

    @property
    def options(self) -> dict[str, Any]:
        """XLA compiler options."""
        platform = self.step.layout.device_mesh.devices.flat[0].platform
        return {**self.step.compiler.options, **({} if platform in ("cpu", "tpu") else AT_ONCE)}

    def lower(self, state: State, batches: Sequence[Batch], *, first: int) -> Any:
        """Lowers the program for these shapes, as `jax.jit(...).lower` does.

        Args:
          state: Arrays, or the shapes from `Step.abstract`.
          batches: Arrays or shapes, one batch per step.
          first: The number of the first step, from 1.

        Raises:
          JaxparError: If no fragment departs after the first step, or the number of batches is wrong.
        """
        if not self.is_first_step(first) or len(batches) != self.steps:
            raise refuse(
                f"a round of {len(batches)} batches from step {first}",
                rule=f"a round of {self.exchange} is {self.steps} steps, and begins where a fragment is sent",
                fix=f"{self.steps} batches, and single steps while not Round.is_first_step(step)",
            )
        shapes = [self.step.placement.shapes(batch) for batch in batches]
        with self.step.compiler.trace_context():
            out_shardings = (self.step.shardings, None)
            run = jax.jit(lambda *args: self._run(first, *args), donate_argnums=0, out_shardings=out_shardings)
            return run.lower(state, shapes)

    def _run(self, first: int, state: State, batches: list[Batch]) -> tuple[State, list[Any]]:
        state, metrics = self._update(state, batches[0])
        vectors = self.exchange.depart(*self.trained_state.read(state, first))
        later_batches = jax.tree.map(lambda *values: jnp.stack(values), *batches[1:])
        inner, history = jax.lax.scan(self._update, dataclasses.replace(state, exchange=()), later_batches)
        state = dataclasses.replace(inner, exchange=state.exchange)
        replicas, replica_mesh = self.trained_state.read(state, first + self.exchange.delay)
        state = self.trained_state.write(state, self.exchange.arrive(vectors, replicas, replica_mesh))
        return state, [metrics, *(jax.tree.map(lambda x, i=i: x[i], history) for i in range(len(batches) - 1))]

    def _update(self, state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        """Updates once; leaves the exchange state unconstrained, because nothing reads it before the round ends."""
        new_state, metrics = self.gradients.update(self.step.optimizer, state, batch, lambda optimizer: optimizer)
        state_shardings = dataclasses.replace(self.step.shardings, exchange=())
        constrained = jax.lax.with_sharding_constraint(dataclasses.replace(new_state, exchange=()), state_shardings)
        return dataclasses.replace(constrained, exchange=new_state.exchange), metrics
