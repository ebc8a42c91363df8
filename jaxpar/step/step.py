"""One training step: one compiled program.

    batch ─► microbatches ─► loss sums, gradients ─► accumulated ─► divided once ─► optimizer ─► state
                 └──────────────── scan ─────────────────┘

The layout's specs say how each array is sharded; XLA inserts the collectives.
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

from jaxpar.errors import refuse, suggest, user_code_errors
from jaxpar.hlo.branches import check_branches
from jaxpar.hlo.flop_share import FIX, FlopShare, find_excess, flop_share
from jaxpar.inspector.subject import Subject
from jaxpar.mesh.preset import compile_for_lines, compile_with, options
from jaxpar.models.settings import logits
from jaxpar.optim.eval_params import eval_arrays, eval_arrays_reader, eval_params
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.rule_problems import check_rules
from jaxpar.parallel.techniques import all_techniques
from jaxpar.plan.techniques.auto_context import choose_form
from jaxpar.sharding.infer_names.trace_call import zeros_like_input
from jaxpar.sharding.names import Tree
from jaxpar.sharding.tracing import paused_gc
from jaxpar.step import state as states
from jaxpar.step.batch.shard_batch import BatchPlacement, check_dict
from jaxpar.step.checks import precision as check
from jaxpar.step.checks.dims import check_dims
from jaxpar.step.checks.eight_bits import check_eight_bits
from jaxpar.step.checks.eval_params import check_eval_params
from jaxpar.step.checks.input_state import check_matches_step, check_not_donated
from jaxpar.step.checks.user_scalars import place_scalars
from jaxpar.step.gradient_kinds import gradients_of
from jaxpar.step.guard import guard_update
from jaxpar.step.inspectable import subject
from jaxpar.step.losses import Sums
from jaxpar.step.measures.evaluation_loss import check_measures, with_measures
from jaxpar.step.numerics import Numerics
from jaxpar.step.parameters.frozen import frozen_paths
from jaxpar.step.per_replica.part_norms import num_parts, part_norm_function
from jaxpar.step.state import State
from jaxpar.step.stochastic_loss.loss import traceable_loss

Batch = Mapping[str, Any]
Loss = Callable[..., Any]  # (model, batch), or (model, batch, key), to sums and counts
READ = ("eval", "parts")  # programs that update nothing
NONE: Mapping[str, Callable] = MappingProxyType({})


class Step:
    """A compiled training step: `state, metrics = step(state, batch)`.

    Compiled once per batch shape, at the first call. The input state is donated.

    Attributes:
      layout: Where arrays live. After the first call its notes say how the loss computes its logits.
      gradients: Differentiates the model and makes its updates.
      matmuls: After the first call with bf16, the dtypes that the matrix products really run in.
      share: The matmuls that each device should run, of the program lowered last; None if a loop's trip count depends
        on the data.
      compare_programs: With several processes, called with (program name, hash) before a program is compiled.
      compile_context: With several processes, a context entered while a program is traced, compared and compiled.
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
        abstract = states.abstract(layout, optimizer)  # checks types of layout and optimizer
        layout = self.layout = layout.with_frozen(
            frozen_paths(layout, optimizer), states.optimizer_traffic(layout, abstract)
        )
        check_eight_bits(layout)
        self.loss, self.optimizer, self.numerics = loss, optimizer, numerics
        self.matmuls: check.Matmuls | None = None
        self.share: FlopShare | None = None
        self.compare_programs: Callable[[str, str], None] | None = None
        self.compile_context: Callable[[], AbstractContextManager[None]] = nullcontext
        self.shardings = states.shardings(layout, abstract, offload=numerics.offload)
        self.gradients = gradients_of(layout, loss, numerics, frozen=layout.frozen, seed=seed)
        check_eval_params(layout.parallel.exchange, abstract.optimizer)
        self._held = eval_arrays_reader(abstract.optimizer) if eval_arrays(abstract.optimizer) else None
        check_measures(layout, measures)
        evaluated = with_measures(loss, measures)
        self._evaluated = (
            gradients_of(layout, evaluated, numerics, frozen=layout.frozen, seed=seed) if measures else self.gradients
        )
        self._placing = BatchPlacement(layout=layout, accumulate=numerics.accumulate)
        self._placing_whole = BatchPlacement(layout=layout)
        self._compiled: dict[Any, Any] = {}
        self._used = all_techniques.ModelUse()
        # simulated devices share a thread pool; some dozens of unfinished steps fill it and deadlock
        self._flying: deque = deque()
        self._most = 8 if layout.simulated else None
        self.guard, update = guard, self._update
        if guard:
            update = guard_update(update, self._on_device, self.gradients.scalar_metrics)
        self._train = cache(lambda meeting: self._jitted(self._agreeing(update, meeting) if meeting else update))
        self._eval = jax.jit(self._measure)
        self._norm = cache(lambda: jax.jit(part_norm_function(layout, loss, numerics, frozen=layout.frozen, seed=seed)))
        self._differentiated = jax.jit(self.gradients.gradients)
        self._last: tuple[jax.Array | None, int] = (None, 0)  # the latest step count, on devices and on the host

    def __call__(self, state: State, batch: Batch, *, limit: float = math.inf) -> tuple[State, dict[str, jax.Array]]:
        """Makes one update.

        Args:
          state: From `init_state` or the previous step; its buffers are reused.
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
        exchanges = self.gradients.sync_round(number)
        key = _signature(f"exchange {exchanges}" if exchanges else "train", batch)
        if key not in self._compiled:
            state = self._checked(state)
            with self.compile_context():
                self._compiled[key] = self._compile(key, self.lower(state, batch, sync_round=exchanges))
        limits = (np.float32(limit),) if self.guard else ()
        new_state, raw_metrics = self._run(key, state, lambda state: (state, batch, *limits))
        self._last = (new_state.step, number)
        metrics = self.gradients.scalar_metrics(raw_metrics)
        self._bound(metrics)
        return new_state, metrics

    @property
    def memory_bytes(self) -> int | None:
        """Bytes per device that the compiled updates need, as XLA reports them; None before the first."""
        analyses = [program.memory_analysis() for key, program in self._compiled.items() if key[0] not in READ]
        peaks = [x.argument_size_in_bytes + x.output_size_in_bytes - x.alias_size_in_bytes + x.temp_size_in_bytes
                  for x in analyses if x is not None]  # fmt: skip
        return max(peaks, default=None)

    def _number(self, state: State) -> int:
        """Returns the number of the next step, from 1; 0 if the exchange does not need it.

        Reads the count from the devices only if the state is not the previous step's output: reading it waits for that
        step.
        """
        if not self.gradients.sync_every:
            return 0
        last_step, number = self._last
        return (number if state.step is last_step else int(state.step)) + 1

    def _bound(self, result: Any) -> None:
        """On simulated devices, waits until at most eight programs are unfinished."""
        if self._most is not None:
            self._flying.append(result)
            if len(self._flying) > self._most:
                jax.block_until_ready(self._flying.popleft())

    def evaluate(self, state: State, batch: Batch) -> Sums:
        """Returns the sums and counts of one batch at `state.eval_params`, without dropout or an update."""
        batch = self._placing_whole.put(batch)  # any size that the mesh divides: only updates use microbatches
        return self._read("eval", self._eval, state, batch, more=self._evaluation_inputs)

    @property
    def parts(self) -> int:
        """The number of parts of a batch whose gradient norms estimate the gradient noise; see `part_norm`.

        Raises:
          JaxparError: If the layout never computes the gradient of one part by itself.
        """
        return num_parts(self.layout, self.numerics)

    def part_norm(self, state: State, batch: Batch) -> jax.Array:
        """Returns the root mean square of the gradient norms of equal parts of a batch. Shape [].

        Runs a forward and a backward pass; replicas exchange one scalar.

        Raises:
          JaxparError: If the layout never computes the gradient of one part by itself.
        """
        return self._read("parts", self._norm(), state, self.put(batch))

    def _read(
        self, kind: str, program: Any, state: State, batch: Batch, *, more: Callable[[State], tuple] = lambda state: ()
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
        if key not in self._compiled:
            state = self._checked(state)
            with self.compile_context():
                with self._users_code(batch), self.trace_context():
                    lowered = program.lower(*arguments(state))
                all_techniques.check(self.layout, self._used, lowered)
                self._compiled[key] = self._compile(key, lowered)
        result = self._run(key, state, arguments)
        self._bound(result)
        return result

    def evaluation_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Returns the evaluation metrics, given the means over all batches."""
        return self.gradients.evaluation_metrics(means)

    def compute_gradients(self, params: Tree, model_state: Tree, batch: Batch) -> tuple[Tree, Sums, Tree]:
        """Returns gradients of a batch's mean loss, its sums, and the model state afterwards; nothing is updated.

        Use this to apply gradients outside of the step, possibly to newer parameters than those they were computed at.
        """
        batch = self.put(batch)
        with self._users_code(batch), self.trace_context():
            return self._differentiated(params, model_state, batch)

    def compile_gradients(self, params: Tree, model_state: Tree, batch: Batch) -> Callable[[Tree, Tree, Batch], Any]:
        """Returns the compiled program of `compute_gradients` for arguments of these shapes; it is thread-safe.

        Place its batches with `put`.
        """
        batch = self.put(batch)
        with self._users_code(batch), self.trace_context():
            return self._differentiated.lower(params, model_state, batch).compile()

    def _compile(self, key: Any, lowered):
        """Compiles a program after all processes agreed on it, and checks that pipeline stages cannot deadlock.

        Warns if devices repeat each other's work.
        """
        if self.compare_programs is not None:
            self.compare_programs(
                f"{key[0]} program ({len(self._compiled)})", hashlib.sha256(lowered.as_text().encode()).hexdigest()
            )
        program = compile_with(lowered, self.options)
        is_update = self.layout.devices > 1 and key[0] not in READ
        if is_update and find_excess(program.as_text(), self.share):
            excess = find_excess(compile_for_lines(lowered, program, self.options).as_text(), self.share)
            warnings.warn(f"{self.layout.blueprint.name}: {excess}\n  fix: {FIX}", stacklevel=3)
        if self.layout.sizes["pipe"] > 1 and not self.layout.schedule.phased:
            check_branches(program.as_text(), dict(self.layout.device_mesh.shape), self.layout.schedule)
        return program

    def _run(self, key: Any, state: State, arguments: Callable[[State], tuple]) -> Any:
        try:
            return self._compiled[key](*arguments(state))
        except (TypeError, ValueError, RuntimeError):
            valid_state = self._checked(state)  # checked only after JAX raised, so that a valid step pays nothing
            if valid_state is state:
                raise
        return self._compiled[key](*arguments(valid_state))

    @property
    def options(self) -> dict[str, Any]:
        """XLA compiler options."""
        return options(
            list(self.layout.device_mesh.devices.flat),
            self.numerics.collectives,
            all_techniques.compiler_options(self.layout),
        )

    def _checked(self, state: State) -> State:
        """Places scalars that the user assigned to the state; refuses a state of another step."""
        expected = states.abstract(self.layout, self.optimizer)
        state = place_scalars(state, expected, self.shardings)
        check_matches_step(state, expected, self.shardings)
        return state

    def _users_code(self, batch: Batch):
        shapes = ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in batch.items())
        return user_code_errors(
            f"{self.layout.blueprint.name} and its loss on {shapes}",
            rule="model, loss and optimizer accept the batch",
            fix="the line of the model or the loss that this names",
        )

    @property
    def implementations(self) -> tuple[str, ...]:
        """One sentence per island about the implementation that was chosen by the shapes lowered so far."""
        return tuple(sorted(self._used.forms))

    def lower(self, state: State, batch: Batch, *, sync_round: int = 0):
        """Returns the step lowered for these shapes, as `jax.jit(...).lower` does, and checks its precision.

        Args:
          state: Arrays, or the shapes from `abstract`.
            batch: Arrays or shapes.
          sync_round: The number of the sync round that ends the step, from 1; 0 for none, unless replicas sync in every
            step.
        """
        batch = {name: self.shaped(name, value) for name, value in batch.items()}
        with self._users_code(batch), self.trace_context(), logits.record_logits() as logits_notes:
            always = self.gradients.sync_round(1) if self.gradients.sync_every == 1 else 0
            train = self._train(sync_round or always)
            traced = train.trace(state, batch, *((np.float32(math.inf),) if self.guard else ()))
            lowered = traced.lower()
        chosen = [note for note in self.implementations if note.startswith("context by auto")]
        for note in [*map(str, logits_notes), *chosen]:
            if note not in self.layout.notes:
                self.layout = self.layout.with_note(note)
        check_rules(self.layout.parallel, self.layout.blueprint, self._used.names)
        all_techniques.check(self.layout, self._used, lowered)
        check_dims(self.layout, lambda model: traceable_loss(self.loss)(model, jax.tree.map(zeros_like_input, batch)))
        schedule = self.layout.schedule if self.layout.sizes["pipe"] > 1 else None
        self.share = flop_share(traced.jaxpr.jaxpr, self.layout.devices, schedule)
        if self.numerics.dtype:
            self.matmuls = check.count_matmuls(traced.jaxpr.jaxpr, schedule)
            check.check_bf16(self.matmuls, self.numerics.matmuls)
        return lowered

    def abstract(self) -> State:
        """Returns the state as shapes, dtypes and shardings: enough for `lower`, without allocating it."""
        shapes = states.abstract(self.layout, self.optimizer)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings)

    def subject(self, batch: Batch, *, exchanges: int = 0) -> Subject:
        """Returns this step, lowered for such a batch, for `jp.inspect`; nothing runs. See `lower`."""
        check_dict(batch)
        return subject(self, batch, sync_round=exchanges)

    def put(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the batch on its devices; arrays that are already there are not moved.

        Raises:
          JaxparError: If an entry is no array of numbers, or its first dim does not split.
        """
        return self._placing.put(batch)

    def shaped(self, name: str, value: Any) -> Any:
        """Returns the shape of a batch array with the sharding that it will have."""
        return self._placing.shaped(name, value)

    @contextmanager
    def trace_context(self):
        """A context to trace functions of the step's arrays in: sets its mesh and dim names."""
        saves = self.numerics.remat == "none"
        with (
            jax.set_mesh(self.layout.device_mesh),
            paused_gc(),
            all_techniques.tracing(self.layout, self._used, choose_form, saves_activations=saves),
        ):
            yield

    def _update(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        return self.gradients.update(self.optimizer, state, batch, self._on_device)

    def _jitted(self, function: Callable):
        return jax.jit(function, donate_argnums=0, out_shardings=(self.shardings, None))

    def _agreeing(self, update: Callable, meeting: int) -> Callable:

        def _exchange(state: State, batch: Batch, *limit: jax.Array):
            state, metrics = update(state, batch, *limit)
            return self.gradients.synchronize(state, metrics, meeting)

        return _exchange

    def _on_device(self, optimizer: Any, placed: Any = None) -> Any:
        if not self.numerics.offload:
            return optimizer
        placed = self.shardings.optimizer if placed is None else placed
        return jax.tree.map(lambda x, s: jax.device_put(x, s.with_memory_kind("device")), optimizer, placed)

    def _evaluation_inputs(self, state: State) -> tuple[Any, Tree]:
        """Returns the optimizer and exchange state that the evaluated parameters are computed from."""
        return self._held(state.optimizer) if self._held else None, state.exchange

    def _measure(self, params: Tree, model_state: Tree, batch: Batch, held: Any = None, own: Tree = ()) -> Sums:
        if held is not None:
            averaged = eval_params(self._on_device(held, eval_arrays(self.shardings.optimizer)), params)
            params = jax.lax.with_sharding_constraint(averaged, self.shardings.params)  # computed where they are stored
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
      layout: From `compose`.
      loss: (model, batch), or (model, batch, key), to (sum, count), or to a dict of them with the entry `loss`. The
      random key differs between steps and microbatches, and is equal on every layout; all evaluations share one.
      optimizer: The optax chain passed to `init_state`.
      guard: Skip the update if the loss or the gradients are not finite, or the loss is above a limit.
      seed: Seed of the loss's random keys.
      measures: Name to a function of (model, batch) to (sum, count): additional evaluation metrics.
      **numerics: `accumulate`, `precision`, `remat`, `offload`, `collectives`: see `Numerics`.

    Raises:
      JaxparError: If a setting is unknown or has an invalid value.
    """
    names = [field.name for field in dataclasses.fields(Numerics)]
    for key in numerics:
        if key not in names:
            raise refuse(
                f"{key}={numerics[key]!r:.60}", rule=f"a step takes {', '.join(names)}", fix=suggest(key, names)
            )
    if not callable(loss):
        raise refuse(
            f"loss={loss!r:.60}",
            rule="a loss is a function of (model, batch), or of (model, batch, key)",
            fix="jp.next_token_loss, or lambda model, batch: (jnp.sum(losses), losses.size)",
        )
    seed, settings = states.check_seed(seed), Numerics(**numerics)
    return Step(layout, loss, optimizer, settings, guard=guard, seed=seed, measures=measures)
