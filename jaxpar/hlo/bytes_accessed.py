"""Counts the bytes that a kernel accesses; for an array that it slices or updates in place, only the slice counts.

XLA's cost model has the bytes of most kernels. It has no time for asynchronous kernels (`fusion-start`, which copies
slices into and out of a loop's residuals), whose operands are the loop's complete arrays.
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
      op: A fusion, or another instruction that is a kernel by itself.
    """
    if op.opcode in ("fusion", "fusion-start") and op.callees:
        body = module.computations[op.callees[0]]
        inputs = [instruction for instruction in body if instruction.opcode == "parameter"]
        results = _results(
            module.ops_by_name[op.callees[0]], next(instruction for instruction in body if instruction.root)
        )
    else:
        computation_ops = module.ops_by_name[computation]
        body, inputs, results = [op], [computation_ops[name] for name in dict.fromkeys(op.operands)], [op]
    by_name = {instruction.name: instruction for instruction in (*inputs, *body)}
    return sum(_bytes_read(array, body) for array in inputs) + sum(
        _bytes_written(result, by_name) for result in results
    )


def _bytes_read(array: Op, body: Sequence[Op]) -> int:
    """Returns the bytes that a kernel reads of an array, which may have several names."""
    names = {array.name}
    for alias in body:
        if alias.opcode == _ALIAS and set(alias.operands) <= names:
            names.add(alias.name)
    total = 0
    for user in body:
        if user.name in names or not names.intersection(user.operands):
            continue
        is_operand = user.operands[0] in names and not names.intersection(user.operands[1:])
        if is_operand and user.opcode in _SLICES:
            total += user.bytes
        elif not (is_operand and user.opcode == _UPDATE):  # an update leaves the rest unread
            return array.bytes  # any other op may read all of it
    return total


def _bytes_written(result: Op, named: dict[str, Op]) -> int:
    """Returns the bytes that a kernel writes of a result; for an update in place, those of the update."""
    while result.opcode == _ALIAS and result.operands[0] in named:
        result = named[result.operands[0]]
    if result.opcode != _UPDATE:
        return 0 if result.opcode == "parameter" else result.bytes
    update = named.get(result.operands[1])
    return update.bytes if update is not None else result.bytes


def _results(inner: dict[str, Op], root: Op) -> list[Op]:
    """Returns the results of a fusion: its root, or the elements of its root's tuple."""
    return [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
