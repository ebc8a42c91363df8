"""Predicts the step time and the memory of every legal layout, before anything is compiled, and ranks them.

    jp.plan("configs/gpu_llama_8b_fsdp8.toml", "train.global_batch=512", devices=64, chip="h100")

`jp.plan` is this package, which is callable: it calls `jaxpar.job.plan_api.plan` with a job (or a step made in
Python), GPUs and their links, and returns a plan that prints itself, and displays itself in a notebook.

    pages/        a plan as text, HTML and bars             decision_table published rules of thumb
    search        ranks all legal layouts                   memory, time   bytes and seconds, by cause
    techniques/   bytes and seconds that each one adds      model/         a decoder's shape, or a traced model
    traced_*      the shape, the bytes and the seconds of a model that is no decoder
    machine/      chips in nodes, their efficiency, and the kernels and overlap of a training program
    measurements/ published runs: the expected error, and machines calibrated on a run

Terms: a `Candidate` (one layout, or arrays of many), `Memory` and `StepTime` by cause, a `Collective` (the same class
as in the ledger of a compiled program), a `Question` and its `Plan`.
To add a technique: a file in `techniques/` (see there); sums, pages and bars then show its cause. A chip: a row of
`machine.hardware.HARDWARE`, or a user's file of measurements (`machine/hardware_file.py`). A model family: classes with
the protocols `Model` and `LayoutCosts` of `model_protocol`. A schedule: nothing, its table gives its price
(`jaxpar.pipeline.tables.library`).
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A callable module: Python sets it as the attribute `jaxpar.plan`, the name of its public function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # imported by name: the function reads a job, and this package does not import packages above it
        return import_module("jaxpar.job.plan_api").plan(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
