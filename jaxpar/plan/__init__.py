"""Predicts, before anything is compiled: what a layout costs and needs, and which would be better.

    jp.plan("configs/gpu_llama_8b_fsdp8.toml", "train.global_batch=512", devices=64, chip="h100")

`jp.plan` is this room, and calls `jaxpar.job.doors.plan.plan`: a job, or a step made in Python, GPUs and what joins
them make a plan that prints itself, and shows itself in a notebook.

    pages/        a plan as text, HTML and bars             rules/         published rules of thumb beside it
    search        what is first, of all that is legal       memory, time   the two sums, by cause
    techniques/   what each technique adds to them          model/         a decoder's shape, or a traced model
    machine/      chips in nodes, what they reach of their data sheets, and what a program does with them
    measured/     runs of others: the error to expect, machines calibrated on a run

Nouns: a `Candidate` (one layout, or arrays of many), `Memory` and `StepTime` by cause, a `Collective` that is the
ledger's too, a `Question` and its `Plan`.
To add a technique: a file in `techniques/` (see there); its cause is then in every sum, page and bar. A chip: a row of
`machine.hardware.HARDWARE`, or a user's file of measurements (`machine/file.py`). A model family: what answers
`planned.Model`. A schedule: nothing, it is priced by its table (`jaxpar.pipeline.tables.library`).
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """The room, which can be called: Python makes it an attribute of `jaxpar` under the name of its public function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # by name, as the function reads a job, and a room knows nothing of those above it
        return import_module("jaxpar.job.doors.plan").plan(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
