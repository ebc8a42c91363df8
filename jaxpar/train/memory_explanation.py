"""Explains that a device's memory does not hold the first state of a run, or a step, and names the newest saved state.

The bytes of a step are those that `jp.inspect` knows of it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import optax

from jaxpar.errors import JaxparError, Problem
from jaxpar.parallel.layout import Layout
from jaxpar.step.checks.out_of_memory import GRADIENTS, TEMPORARY, explain, explain_state, gradient_bytes, state_bytes
from jaxpar.step.memory_error import READ_ONLY_PROGRAMS, OutOfMemoryError, explain_error, is_out_of_memory
from jaxpar.step.step import Step
from jaxpar.train.run import Run


def explain_step(step: Step, kind: str, batch: Mapping[str, Any], error: BaseException) -> OutOfMemoryError:
    """Returns the error to raise in place of XLA's: bytes by cause, the device's memory, the changes that free most.

    Args:
      step: The step.
      kind: Name of its program: train, eval, parts, or that of an exchange.
      batch: Anything with shape and dtype, by name.
      error: XLA's error.
    """
    step.unfinished.wait()  # simulated devices would compute while XLA compiles with their threads
    layout, numerics = step.layout, step.numerics
    causes = _compiled_bytes(step, batch) if kind not in READ_ONLY_PROGRAMS and jax.process_count() == 1 else {}
    if not causes:
        causes = state_bytes(layout, step.optimizer, offload=numerics.offload)
        causes |= _temporary(step, kind)
    rows = max((value.shape[0] for value in batch.values() if value.shape), default=0) // layout.replicas
    subject = "an evaluation" if kind == "eval" else "a step"
    return explain(subject, layout, numerics, causes, error, rows=rows)


def _compiled_bytes(step: Step, batch: Mapping[str, object]) -> dict[str, int]:
    """Returns the bytes by cause of the compiled step; {} if it cannot be compiled in the memory that is left."""
    from jaxpar.inspector.report import inspect  # most runs do not need the inspector

    try:
        report = inspect(step, batch)
    except (JaxparError, jax.errors.JaxRuntimeError):  # the first error is the one to report
        return {}
    return {share.cause: share.bytes for share in report.memory}


def _temporary(step: Step, kind: str) -> dict[str, int]:
    """Returns the temporary bytes of a compiled program; for an update that is not compiled, the bytes of gradients."""
    analyses = [program.memory_analysis() for key, program in step.programs.items() if key[0] == kind]
    sizes = [analysis.temp_size_in_bytes for analysis in analyses if analysis is not None]
    if sizes:
        return {TEMPORARY: max(sizes)}
    return {} if kind in READ_ONLY_PROGRAMS else {GRADIENTS: gradient_bytes(step.layout, step.optimizer)}


def name_saved_state(run: Run, error: BaseException) -> OutOfMemoryError:
    """Adds to the error where the run's last state is saved.

    Args:
      run: The run.
      error: XLA's error, or its explanation.
    """
    explained = explain_error(run.step, error)  # not yet explained if XLA raised it when results were read
    store = run.store
    if store is not None and jax.process_count() == 1:  # else others may never join the save
        store.wait()
    steps = store.steps() if store is not None else []
    first, *others = explained.problems
    saved = (
        f"step {steps[-1]} is saved: after such a change the same command continues from it"
        if steps
        else "no step of this run is saved yet, so nothing is lost but its beginning"
    )
    return OutOfMemoryError(Problem(first.got, first.rule, f"{first.fix}. {saved}"), *others)


@contextmanager
def explained_state(
    layout: Layout, optimizer: optax.GradientTransformation, *, offload: bool = False
) -> Iterator[None]:
    """Context for creating or restoring a state: explains which arrays need the memory if a device runs out of it.

    Args:
      layout: The layout of the state.
      optimizer: The optax chain.
      offload: Whether the optimizer state is in host memory.

    Raises:
      OutOfMemoryError: In place of XLA's error.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise explain_state(layout, optimizer, error, offload=offload) from error
