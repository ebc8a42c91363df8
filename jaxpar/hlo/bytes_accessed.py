"""Bytes accessed by a kernel; of an array that it slices or updates in place, only the slice counts.

XLA's cost model knows them for most kernels. For asynchronous ones (`fusion-start`: the copies into and out of the
residuals that a loop keeps for its backward pass) it states no time, and their operands are the loop's whole arrays.
"""

from collections.abc import Sequence

from jaxpar.hlo.text import Module, Op

_ALIAS = "bitcast"  # another name for the same bytes
_SLICES = ("dynamic-slice", "slice")
_UPDATE = "dynamic-update-slice"


def bytes_accessed(module: Module, computation: str, op: Op) -> int:
    """Returns the bytes that one run of a kernel reads and writes.

    Args:
      module: A compiled program.
      computation: Name of the instruction's computation.
      op: A fusion, or another instruction that is a kernel of its own.
    """
    if op.opcode in ("fusion", "fusion-start") and op.called:
        body = module.computations[op.called[0]]
        given = [each for each in body if each.opcode == "parameter"]
        results = _results(module.named[op.called[0]], next(each for each in body if each.root))
    else:
        here = module.named[computation]
        body, given, results = [op], [here[name] for name in dict.fromkeys(op.operands)], [op]
    named = {each.name: each for each in (*given, *body)}
    return sum(_read(array, body) for array in given) + sum(_written(result, named) for result in results)


def _read(array: Op, body: Sequence[Op]) -> int:
    """Returns the bytes read of an array, by all the names that it has."""
    names = {array.name}
    for each in body:
        if each.opcode == _ALIAS and set(each.operands) <= names:
            names.add(each.name)
    parts = 0
    for user in body:
        if user.name in names or not names.intersection(user.operands):
            continue
        whole = user.operands[0] in names and not names.intersection(user.operands[1:])
        if whole and user.opcode in _SLICES:
            parts += user.bytes
        elif not (whole and user.opcode == _UPDATE):  # which leaves the rest as it is
            return array.bytes  # any other op may read all of it
    return parts


def _written(result: Op, named: dict[str, Op]) -> int:
    """Returns the bytes written of a result: of an update in place, the update."""
    while result.opcode == _ALIAS and result.operands[0] in named:
        result = named[result.operands[0]]
    if result.opcode != _UPDATE:
        return 0 if result.opcode == "parameter" else result.bytes
    update = named.get(result.operands[1])
    return update.bytes if update is not None else result.bytes


def _results(inner: dict[str, Op], root: Op) -> list[Op]:
    """Returns the results of a fusion: its root, or the elements of its root's tuple."""
    return [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
