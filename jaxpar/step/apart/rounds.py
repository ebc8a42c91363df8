"""Steps of `streaming` as one program, in which a fragment travels while the replicas go on.

    step s ─► its fragment departs ─────── all-reduce ────────────────► arrives, and is applied
              └─► steps s + 1 to s + delay, in one loop ──────────────┘

XLA runs a collective beside what stands between its start and the first read of its result. So that the steps stand
there, they are one loop, which is scheduled whole; the fragment is one vector, so that nothing takes it apart before;
and it is read together with a parameter of after the loop. On GPUs XLA is told that many collectives may run at once:
else it keeps the all-reduce apart from a loop that has collectives of its own, over `fsdp` or `tensor`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.exchange.averaging.streaming import Streaming
from jaxpar.mesh.preset import compile_with
from jaxpar.step.apart.replicas import Apart
from jaxpar.step.checks.given_state import check_there
from jaxpar.step.gradients import Batch
from jaxpar.step.state import State
from jaxpar.step.step import Step

AT_ONCE = {"xla_gpu_experimental_parallel_collective_overlap_limit": 16}  # collectives: more than a loop has


class Round:
    """The steps from a fragment's departure to its arrival: `state, metrics = Round(step)(state, batches)`.

    What comes of it is what comes of `step`, called once for each batch, up to rounding.

    Attributes:
      step: The training step.
      steps: How many it makes: one, and `delay` more.
    """

    def __init__(self, step: Step):
        """Takes a step of `streaming`.

        Raises:
          JaxparError: If its exchange is another one, or fragments cannot travel so.
        """
        exchange = step.layout.parallel.exchange
        if not isinstance(exchange, Streaming) or not isinstance(step.gradients, Apart) or step.guard:
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
        self.steps = exchange.delay + 1
        self._programs: dict[Any, Any] = {}

    def begins(self, number: int) -> bool:
        """Returns whether a fragment departs after a step of this number, from 1."""
        return number % (self.exchange.every // self.exchange.fragments) == 0

    def __call__(self, state: State, batches: Sequence[Batch]) -> tuple[State, list[dict[str, jax.Array]]]:
        """Makes the steps. The state that goes in is given up.

        Args:
          state: Before the step after which a fragment departs.
          batches: One for each step.

        Returns:
          The new state, and the metrics of each step.

        Raises:
          JaxparError: If no fragment departs after the next step, or there are more batches, or fewer.
        """
        check_there(state)
        first = int(state.step) + 1
        batches = [self.step.put(batch) for batch in batches]
        key = (first % self.exchange.every, *((name, x.shape, str(x.dtype)) for name, x in sorted(batches[0].items())))
        if key not in self._programs:
            self._programs[key] = compile_with(self.lower(state, batches, first=first), self.options)
        state, found = self._programs[key](state, batches)
        return state, [self.gradients.told(each) for each in found]

    @property
    def options(self) -> dict[str, Any]:
        """What XLA is told besides the program."""
        platform = self.step.layout.on.devices.flat[0].platform
        return {**self.step.options, **({} if platform in ("cpu", "tpu") else AT_ONCE)}

    def lower(self, state: State, batches: Sequence[Batch], *, first: int) -> Any:
        """Returns the program lowered for these shapes, as `jax.jit(...).lower` does.

        Args:
          state: Arrays, or what `Step.abstract` returns.
          batches: Likewise, one for each step.
          first: The number of its first step, from 1.

        Raises:
          JaxparError: If no fragment departs after that, or there are more batches than steps, or fewer.
        """
        if not self.begins(first) or len(batches) != self.steps:
            raise refuse(
                f"a round of {len(batches)} batches from step {first}",
                rule=f"a round of {self.exchange} is {self.steps} steps, and begins where a fragment is sent",
                fix=f"{self.steps} batches, and single steps while not Round.begins(step)",
            )
        given = [{name: self.step.shaped(name, x) for name, x in batch.items()} for batch in batches]
        with self.step.traced():
            placed = (self.step.placed, None)
            run = jax.jit(lambda *args: self._run(first, *args), donate_argnums=0, out_shardings=placed)
            return run.lower(state, given)

    def _run(self, first: int, state: State, batches: list[Batch]) -> tuple[State, list[Any]]:
        state, found = self._update(state, batches[0])
        vectors = self.exchange.depart(*self.gradients.meet(state, first))
        rest = jax.tree.map(lambda *each: jnp.stack(each), *batches[1:])
        inner, several = jax.lax.scan(self._update, dataclasses.replace(state, exchange=()), rest)
        state = dataclasses.replace(inner, exchange=state.exchange)
        given, between = self.gradients.meet(state, first + self.exchange.delay)
        state = self.gradients.met(state, self.exchange.arrive(vectors, given, between))
        return state, [found, *(jax.tree.map(lambda x, i=i: x[i], several) for i in range(len(batches) - 1))]

    def _update(self, state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        """Makes one step; without an exchange's state that stays away, as nothing before the end reads it."""
        made, found = self.gradients.update(self.step.optimizer, state, batch, lambda optimizer: optimizer)
        placed = dataclasses.replace(self.step.placed, exchange=())
        kept = jax.lax.with_sharding_constraint(dataclasses.replace(made, exchange=()), placed)
        return dataclasses.replace(kept, exchange=made.exchange), found
