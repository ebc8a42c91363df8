"""The origin of an instruction: the line of a user's source that traced it, its pass, and its operation."""

import linecache
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any

import flax
import jax
import jaxlib
import optax
from jax.extend.core import JaxprEqn

from jaxpar.hlo.text import SourceFrame
from jaxpar.optim import step_inputs
from jaxpar.sharding.names import AGAIN, GRADIENT

_WRAPPERS = ("jit(", "while", "body", "eval_jaxpr", "checkpoint", "rematted", "closed_call", "pipeline:")
_HOME = Path(__file__).parent.parent
# files whose lines do not explain an instruction: jaxpar's own step, Python, and libraries of layers, transformations
# or optimizers. Models are not among them, jaxpar's or a package's, wherever they are installed
MACHINERY = tuple(
    [str(_HOME / room) for room in ("sharding", "exchange", "parallel", "inspector", "job")]
    + [
        str(_HOME / "step" / file)
        for file in (
            "step.py",
            "compiler.py",
            "model_flop.py",
            "gradients.py",
            "per_replica",
            "unpipelined.py",
        )
    ]
    + [str(_HOME / "models" / file) for file in ("remat.py", "output_dtype.py")]
    + [str(Path(module.__file__ or "").parent) for module in (jax, jaxlib, flax, optax)]  # symlinks may lead elsewhere
    + ["<"]
)
_ISLANDS = str(_HOME / "models" / "islands.py")
_PYTHON = sysconfig.get_path("stdlib")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/([^/.]+)")
_LIBRARIES = frozenset(
    "IPython _pytest absl chex diffrax distrax einops equinox etils flax haiku ipykernel jax jaxlib jaxopt jaxtyping "
    "beartype lineax numpy optax optimistix orbax pluggy pytest runpy scipy treescope".split()
)
_UPDATE = str(Path(step_inputs.__file__ or ""))  # the one place that asks an optimizer for its updates
_EXCHANGES = str(_HOME / "exchange") + "/"


def is_backward(label: str) -> bool:
    """Whether an operation belongs to the backward pass or adds up gradients; false for recomputation."""
    return ("transpose(" in label or GRADIENT in label) and AGAIN not in label


def is_recomputed(label: str) -> bool:
    """Whether an operation is a recomputation of the forward pass in the backward pass."""
    return AGAIN in label


def shorten_label(label: str) -> str:
    """Returns the end of a label, without the names of JAX's transformations and loops.

    >>> shorten_label("jit(f)/while/body/transpose(jvp(Block))/bsd,df->bsf/dot_general")
    'bsd,df->bsf/dot_general'
    """
    words = [word for word in re.split(r"/(?![^(]*\))", label) if not word.startswith(_WRAPPERS)]
    words = [re.sub(r"^(?:transpose|jvp|vmap|\()+|\)+$", "", word) for word in words]
    end = "/".join([word for word in words if word][-2:]) or label
    parts = end.split(":")  # XLA labels combined instructions a:b:c
    return parts[0] if len(parts) == 1 else f"{parts[0]} and {len(parts) - 1} more"


def user_frame(stack: Sequence[SourceFrame], enclosing: SourceFrame | None = None) -> SourceFrame | None:
    """Returns the innermost line of Python outside of libraries and of jaxpar's code that runs a step.

    Without such a line it is `enclosing`, or else the innermost of all.
    """
    fallback = enclosing or (stack[0] if stack else None)
    return next((frame for frame in stack if not _is_machinery(frame.file)), fallback)


@cache
def _is_machinery(file: str) -> bool:
    if file.startswith(MACHINERY):
        return True
    if package := _INSTALLED.search(file):
        return package[1] in _LIBRARIES
    return file.startswith(_PYTHON)


def equation_frame(equation: JaxprEqn, enclosing: SourceFrame | None = None) -> SourceFrame | None:
    """Returns the innermost line of the user's code that traced an equation of a jaxpr; None if unknown.

    That of an island's result, which has a name (`jaxpar.models.islands.attention`), is the line that calls it.

    Args:
      equation: The equation.
      enclosing: The line of the equation in whose jaxpr it stands: JAX keeps the lines of an inner function alone.
    """
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback else ()
    stack = [SourceFrame(frame.file_name, frame.line_num, frame.function_name) for frame in frames]
    named = [frame for frame in stack if equation.primitive.name != "name" or frame.file != _ISLANDS]
    found = user_frame(named, enclosing)
    number = next((number for number, frame in enumerate(stack) if frame is found), None)
    return found if found is None or number is None else replace(found, column=_column(traceback, number))


def _column(traceback: Any, number: int) -> int | None:
    codes, offsets = traceback.raw_frames()
    return _column_of_code(codes[number], offsets[number])


@cache
def _column_of_code(code: CodeType, offset: int) -> int | None:
    """Returns the column, counted from 1, of the expression of an instruction; None if Python keeps none."""
    line, _, column, _ = next(islice(code.co_positions(), offset // 2, None), (None, None, None, None))
    if line is None or column is None:
        return None
    before = linecache.getline(code.co_filename, line).encode()[:column]  # Python counts bytes
    return len(before.decode(errors="ignore") if before else " " * column) + 1


def is_update_equation(equation: JaxprEqn) -> bool:
    """Whether an equation of a step's jaxpr belongs to the optimizer or the exchange, not to the model."""
    traceback = equation.source_info.traceback
    return any(
        (frame.file_name == _UPDATE and frame.function_name == "update") or frame.file_name.startswith(_EXCHANGES)
        for frame in (traceback.frames if traceback else ())
    )
