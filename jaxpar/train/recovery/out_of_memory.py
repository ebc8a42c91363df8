"""Explains that a step is out of memory by what `jp.inspect` knows of it, and names the newest saved state."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxpar.errors import JaxparError, Problem
from jaxpar.inspector.report import inspect
from jaxpar.step.checks.out_of_memory import GRADIENTS, TEMPORARY, explain, gradient_bytes, state_bytes
from jaxpar.step.memory_error import READ, OutOfMemoryError, explain_error
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
    causes = _compiled_bytes(step, batch) if kind not in READ and jax.process_count() == 1 else {}
    if not causes:
        causes = state_bytes(layout, step.optimizer, offload=numerics.offload)
        causes |= _temporary(step, kind)
    rows = max((value.shape[0] for value in batch.values() if value.shape), default=0) // layout.replicas
    subject = "an evaluation" if kind == "eval" else "a step"
    return explain(subject, layout, numerics, causes, error, rows=rows)


def _compiled_bytes(step: Step, batch: Mapping[str, Any]) -> dict[str, int]:
    """Returns the bytes by cause of the compiled step; {} if it cannot be compiled in the memory that is left."""
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
    return {} if kind in READ else {GRADIENTS: gradient_bytes(step.layout, step.optimizer)}


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
