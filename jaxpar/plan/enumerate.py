"""Every layout that a model, a batch and a number of devices allow: the table of techniques, run over a table of rows.

    left 8                                     one row: all devices are left
    pipe 1 left 8 | pipe 2 left 4 | ...        each technique makes of a row as many as its axis may have sizes
    ... microbatches, settings, remat          and so does whatever else may vary

Rows stay in the order of the loops that this stands for.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpar.errors import refuse
from jaxpar.mesh.axes import batch_axes
from jaxpar.parallel.declare import DECLARED
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.choices import Choices
from jaxpar.plan.model.dims import Named
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.base import divisors
from jaxpar.plan.techniques.table import TECHNIQUES

Table = dict[str, np.ndarray]
Ways = Callable[..., Sequence[Mapping[str, Any]]]


def legal(shape: Shape, *, devices: int, rows: int, choices: Choices | None = None) -> Candidate:
    """Returns all candidates of a decoder that use all devices, as arrays.

    Args:
      shape: The model.
      devices: How many.
      rows: Of a step's global batch.
      choices: What else may vary; the defaults of `Choices`.

    Raises:
      JaxparError: If there is none: more devices than the model and the batch can use.
    """
    choices = choices or Choices()
    found = every(shape, devices=devices, rows=rows, choices=choices)
    if found is None:
        raise _unusable(shape, devices, rows, choices)
    return found


def every(model: Named, *, devices: int, rows: int, choices: Choices) -> Candidate | None:
    """Returns all candidates that use all devices, as arrays; None where there is none.

    Each technique says which sizes its axis may have, and what else of it varies; replicas divide the rows.

    Raises:
      JaxparError: If a number is out of its range.
    """
    within_reach(devices, rows)
    table = _meshes(model, devices, rows, choices)
    if not len(table["left"]):
        return None
    table = _each(table, ("left",), lambda left: [_batch(left, count) for count in divisors(left)])  # rows of a replica
    del table["left"]
    for each in TECHNIQUES.values():
        if settings := each.settings:
            table = _each(table, settings.needs, lambda *row, ways=settings.ways: ways(model, choices, *row))
    remats = [{"remat": remat} for remat in choices.remats]
    kept_here = [each for each in remats if each["remat"] != "offload"]  # a pipeline offloads nothing
    table = _each(table, ("pipe",), lambda pipe: remats if pipe == 1 else kept_here)
    further = {axis: table.pop(axis) for axis in TECHNIQUES if axis not in DECLARED}
    found = Candidate(**table, head=np.full(len(table["remat"]), "last"), axes=further)
    for each in TECHNIQUES.values():
        found = found if each.lacks(model) else each.follows(model, found)
    return found


def pick(candidates: Candidate, which: np.ndarray) -> Candidate:
    """Returns some of many candidates: those that a mask or indices name."""
    return candidates.mapped(lambda value: value[which])


def at(candidates: Candidate, index: int) -> Candidate:
    """Returns one of many candidates, with plain numbers."""
    return candidates.mapped(lambda value: value[index].item())


def within_reach(devices: int, rows: int) -> None:
    """Refuses numbers of devices and rows that are none."""
    for name, number in (("devices", devices), ("examples of the global batch", rows)):
        if type(number) is not int or not 1 <= number <= 1_000_000:
            raise refuse(f"{number!r} {name}", rule="a whole number within 1..1,000,000", fix="64")


def _meshes(model: Named, devices: int, rows: int, choices: Choices) -> Table:
    """Returns the sizes of all axes with what comes with them, and as `left` the rows of one replica."""
    table, last = {"left": np.array([devices])}, [*TECHNIQUES][-1]
    for axis, each in TECHNIQUES.items():
        sizes = each.legal(model, rows, choices)

        def ways(left: int, axis=axis, sizes=sizes, each=each) -> list[dict[str, Any]]:
            tried = [left] if axis == last else divisors(left)
            fits = [size for size in tried if size in sizes]
            return [{axis: size, "left": left // size, **more} for size in fits for more in each.variants(size)]

        table = _each(table, ("left",), ways)
    replicas = np.prod([table[axis] for axis in batch_axes() if axis in table], axis=0, dtype=int)
    divides = rows % replicas == 0
    return {name: column[divides] for name, column in table.items()} | {"left": rows // replicas[divides]}


def _batch(rows: int, count: int) -> dict[str, int]:
    """Returns so many microbatches of the rows of a replica."""
    return {"microbatch": rows // count, "microbatches": count, "left": rows}


def _each(table: Table, needs: tuple[str, ...], ways: Ways) -> Table:
    """Returns every row of a table once for each way that goes with it, in order.

    Args:
      table: Names to columns of the same length.
      needs: Columns of whole numbers that the ways hang on.
      ways: Returns the ways that go with values of these columns: each names the same further columns.
    """
    count = len(next(iter(table.values())))
    code = np.zeros(count, int)
    for name in needs:  # alike rows have the same ways, so these are asked for once
        code = np.unique(code * (table[name].max(initial=0) + 1) + table[name], return_inverse=True)[1]
    _, first, kind = np.unique(code, return_index=True, return_inverse=True)
    known = [ways(*(table[name][i].item() for name in needs)) for i in first]
    found = [way for each in known for way in each]
    many = np.array([len(each) for each in known], int)
    times = many[kind]
    rows = np.repeat(np.arange(count), times)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)  # which of its row's ways
    which = (np.cumsum(many) - many)[kind][rows] + nth
    more = {name: np.array([way[name] for way in found])[which] for name in (found[0] if found else ())}
    return {name: column[rows] for name, column in table.items()} | more


def _unusable(shape: Shape, devices: int, rows: int, choices: Choices):
    most = {axis: max(each.legal(shape, rows, choices)) for axis, each in TECHNIQUES.items()}
    replicas = " x ".join(axis for axis in batch_axes() if axis in TECHNIQUES)
    inner = {axis: size for axis, size in most.items() if axis not in batch_axes()}
    all_ = int(np.prod([*inner.values(), rows], dtype=object))
    bounds = [
        f"{axis} {'is ' * (not i)}at most {size}{TECHNIQUES[axis].rule}" for i, (axis, size) in enumerate(inner.items())
    ]
    return refuse(
        f"{devices:,} devices for {shape.layers} layers, {shape.heads} heads ({shape.kv_heads or shape.heads} of keys "
        f"and values) and {rows} examples",
        rule=", ".join([*bounds, f"{replicas} divides the rows"])
        + (f": at most {all_:,} devices" if all_ < devices else ""),
        fix=f"a global batch of {rows * -(-devices // all_)}, or fewer devices" if all_ < devices
        else "a number of devices, or a global batch, with more small factors",
    )  # fmt: skip
