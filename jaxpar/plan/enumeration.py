"""Every legal layout of a model, a batch and a number of devices, as a table that each technique expands.

    left 8                                     one row: 8 devices are unassigned
    pipe 1 left 8 | pipe 2 left 4 | ...        each technique expands a row to one per legal size of its axis
    ... microbatches, settings, remat          further options expand rows in the same way

Rows are in the order of the equivalent nested loops.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpar.errors import refuse
from jaxpar.mesh.axes import batch_axes
from jaxpar.parallel.declaration import DECLARED
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.model.shape import NamedDims, Shape
from jaxpar.plan.techniques.base import divisors
from jaxpar.plan.techniques.table import TECHNIQUES

Table = dict[str, np.ndarray]
Ways = Callable[..., Sequence[Mapping[str, Any]]]


def legal_layouts(shape: Shape, *, devices: int, rows: int, choices: Choices | None = None) -> Candidate:
    """Returns all candidates of a decoder that use all devices, as arrays.

    Args:
      shape: The model.
      devices: Number of devices.
      rows: Examples of the global batch.
      choices: Further options; None means the defaults of `Choices`.

    Raises:
      JaxparError: If there is none: more devices than the model and the batch can use.
    """
    choices = choices or Choices()
    candidates = all_layouts(shape, devices=devices, rows=rows, choices=choices)
    if candidates is None:
        raise _unusable(shape, devices, rows, choices)
    return candidates


def all_layouts(model: NamedDims, *, devices: int, rows: int, choices: Choices) -> Candidate | None:
    """Returns all candidates that use all devices, as arrays; None if there is none.

    Each technique names the legal sizes of its axis and its further settings; replicas divide the rows.

    Raises:
      JaxparError: If a number is out of its range.
    """
    check_counts(devices, rows)
    table = _meshes(model, devices, rows, choices)
    if not len(table["left"]):
        return None
    table = _expand(table, ("left",), lambda rows_left: [_batch(rows_left, count) for count in divisors(rows_left)])
    del table["left"]
    for entry in TECHNIQUES.values():
        if settings := entry.settings:
            table = _expand(table, settings.needs, lambda *row, options=settings.options: options(model, choices, *row))
    remats = [{"remat": remat} for remat in choices.remats]
    # offloading is not implemented in pipelines
    pipeline_remats = [entry for entry in remats if entry["remat"] != "offload"]
    table = _expand(table, ("pipe",), lambda pipe: remats if pipe == 1 else pipeline_remats)
    further_axes = {axis: table.pop(axis) for axis in TECHNIQUES if axis not in DECLARED}
    candidates = Candidate(**table, head=np.full(len(table["remat"]), "last"), axes=further_axes)
    for entry in TECHNIQUES.values():
        candidates = candidates if entry.why_not(model) else entry.derived_settings(model, candidates)
    return candidates


def select(candidates: Candidate, which: np.ndarray) -> Candidate:
    """Selects candidates by a mask or by indices."""
    return candidates.map_fields(lambda value: value[which])


def select_one(candidates: Candidate, index: int) -> Candidate:
    """Returns one of many candidates, with Python numbers."""
    return candidates.map_fields(lambda value: value[index].item())


def check_counts(devices: int, rows: int) -> None:
    """Raises an error unless devices and rows are whole numbers within 1..1,000,000."""
    for name, number in (("devices", devices), ("examples of the global batch", rows)):
        if type(number) is not int or not 1 <= number <= 1_000_000:
            raise refuse(f"{number!r} {name}", rule="a whole number within 1..1,000,000", fix="64")


def _meshes(model: NamedDims, devices: int, rows: int, choices: Choices) -> Table:
    """Returns the sizes of all axes with their variants; the column `left` has the examples per replica."""
    table, last = {"left": np.array([devices])}, [*TECHNIQUES][-1]
    for axis, technique in TECHNIQUES.items():
        sizes = technique.allowed_sizes(model, rows, choices)

        def axis_options(left: int, axis=axis, sizes=sizes, technique=technique) -> list[dict[str, Any]]:
            tried_sizes = [left] if axis == last else divisors(left)
            fits = [size for size in tried_sizes if size in sizes]
            return [{axis: size, "left": left // size, **extra} for size in fits for extra in technique.variants(size)]

        table = _expand(table, ("left",), axis_options)
    replicas = np.prod([table[axis] for axis in batch_axes() if axis in table], axis=0, dtype=int)
    divides = rows % replicas == 0
    return {name: column[divides] for name, column in table.items()} | {"left": rows // replicas[divides]}


def _batch(rows: int, count: int) -> dict[str, int]:
    return {"microbatch": rows // count, "microbatches": count, "left": rows}


def _expand(table: Table, needs: tuple[str, ...], ways: Ways) -> Table:
    """Repeats every row of a table once per option of that row, in order, and adds the options' columns.

    Args:
      table: Columns by name, all of the same length.
      needs: Columns of whole numbers that determine the options.
      ways: Returns the options for values of these columns; all options have the same keys, the new columns.
    """
    count = len(next(iter(table.values())))
    code = np.zeros(count, int)
    for name in needs:  # rows that agree in `needs` have the same options, which are computed once
        code = np.unique(code * (table[name].max(initial=0) + 1) + table[name], return_inverse=True)[1]
    _, first, kind = np.unique(code, return_index=True, return_inverse=True)
    options = [ways(*(table[name][i].item() for name in needs)) for i in first]
    flat = [option for row_options in options for option in row_options]
    counts = np.array([len(row_options) for row_options in options], int)
    repeats = counts[kind]
    rows = np.repeat(np.arange(count), repeats)
    # nth: index among the options of its row
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    indices = (np.cumsum(counts) - counts)[kind][rows] + nth
    columns = {name: np.array([option[name] for option in flat])[indices] for name in (flat[0] if flat else ())}
    return {name: column[rows] for name, column in table.items()} | columns


def _unusable(shape: Shape, devices: int, rows: int, choices: Choices):
    largest = {axis: max(technique.allowed_sizes(shape, rows, choices)) for axis, technique in TECHNIQUES.items()}
    replicas = " x ".join(axis for axis in batch_axes() if axis in TECHNIQUES)
    inner = {axis: size for axis, size in largest.items() if axis not in batch_axes()}
    all_devices = int(np.prod([*inner.values(), rows], dtype=object))
    bounds = [
        f"{axis} {'is ' * (not i)}at most {size}{TECHNIQUES[axis].rule}" for i, (axis, size) in enumerate(inner.items())
    ]
    return refuse(
        f"{devices:,} devices for {shape.layers} layers, {shape.heads} heads ({shape.kv_heads or shape.heads} of keys "
        f"and values) and {rows} examples",
        rule=", ".join([*bounds, f"{replicas} divides the rows"])
        + (f": at most {all_devices:,} devices" if all_devices < devices else ""),
        fix=f"a global batch of {rows * -(-devices // all_devices)}, or fewer devices" if all_devices < devices
        else "a number of devices, or a global batch, with more small factors",
    )  # fmt: skip
