"""Attributes the bytes of an XLA instruction to a parameter or to a line of the user's code.

There are four clues. The value may be a copy, slice or cast of an argument. Operations that gather and cast a parameter
have its path in their named scope (`param:blocks.mlp.up`, see `Layout.use`). Every instruction has the stack of Python
lines that traced it. And an array may have the shape of an argument, or of a shard of it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxpar.hlo.provenance import DataFlow
from jaxpar.hlo.source_frames import is_backward, shorten_label, user_frame
from jaxpar.hlo.text import HloArray, Op, SourceFrame
from jaxpar.sharding.names import GRADIENT, HALO, MESSAGE, SCOPE, TOKENS

_HOME = Path(__file__).parent.parent
_LOSSES = str(_HOME / "step" / "losses.py")
_EXCHANGED = re.compile(rf"{HALO}\w+|{TOKENS}")  # scopes that name the cause
_SCOPED = re.compile(rf"{SCOPE}([^/()]+)")
STAGE_TO_STAGE = "from stage to stage"


@dataclass(frozen=True, slots=True)
class Cause:
    """Where an array of a compiled program comes from, as far as that is known.

    Attributes:
      name: The path of a parameter, or the function and operation of an activation.
      source: The innermost line of the user's or a model's code, `file.py:12`.
      operation: The end of the instruction's label, `bsd,dv->bsv/dot_general`.
      backward: Whether it belongs to the backward pass.
      parameters: Path of the parameter that the array is or is the gradient of; several paths if shapes are equal.
    """

    name: str
    source: str
    operation: str
    backward: bool
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Argument:
    """An array argument of a program.

    Attributes:
      path: The user's name of the array.
      role: Its row in the table of memory: parameters, optimizer state, batch.
      dtype: Its dtype in HLO's notation.
      shape: Shape of the whole array.
      shard: Shape of the shard on one device.
      placed: The array with names of dims and axes, `f32[embed/fsdp, mlp/tensor]`.
      axes: The mesh axes that split it.
      host: Whether it is in host memory.
      stacked: Whether dim 0 is layers.
    """

    path: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    placed: str
    axes: tuple[str, ...] = ()
    host: bool = False
    stacked: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the shard on one device."""
        return HloArray(self.dtype, self.shard).bytes


class ArrayCauses:
    """Finds the argument or the line of code that an array comes from.

    Args:
      arguments: Every array argument of the program.
      parameters: Number of arguments of the compiled program; XLA drops arguments that nothing reads.
      used: Path of a parameter to the shape that one device computes with, if this is neither the unsharded shape nor
        that of the stored shard.
      loss: (file, function) of the functions that compute the loss, other than jaxpar's own.
      batch_axes: Mesh axes that split examples.
      chunks: Number of chunks of layers on each stage of a pipeline.
    """

    def __init__(
        self,
        arguments: Iterable[Argument],
        *,
        parameters: int = -1,
        used: Mapping[str, Sequence[int]] | None = None,
        loss: Iterable[tuple[str, str]] = (),
        batch_axes: Iterable[str] = (),
        chunks: int = 1,
    ):
        self.arguments = tuple(arguments)
        # XLA drops unused arguments: then the n-th of the program is not the n-th here, and only shapes and scopes
        # identify them
        self.numbered = parameters == len(self.arguments)
        self._by_path = {argument.path: argument for argument in self.arguments}
        self._batch_axes = set(batch_axes)
        self._loss = set(loss)
        self._whole: dict[tuple[int, ...], list[str]] = defaultdict(list)
        self._shards: dict[tuple[int, ...], list[str]] = defaultdict(list)
        self._stacks: dict[str, set[tuple[int, ...]]] = {}
        for argument in self.arguments:
            if argument.role not in ("parameters", "arguments"):
                continue
            unsharded = [argument.shape, *([tuple(used[argument.path])] if used and argument.path in used else [])]
            if argument.stacked:
                self._stacks[argument.path] = {tuple(shape) for shape in unsharded}
            # each table has the keys of: one layer of a stack, the whole stack, and a stage's layers as one or as
            # chunks; each with any neighbouring dims merged, as XLA flattens arrays around collectives and matmuls
            for paths_by_shape, shapes in ((self._whole, unsharded), (self._shards, [argument.shard])):
                skip = 1 if argument.stacked else 0  # the layer dim of a stack is never merged
                tails = {merged for shape in shapes for merged in _merge_dims(shape[skip:])}
                heads = {shape[:skip] for shape in shapes}
                heads |= {(*chunk_dims, head[0] // chunks) for head in heads if head for chunk_dims in ((), (chunks,))}
                for key in {_key(tail) for tail in tails} | {_key((*head, *tail)) for head in heads for tail in tails}:
                    if key:
                        paths_by_shape[key].append(argument.path)

    def parameters_like(self, dims: Sequence[int], *, shards: bool = True) -> list[str]:
        """Returns the parameters of this shape: unsharded parameters or layers of a stack, else shards.

        It ignores the order of dims and dims of 1, and allows merged neighbouring dims, because XLA often changes
        these.
        """
        return self._whole.get(_key(dims)) or (self._shards.get(_key(dims), []) if shards else [])

    def stack_like(self, dims: Sequence[int]) -> str | None:
        """Returns the names of stacked parameters of exactly this shape, unsharded or as used, or None."""
        paths = [path for path, shapes in self._stacks.items() if tuple(dims) in shapes]
        return join_names(paths) if paths else None

    def _candidate_parameters(
        self, array: HloArray, kind: str, axes: set[str], label: str, *, summed: bool
    ) -> list[str]:
        """Returns the parameters that a collective may send, judging by its shape and axes."""
        # a gather's result and a scatter's operand are unsharded: matching shards too would find wrong parameters
        shards = kind not in ("all-gather", "reduce-scatter")
        paths = self.parameters_like(array.dims, shards=shards)
        if kind == "all-gather" and "jvp(" not in label:  # a user's own step gathers updated parameters
            return paths
        if kind == "all-gather":
            return [path for path in paths if axes <= set(self._by_path[path].axes)]
        return paths if summed or {axis.lstrip("~") for axis in axes} <= self._batch_axes else []

    def is_loss(self, frame: SourceFrame) -> bool:
        """Whether a line of Python belongs to a loss function."""
        return frame.file == _LOSSES or any(
            frame.file == file and frame.function.split(".<locals>")[0] == function for file, function in self._loss
        )

    def scope(self, label: str) -> str | None:
        """Returns the path of the parameter in an operation's named scope, or None."""
        paths = set(_SCOPED.findall(label))
        return paths.pop().replace(".", "/") if len(paths) == 1 else None

    def find_cause(
        self, trace: DataFlow, op: Op, operand: Op, arrays: Sequence[HloArray], *, kind: str, axes: Iterable[str]
    ) -> Cause:
        """Finds the cause of an instruction's operand.

        It tries the clues in order of certainty: a scope of an exchange, an argument, a scope, a shape, and
        finally the line of code.

        Args:
          trace: The data flow of the program.
          op: The instruction.
          operand: One of its operands.
          arrays: Shapes by which a parameter may be recognised.
          kind: Kind of the collective.
          axes: Axes of the collective. A parameter is gathered over the axes that split it; its gradient is summed over
            the axes that split examples.
        """
        producer = trace.producer(operand.name) or op
        label = trace.label(op)
        backward = is_backward(producer.label) or is_backward(label)
        frame = user_frame(trace.module.stack(producer) or trace.module.stack(op))
        source = f"{Path(frame.file).name}:{frame.line}" if frame else ""
        operation = shorten_label(producer.label)
        if MESSAGE in label:
            sender = user_frame(trace.module.stack(op))
            location = f"{Path(sender.file).name}:{sender.line}" if sender else ""
            return Cause(STAGE_TO_STAGE, location, shorten_label(label), False, ())
        if exchanged := _EXCHANGED.search(label):
            return Cause(exchanged[0], source, operation, backward, ())
        number = trace.argument_number(operand.name)
        if number is not None and self.numbered and (kind == "all-gather" or not backward):
            argument = self.arguments[number]
            if argument.role in ("parameters", "arguments"):
                return Cause(argument.path, source, operation, False, (argument.path,))
        if scope_path := self.scope(producer.label):
            return Cause(scope_path, source, operation, backward, (scope_path,))
        is_sum = GRADIENT in label or GRADIENT in producer.label
        candidates = next(
            (
                paths
                for array in arrays
                if (paths := self._candidate_parameters(array, kind, set(axes), producer.label, summed=is_sum))
            ),
            [],
        )
        if candidates:
            return Cause(join_names(candidates), source, operation, backward, tuple(candidates))
        if is_sum and any(array.dims for array in arrays):  # in a shape of no parameter, as after another sum
            return Cause("parameters", source, operation, True, ("parameters",))
        location = f"{frame.function.split('.<locals>')[0]}: " if frame and frame.function else ""
        return Cause(f"{location}{operation}", source, operation, backward, ())


def join_names(names: Sequence[str]) -> str:
    """Joins names of alternatives: `a or b or 3 more`."""
    return " or ".join(names[:2]) + (f" or {len(names) - 2} more" if len(names) > 2 else "")


def _merge_dims(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns all shapes that result from merging neighbouring dims of a shape."""
    if len(shape) < 2 or len(shape) > 6:  # 2^(n-1) choices: more dims are left unmerged
        return [tuple(shape)]
    tails = _merge_dims(shape[1:])
    return [(shape[0], *tail) for tail in tails] + [(shape[0] * tail[0], *tail[1:]) for tail in tails]


def _key(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in dims if dim != 1))
