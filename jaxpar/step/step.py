"""One training step: one compiled program.

    batch ─► microbatches ─► loss sums, gradients ─► accumulated ─► divided once ─► optimizer ─► state
                 └──────────────── scan ─────────────────┘

The specs of the layout say where each piece lives; XLA compiles the collectives.
"""

import dataclasses
import hashlib
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax

from jaxpar.errors import nearest, refuse, users_code
from jaxpar.hlo.branches import check_branches
from jaxpar.hlo.own_share import FIX, OwnShare, find_excess, own_share
from jaxpar.inspector.subject import Subject
from jaxpar.mesh.preset import compile_for_lines, compile_with, options
from jaxpar.models.settings import logits
from jaxpar.optim.eval_params import eval_params, held_for, holding
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.rule_problems import check_rules
from jaxpar.parallel.techniques import asked
from jaxpar.plan.techniques.chosen import choose
from jaxpar.sharding.names import Tree
from jaxpar.sharding.reading.called import zeros
from jaxpar.sharding.tracing import uncollected
from jaxpar.step import state as states
from jaxpar.step.apart.parts import norm_of_parts, parts_of
from jaxpar.step.batch.shard_batch import BatchPlacement, check_dict
from jaxpar.step.checks import precision as check
from jaxpar.step.checks.dims import check_dims
from jaxpar.step.checks.eight_bits import check_eight_bits
from jaxpar.step.checks.eval_params import check_eval_params
from jaxpar.step.checks.given_state import check_same, check_there
from jaxpar.step.checks.numbers_by_hand import with_placed_numbers
from jaxpar.step.guard import guarded
from jaxpar.step.inspectable import subject
from jaxpar.step.keyed.loss import shaped
from jaxpar.step.kinds import gradients_of
from jaxpar.step.losses import Sums
from jaxpar.step.measures.beside import beside, check_measures
from jaxpar.step.numerics import Numerics
from jaxpar.step.parameters.frozen import frozen
from jaxpar.step.state import State

Batch = Mapping[str, Any]
Loss = Callable[..., Any]  # (model, batch), or (model, batch, key), to sums and counts
READ = ("eval", "parts")  # programs that update nothing
NONE: Mapping[str, Callable] = MappingProxyType({})


class Step:
    """A compiled training step: `state, metrics = step(state, batch)`.

    Compiled once per shape of batch, at the first call. The state that goes in is given up.

    Attributes:
      layout: Where arrays live. Its notes say, from the first call on, in which form the loss has its logits.
      gradients: What differentiates the model and makes its updates.
      products: After the first call with bf16, what the matrix products really run in.
      share: Of the program that was lowered last, the matmuls that each device should make of it; None where loops turn
        as often as the data says.
      agree: With several processes, what each says of a program before it is run: (which, hash).
      compiling: With several processes, what is open while a program is traced, agreed on and compiled.
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
    ):
        abstract = states.abstract(layout, optimizer)  # refuses what is no layout, or no optimizer
        layout = self.layout = layout.under(frozen(layout, optimizer), states.sent(layout, abstract))
        check_eight_bits(layout)
        self.loss, self.optimizer, self.numerics = loss, optimizer, numerics
        self.products: check.Matmuls | None = None
        self.share: OwnShare | None = None
        self.agree: Callable[[str, str], None] | None = None
        self.compiling: Callable[[], AbstractContextManager[None]] = nullcontext
        self.placed = states.shardings(layout, abstract, offload=numerics.offload)
        self.gradients = gradients_of(layout, loss, numerics, frozen=layout.frozen, seed=seed)
        check_eval_params(layout.parallel.exchange, abstract.optimizer)
        self._held = holding(abstract.optimizer) if held_for(abstract.optimizer) else None
        check_measures(layout, measures)
        evaluated = beside(loss, measures)
        self._evaluated = (
            gradients_of(layout, evaluated, numerics, frozen=layout.frozen, seed=seed) if measures else self.gradients
        )
        self._placing = BatchPlacement(layout=layout, accumulate=numerics.accumulate)
        self._placing_whole = BatchPlacement(layout=layout)
        self._compiled: dict[Any, Any] = {}
        self._used = asked.Used()
        # simulated devices share one pool of threads; some dozens of unfinished steps fill it and deadlock
        self._flying: deque = deque()
        self._most = 8 if layout.simulated else None
        self.guard, update = guard, self._update
        if guard:
            update = guarded(update, self._on_device, self.gradients.told)
        self._train = cache(lambda meeting: self._jitted(self._agreeing(update, meeting) if meeting else update))
        self._eval = jax.jit(self._measure)
        self._norm = cache(lambda: jax.jit(norm_of_parts(layout, loss, numerics, frozen=layout.frozen, seed=seed)))
        self._differentiated = jax.jit(self.gradients.gradients)
        self._last: tuple[jax.Array | None, int] = (None, 0)  # the newest count of steps, on devices and on the host

    def __call__(self, state: State, batch: Batch, *, limit: float = math.inf) -> tuple[State, dict[str, jax.Array]]:
        """Makes one update.

        Args:
          state: As made by `init_state` or by the step before; its buffers are reused.
          batch: Name to array; every array's first dim is the global batch.
          limit: The loss above which a step that guards makes no update; others do not read it.

        Returns:
          The new state, and scalars: each entry of the loss function divided by its count,
          `tokens` (the count of `loss`) and `grad_norm` (global, before clipping, of the parameters
          whose gradients the optimizer reads); `skipped` where the step guards. Where nothing in the batch counts,
          `tokens` is 0, the loss nan, and the update is one by gradients of zero: weights decay, momentum goes on.
        """
        check_there(state)
        batch = self.put(batch)
        number = self._number(state)
        exchanges = self.gradients.meeting(number)
        key = _signature(f"exchange {exchanges}" if exchanges else "train", batch)
        if key not in self._compiled:
            state = self._checked(state)
            with self.compiling():
                self._compiled[key] = self._compile(key, self.lower(state, batch, exchanges=exchanges))
        limits = (np.float32(limit),) if self.guard else ()
        new, found = self._run(key, state, lambda state: (state, batch, *limits))
        self._last = (new.step, number)
        metrics = self.gradients.told(found)
        self._bound(metrics)
        return new, metrics

    @property
    def needed(self) -> int | None:
        """Bytes that each device needs for the updates, as XLA compiled them; None before the first."""
        made = [each.memory_analysis() for key, each in self._compiled.items() if key[0] not in READ]
        needed = [x.argument_size_in_bytes + x.output_size_in_bytes - x.alias_size_in_bytes + x.temp_size_in_bytes
                  for x in made if x is not None]  # fmt: skip
        return max(needed, default=None)

    def _number(self, state: State) -> int:
        """Returns the number of the step that is to be made, from 1; 0 where it does not matter.

        The host asks the devices only for a state that is not of the step before: else it would wait for that.
        """
        if not self.gradients.every:
            return 0
        known, number = self._last
        return (number if state.step is known else int(state.step)) + 1

    def _bound(self, result: Any) -> None:
        """Waits, on simulated devices, until at most eight programs are unfinished."""
        if self._most is not None:
            self._flying.append(result)
            if len(self._flying) > self._most:
                jax.block_until_ready(self._flying.popleft())

    def evaluate(self, state: State, batch: Batch) -> Sums:
        """Returns the sums and counts of one batch, by `state.eval_params`, without dropout and without an update."""
        batch = self._placing_whole.put(batch)  # of any size that the mesh divides: microbatches are of updates alone
        return self._read("eval", self._eval, state, batch, more=self._evaluation_inputs)

    @property
    def parts(self) -> int:
        """Into how many parts a batch falls, by the norms of whose gradients their noise is told; see `part_norm`.

        Raises:
          JaxparError: If gradients of parts are never there alone.
        """
        return parts_of(self.layout, self.numerics)

    def part_norm(self, state: State, batch: Batch) -> jax.Array:
        """Returns the root of the mean square of the norms of gradients of equal parts of a batch. Shape [].

        Takes a forward and a backward pass, and between replicas one scalar.

        Raises:
          JaxparError: If gradients of parts are never there alone.
        """
        return self._read("parts", self._norm(), state, self.put(batch))

    def _read(
        self, kind: str, program: Any, state: State, batch: Batch, *, more: Callable[[State], tuple] = lambda state: ()
    ) -> Any:
        """Returns the result of a program that updates nothing.

        Args:
          kind: Of the program.
          program: A function of parameters, model state, batch and what `more` returns, as `jax.jit` returns it.
          state: Whose arrays it reads.
          batch: On its devices.
          more: Returns what else the program reads of the state.
        """

        def arguments(state: State) -> tuple:
            return state.params, state.model_state, batch, *more(state)

        check_there(state)
        key = _signature(kind, batch)
        if key not in self._compiled:
            state = self._checked(state)
            with self.compiling():
                with self._users_code(batch), self.traced():
                    lowered = program.lower(*arguments(state))
                asked.check(self.layout, self._used, lowered)
                self._compiled[key] = self._compile(key, lowered)
        found = self._run(key, state, arguments)
        self._bound(found)
        return found

    def scored(self, means: dict[str, float]) -> dict[str, float]:
        """Returns what an evaluation says, of its sums over all batches, each divided by its count."""
        return self.gradients.scored(means)

    def differentiated(self, params: Tree, model_state: Tree, batch: Batch) -> tuple[Tree, Sums, Tree]:
        """Returns gradients of a batch's mean loss, its sums, and the model state afterwards; nothing is updated.

        For who applies gradients elsewhere, or later, than a step does: the parameters need not be the newest.
        """
        batch = self.put(batch)
        with self._users_code(batch), self.traced():
            return self._differentiated(params, model_state, batch)

    def compile_gradients(self, params: Tree, model_state: Tree, batch: Batch) -> Callable[[Tree, Tree, Batch], Any]:
        """Returns the compiled program of `differentiated` for arguments of these shapes; threads may call it at once.

        A batch for it is placed by `put`.
        """
        batch = self.put(batch)
        with self._users_code(batch), self.traced():
            return self._differentiated.lower(params, model_state, batch).compile()

    def _compile(self, key: Any, lowered):
        """Compiles a program in which nobody waits for ever: all processes agree on it, and its stages meet.

        Warns where devices do each other's work.
        """
        if self.agree is not None:
            self.agree(
                f"{key[0]} program ({len(self._compiled)})", hashlib.sha256(lowered.as_text().encode()).hexdigest()
            )
        program = compile_with(lowered, self.options)
        several = self.layout.devices > 1 and key[0] not in READ
        if several and find_excess(program.as_text(), self.share):
            excess = find_excess(compile_for_lines(lowered, program, self.options).as_text(), self.share)
            warnings.warn(f"{self.layout.blueprint.name}: {excess}\n  fix: {FIX}", stacklevel=3)
        if self.layout.sizes["pipe"] > 1 and not self.layout.schedule.phased:
            check_branches(program.as_text(), dict(self.layout.on.shape), self.layout.schedule)
        return program

    def _run(self, key: Any, state: State, arguments: Callable[[State], tuple]) -> Any:
        try:
            return self._compiled[key](*arguments(state))
        except (TypeError, ValueError, RuntimeError):
            placed = self._checked(state)  # looked at only where JAX refuses, so that a good step costs nothing
            if placed is state:
                raise
        return self._compiled[key](*arguments(placed))

    @property
    def options(self) -> dict[str, Any]:
        """What XLA is told besides the program."""
        return options(list(self.layout.on.devices.flat), self.numerics.collectives, asked.told(self.layout))

    def _checked(self, state: State) -> State:
        """Returns the state with numbers that were set by hand where the step wants them; refuses another's state."""
        expected = states.abstract(self.layout, self.optimizer)
        state = with_placed_numbers(state, expected, self.placed)
        check_same(state, expected, self.placed)
        return state

    def _users_code(self, batch: Batch):
        shapes = ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in batch.items())
        return users_code(
            f"{self.layout.blueprint.name} and its loss on {shapes}",
            rule="model, loss and optimizer accept the batch",
            fix="the line of the model or the loss that this names",
        )

    @property
    def forms(self) -> tuple[str, ...]:
        """The form of each island that was chosen by the shapes of what was lowered so far: sentences."""
        return tuple(sorted(self._used.forms))

    def lower(self, state: State, batch: Batch, *, exchanges: int = 0):
        """Returns the step lowered for these shapes, as `jax.jit(...).lower` does, and checks its precision.

        Args:
          state: Arrays, or what `abstract` returns.
          batch: Likewise.
          exchanges: Which meeting of replicas it ends with, from 1; 0 for none, where they do not meet in every step.
        """
        batch = {name: self.shaped(name, value) for name, value in batch.items()}
        with self._users_code(batch), self.traced(), logits.noted() as made:
            always = self.gradients.meeting(1) if self.gradients.every == 1 else 0
            train = self._train(exchanges or always)
            traced = train.trace(state, batch, *((np.float32(math.inf),) if self.guard else ()))
            lowered = traced.lower()
        chosen = [each for each in self.forms if each.startswith("context by auto")]
        for each in [*map(str, made), *chosen]:
            if each not in self.layout.notes:
                self.layout = self.layout.noted(each)
        check_rules(self.layout.parallel, self.layout.blueprint, self._used.names)
        asked.check(self.layout, self._used, lowered)
        check_dims(self.layout, lambda model: shaped(self.loss)(model, jax.tree.map(zeros, batch)))
        schedule = self.layout.schedule if self.layout.sizes["pipe"] > 1 else None
        self.share = own_share(traced.jaxpr.jaxpr, self.layout.devices, schedule)
        if self.numerics.dtype:
            self.products = check.products(traced.jaxpr.jaxpr, schedule)
            check.check_bf16(self.products, self.numerics.matmuls)
        return lowered

    def abstract(self) -> State:
        """Returns the state as shapes, dtypes and shardings: what `lower` needs, where no device holds one."""
        shapes = states.abstract(self.layout, self.optimizer)
        return jax.tree.map(lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes, self.placed)

    def subject(self, batch: Batch, *, exchanges: int = 0) -> Subject:
        """Returns this step, lowered for such a batch, as `jp.inspect` wants it; nothing is run. See `lower`."""
        check_dict(batch)
        return subject(self, batch, exchanges=exchanges)

    def put(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the batch on its devices; arrays that are there already are left alone.

        Raises:
          JaxparError: If an entry is no array of numbers, or its first dim does not split.
        """
        return self._placing.put(batch)

    def shaped(self, name: str, value: Any) -> Any:
        """Returns the shape of a batch array with the sharding that it will have."""
        return self._placing.shaped(name, value)

    @contextmanager
    def traced(self):
        """Yields while a function of the step's own arrays is traced: on its mesh, with the names of its dims."""
        keeps = self.numerics.remat == "none"
        with jax.set_mesh(self.layout.on), uncollected(), asked.traced(self.layout, self._used, choose, keeps=keeps):
            yield

    def _update(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        return self.gradients.update(self.optimizer, state, batch, self._on_device)

    def _jitted(self, function: Callable):
        return jax.jit(function, donate_argnums=0, out_shardings=(self.placed, None))

    def _agreeing(self, update: Callable, meeting: int) -> Callable:
        """Returns an update after which the replicas meet."""

        def _exchange(state: State, batch: Batch, *limit: jax.Array):
            state, metrics = update(state, batch, *limit)
            return self.gradients.agree(state, metrics, meeting)

        return _exchange

    def _on_device(self, optimizer: Any, placed: Any = None) -> Any:
        if not self.numerics.offload:
            return optimizer
        placed = self.placed.optimizer if placed is None else placed
        return jax.tree.map(lambda x, on: jax.device_put(x, on.with_memory_kind("device")), optimizer, placed)

    def _evaluation_inputs(self, state: State) -> tuple[Any, Tree]:
        """Returns the state of optimizer and exchange from which the evaluated parameters are computed."""
        return self._held(state.optimizer) if self._held else None, state.exchange

    def _measure(self, params: Tree, model_state: Tree, batch: Batch, held: Any = None, own: Tree = ()) -> Sums:
        if held is not None:
            judged = eval_params(self._on_device(held, held_for(self.placed.optimizer)), params)
            params = jax.lax.with_sharding_constraint(judged, self.placed.params)  # made where they are stored
        return self._evaluated.evaluate(*self._evaluated.global_model(params, model_state, own), batch)


def _signature(kind: str, batch: Batch):
    return kind, tuple(
        sorted(
            ((str(name), value.shape, str(value.dtype), value.sharding) for name, value in batch.items()),
            key=lambda entry: entry[0],
        )
    )


def train_step(
    layout: Layout,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    guard: bool = False,
    seed: int = 0,
    measures: Mapping[str, Callable] = NONE,
    **numerics: Any,
) -> Step:
    """Returns the training step of a layout.

    Args:
      layout: As made by `compose`.
      loss: (model, batch), or (model, batch, key), to (sum, count), or to a dict of them with the entry `loss`. The
        random key is another one in every step and microbatch, and the same on every layout; all evaluations have one.
      optimizer: The optax chain that `init_state` was given.
      guard: Whether a step whose loss or gradients are not finite, or whose loss is above a limit, changes nothing.
      seed: Of the loss's keys.
      measures: Name to a function of (model, batch) to (sum, count), each of which evaluations say beside the loss.
      **numerics: `accumulate`, `precision`, `remat`, `offload`, `collectives`: see `Numerics`.

    Raises:
      JaxparError: If a setting has no such value.
    """
    known = [field.name for field in dataclasses.fields(Numerics)]
    for key in numerics:
        if key not in known:
            raise refuse(
                f"{key}={numerics[key]!r:.60}", rule=f"a step takes {', '.join(known)}", fix=nearest(key, known)
            )
    if not callable(loss):
        raise refuse(
            f"loss={loss!r:.60}",
            rule="a loss is a function of (model, batch), or of (model, batch, key)",
            fix="jp.next_token, or lambda model, batch: (jnp.sum(losses), losses.size)",
        )
    seed, made = states.checked_seed(seed), Numerics(**numerics)
    return Step(layout, loss, optimizer, made, guard=guard, seed=seed, measures=measures)
