"""Every layout that a model, a batch and a number of devices allow."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from jaxpar.errors import refuse
from jaxpar.parallel.declare import DECLARED
from jaxpar.pipeline.tables.library import LIBRARY
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.heads import by_default
from jaxpar.plan.model.shape import Shape

Row = tuple[int, int, int, int, int, int, str, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices of a search.

    Attributes:
      schedules: Of pipelines.
      chunks: Parts of the model on each stage, where a schedule interleaves.
      remats: What may be computed again.
      context: The most devices that share a sequence; 16 are what Llama 3 was trained with at 131,072 tokens; 0 means
        as many as divide it.
      tensor: The most devices that share a matrix; 0 means as many as divide it.
      pipe: The most stages; 0 means as many as there are layers.
    """

    schedules: tuple[str, ...] = ("1f1b_phased", "interleaved_phased", "gpipe")
    chunks: tuple[int, ...] = (2, 4)
    remats: tuple[str, ...] = ("none", "all_dots", "dots", "full")
    context: int = 16
    tensor: int = 0
    pipe: int = 0


def legal(shape: Shape, *, devices: int, rows: int, choices: Choices | None = None) -> Candidate:
    """Returns all candidates that use all devices, as arrays.

    The tensor axis divides heads, heads of keys and values, and the feed-forward; context, and with sequence
    parallelism both together, the sequence; replicas divide the rows; no stage
    is without a layer. `fsdp` with zero=0 would be `data`, and is left out.

    Args:
      shape: The model.
      devices: How many.
      rows: Of a step's global batch.
      choices: What else may vary; the defaults of `Choices`.

    Raises:
      JaxparError: If there is none: more devices than the model and the batch can use.
    """
    choices = choices or Choices()
    within_reach(devices, rows)
    found = list(_rows(shape, devices, rows, choices))
    if not found:
        raise _unusable(shape, devices, rows, choices)
    every = _arrays(found, (False, True), choices.remats)
    every = pick(every, ~every.sequence | ((every.tensor > 1) & (shape.seq % (every.tensor * every.context) == 0)))
    return replace(every, head=by_default(shape, every))


def replicated(*, devices: int, rows: int, choices: Choices) -> Candidate:
    """Returns the candidates that leave a model in one piece: data and fsdp alone, as arrays.

    Raises:
      JaxparError: If the devices do not divide the rows.
    """
    within_reach(devices, rows)
    if rows % devices:
        raise refuse(
            f"{devices:,} devices for {rows} rows",
            rule="data x fsdp, the devices, divides the rows of the global batch",
            fix=f"--devices {max(n for n in divisors(rows) if n <= devices)}, or train.global_batch = "
            f"{-(-rows // devices) * devices}",
        )
    found = [
        (1, devices // fsdp, fsdp, 1, 1, zero, "1f1b", 1, rows // devices // microbatches, microbatches)
        for fsdp in divisors(devices)
        for zero in _stages(fsdp)
        for microbatches in divisors(rows // devices)
    ]
    return _arrays(found, (False,), choices.remats)


def pick(candidates: Candidate, which: np.ndarray) -> Candidate:
    """Returns some of many candidates: those that a mask or indices name."""
    return Candidate(**{each.name: getattr(candidates, each.name)[which] for each in fields(Candidate)})


def _arrays(found: list[Row], sequences: tuple[bool, ...], remats: tuple[str, ...]) -> Candidate:
    """Returns each row with each choice that goes with every row, as arrays."""
    columns = [np.array(column) for column in zip(*found, strict=True)]
    last = [(sequence, remat) for sequence in sequences for remat in remats]
    count = len(found)
    table = {
        key: np.repeat(column, len(last))
        for key, column in zip(
            (*DECLARED, "zero", "schedule", "chunks", "microbatch", "microbatches"),
            columns,
            strict=True,
        )
    }
    table["sequence"] = np.tile(np.array([sequence for sequence, _ in last]), count)
    table["remat"] = np.tile(np.array([remat for _, remat in last]), count)
    return Candidate(**table, head=np.full(len(table["remat"]), "last"))


def within_reach(devices: int, rows: int) -> None:
    """Refuses numbers of devices and rows that are none."""
    for name, number in (("devices", devices), ("rows of the global batch", rows)):
        if type(number) is not int or not 1 <= number <= 1_000_000:
            raise refuse(f"{number!r} {name}", rule="a whole number within 1..1,000,000", fix="64")


def at(candidates: Candidate, index: int) -> Candidate:
    """Returns one of many candidates, with plain numbers."""
    return Candidate(**{field.name: getattr(candidates, field.name)[index].item() for field in fields(Candidate)})


def divisors(number: int) -> list[int]:
    """Returns what divides a number, smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _rows(shape: Shape, devices: int, rows: int, choices: Choices) -> Iterator[Row]:
    for pipe in divisors(devices):
        if pipe > min(shape.layers, choices.pipe or shape.layers):
            continue
        for tensor in divisors(devices // pipe):
            if not _shares(shape, tensor, choices):
                continue
            for context in divisors(devices // pipe // tensor):
                replicas = devices // pipe // tensor // context
                if shape.seq % context == 0 and context <= (choices.context or context) and rows % replicas == 0:
                    yield from _of_mesh(shape, pipe, (context, tensor), replicas, rows // replicas, choices)


def _of_mesh(
    shape: Shape, pipe: int, inner: tuple[int, int], replicas: int, rows: int, choices: Choices
) -> Iterator[Row]:
    for fsdp in divisors(replicas):
        for zero in _stages(fsdp):
            for microbatches in divisors(rows):
                for name, chunks in _tables(shape, pipe, microbatches, choices):
                    yield pipe, replicas // fsdp, fsdp, *inner, zero, name, chunks, rows // microbatches, microbatches


def _stages(fsdp: int) -> tuple[int, ...]:
    """Returns the stages of ZeRO that so many devices can share: of one device none, or it would be data."""
    return (1, 2, 3) if fsdp > 1 else (0,)


def _tables(shape: Shape, pipe: int, microbatches: int, choices: Choices) -> Iterator[tuple[str, int]]:
    """Yields the schedules that take so many stages and microbatches, with their chunks."""
    if pipe == 1:
        yield "1f1b", 1
        return
    for name in choices.schedules:
        kind = LIBRARY[name]
        if microbatches < kind.least(pipe) or (kind.whole and microbatches % pipe):
            continue
        for chunks in kind.chunks if len(kind.chunks) == 1 else choices.chunks:
            if chunks in kind.chunks and pipe * chunks <= shape.layers:
                yield name, chunks


def _shares(shape: Shape, tensor: int, choices: Choices) -> bool:
    """Returns whether so many devices can share the matrices."""
    within_most = tensor <= (choices.tensor or tensor)
    return within_most and not any(n % tensor for n in (shape.heads, shape.kv_heads or shape.heads, shape.width))


def _unusable(shape: Shape, devices: int, rows: int, choices: Choices):
    pipe, tensor = choices.pipe or shape.layers, max(n for n in divisors(shape.heads) if _shares(shape, n, choices))
    context = max(n for n in divisors(shape.seq) if n <= (choices.context or n))
    most = pipe * tensor * context * rows
    return refuse(
        f"{devices:,} devices for {shape.layers} layers, {shape.heads} heads ({shape.kv_heads or shape.heads} of keys "
        f"and values) and {rows} rows",
        rule=f"pipe is at most {pipe}, tensor at most {tensor} and divides the heads, context at most {context} and "
        "divides the tokens of a row, data x fsdp divides the rows"
        + (f": at most {most:,} devices" if most < devices else ""),
        fix=f"a global batch of {rows * -(-devices // most)}, or fewer devices" if most < devices
        else "a number of devices, or a global batch, with more small factors",
    )  # fmt: skip
