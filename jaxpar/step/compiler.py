"""Traces, checks and compiles the programs of one training step.

    function ─► traced under the layout ─► lowered ─► checked ─► agreed on by all processes ─► compiled
                names, islands, mesh                 rules, techniques, dtypes

The compiler records facts from the traces: the names and islands that the model uses, the dtypes of its matmuls, and
the FLOP that each device should compute.
"""

import gc
import hashlib
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any

import jax
import numpy as np
from jax.stages import Lowered, Wrapped

from jaxpar.errors import user_code_errors
from jaxpar.hlo.flop_share import FlopShare, find_excess, flop_share
from jaxpar.mesh.xla import compile_for_lines, compile_with, options
from jaxpar.models.settings.computing import record_logits
from jaxpar.parallel.layout import Layout, with_logits, with_note
from jaxpar.parallel.rule_problems import check_rules
from jaxpar.parallel.techniques import all_techniques
from jaxpar.parallel.techniques.base import Choose, refuse_choice
from jaxpar.sharding.infer_names.infer_dims import zeros_like_input
from jaxpar.step.checks import precision
from jaxpar.step.checks.updates import check_dims
from jaxpar.step.numerics import Numerics
from jaxpar.step.state import State
from jaxpar.step.stochastic_loss import traceable_loss

Batch = Mapping[str, Any]
NO_LIMIT = np.float32(math.inf)  # of the loss, for a guarded update


class Compiler:
    """Traces, checks and compiles the programs of one step.

    Attributes:
      layout: The sharding of all arrays. After the first lowering, its notes or details describe how the loss computes
        its logits.
      matmuls: After the first lowering with bf16, the actual dtypes of the matmuls.
      share: The matmuls that each device should run in the last lowered update; None if a trip count depends on the
        data.
      compare_programs: With several processes, a function that gets (program name, hash) before compilation.
      compile_context: With several processes, a context around tracing, comparing and compiling a program.
    """

    def __init__(self, layout: Layout, loss: Callable, numerics: Numerics, choose: Choose = refuse_choice):
        """Sets the layout and the numerics of all programs.

        Args:
          layout: The sharding of all arrays.
          loss: The loss function, in order to check guessed dim names.
          numerics: Precision, remat and accumulation.
          choose: Chooses the implementation of attention if `context_by="auto"`.
        """
        self.layout, self._loss, self._numerics, self._choose = layout, loss, numerics, choose
        self.matmuls: precision.Matmuls | None = None
        self.share: FlopShare | None = None
        self.compare_programs: Callable[[str, str], None] | None = None
        self.compile_context: Callable[[], AbstractContextManager[None]] = nullcontext
        self._use = all_techniques.ModelUse()
        self._count = 0

    @property
    def options(self) -> dict[str, Any]:
        """XLA compiler options."""
        devices = list(self.layout.device_mesh.devices.flat)
        return options(devices, self._numerics.collectives, all_techniques.compiler_options(self.layout))

    @property
    def implementations(self) -> tuple[str, ...]:
        """One sentence per island about its implementation for the shapes that were lowered so far."""
        return tuple(sorted(self._use.forms))

    @contextmanager
    def trace_context(self):
        """Context for tracing functions of the step's arrays: sets the step's mesh and dim names."""
        saves = self._numerics.remat == "none"
        with (
            jax.set_mesh(self.layout.device_mesh),
            pause_gc(),
            all_techniques.tracing(self.layout, self._use, self._choose, saves_activations=saves),
        ):
            yield

    @contextmanager
    def user_code(self, batch: Batch):
        """Like `trace_context`; errors of the model, the loss or the optimizer also describe the batch."""
        shapes = ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in batch.items())
        with (
            user_code_errors(
                f"{self.layout.blueprint.name} and its loss on {shapes}",
                rule="model, loss and optimizer accept the batch",
                fix="change the line of the model or the loss above",
            ),
            self.trace_context(),
        ):
            yield

    def lower(self, program: Wrapped, batch: Batch, *arguments: Any) -> Any:
        """Lowers a program without an update.

        Args:
          program: A jitted function.
          batch: Its batch, for errors.
          *arguments: All arguments of the function.
        """
        with self.user_code(batch):
            lowered = program.lower(*arguments)
        all_techniques.check(self.layout, self._use, lowered)
        return lowered

    def lower_update(self, program: Wrapped, state: State, batch: Batch, *, guard: bool) -> Any:
        """Lowers an update, and checks its use of rules, names and dtypes.

        Args:
          program: A jitted function of (state, batch); if guarded, also of a limit of the loss.
          state: Arrays or shapes.
          batch: Shapes with shardings.
          guard: Whether the update is guarded.

        Raises:
          JaxparError: If the model does not use what the layout declares, or matmuls are not in the requested dtype.
        """
        with self.user_code(batch), record_logits() as all_logits:
            traced = program.trace(state, batch, *((NO_LIMIT,) if guard else ()))
            lowered = traced.lower()
        chosen = [note for note in self.implementations if note.startswith("context by auto")]
        self.layout = reduce(with_logits, all_logits, self.layout)
        for note in chosen:
            if note not in self.layout.notes:
                self.layout = with_note(self.layout, note)
        check_rules(self.layout.parallel, self.layout.blueprint, self._use.names)
        all_techniques.check(self.layout, self._use, lowered)
        check_dims(self.layout, lambda model: traceable_loss(self._loss)(model, jax.tree.map(zeros_like_input, batch)))
        microbatches, exchange = self._numerics.accumulate * self.layout.microbatches, self.layout.parallel.exchange
        replicas = self.layout.sizes["data"] if exchange.per_replica and not exchange.same_examples else 1
        if microbatches * replicas > 1:
            from jaxpar.step.checks.trace_warnings import check_parts  # a loss of the whole batch is not in parts

            check_parts(self.layout, self._loss, batch, microbatches=microbatches, replicas=replicas)
        if self.layout.sizes.get("expert", 1) > 1:
            from jaxpar.step.checks.trace_warnings import check_experts  # other steps do not load it

            check_experts(self.layout, traced.jaxpr.jaxpr)
        schedule = self.layout.schedule if self.layout.sizes["pipe"] > 1 else None
        self.share = flop_share(traced.jaxpr.jaxpr, self.layout.devices, schedule, self.layout)
        if self._numerics.dtype:
            self.matmuls = precision.count_matmuls(traced.jaxpr.jaxpr, schedule)
            precision.check_bf16(self.matmuls, self._numerics.matmuls)
        return lowered

    def compile(self, name: str, lowered: Lowered, *, is_update: bool) -> Any:
        """Compares a program between processes, compiles it, and checks that pipeline stages cannot deadlock.

        Warns if devices repeat each other's work in an update.
        """
        if self.compare_programs is not None:
            digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            self.compare_programs(f"{name} program ({self._count})", digest)
        self._count += 1
        program = compile_with(lowered, self.options)
        if is_update and self.layout.devices > 1 and (excess := find_excess(program.as_text(), self.share)):
            lines = compile_for_lines(lowered, program, self.options).as_text()
            excess = find_excess(lines, self.share) or excess
            fixes = [*all_techniques.island_fixes(self.layout, self._use), *excess.fixes]
            fix = "; or ".join(dict.fromkeys(fixes))
            warnings.warn(f"{self.layout.blueprint.name}: {excess}\n  fix: {fix}", stacklevel=3)
        if self.layout.sizes["pipe"] > 1 and not self.layout.schedule.phased:
            from jaxpar.hlo.branches import check_branches  # a plain step has no branches to check

            check_branches(program.as_text(), dict(self.layout.device_mesh.shape), self.layout.schedule)
        return program


@contextmanager
def pause_gc() -> Iterator[None]:
    """Disables Python's garbage collector until the context ends, which saves a tenth of the time to the first step.

    The collector would scan all objects of tracing and of imports. Source: `python -m tests.bench.overhead`.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class UnfinishedPrograms:
    """Bounds the number of unfinished programs; None for no bound.

    Simulated devices share a thread pool, which some dozens of unfinished steps fill and deadlock.
    """

    def __init__(self, limit: int | None):
        self.limit, self._results = limit, deque()

    def add(self, result: object) -> None:
        """Adds the result of a program; waits for the oldest if there are more than the limit."""
        if self.limit is not None:
            self._results.append(result)
            if len(self._results) > self.limit:
                jax.block_until_ready(self._results.popleft())

    def wait(self) -> None:
        """Waits for all programs; drops those that failed, whose error is known."""
        while self._results:
            try:
                jax.block_until_ready(self._results.popleft())
            except jax.errors.JaxRuntimeError:
                continue
