"""Traces a value back through tuples, loops, calls and copies to the op or argument that it comes from."""

from functools import cached_property

from jaxpar.hlo.text import Module, Op

_CALLERS = ("while", "fusion", "fusion-start", "call", "async-start", "conditional")
_SAME = ("bitcast", "copy", "convert", "reshape", "transpose", "copy-start", "copy-done", "async-done", "fusion-done",
         "all-gather-done", "all-gather", "all-gather-start", "opt-barrier", "optimization-barrier")  # fmt: skip
_RESHAPES = ("bitcast", "reshape")
_SLICES = ("dynamic-slice", "slice")
_STEPS = 40  # steps back from a value, at most; after that its producer is unknown

Index = tuple[int, ...]


class DataFlow:
    """The data flow of a module, through which values are traced back."""

    def __init__(self, module: Module):
        self.module = module

    @cached_property
    def places(self) -> dict[str, tuple[str, Op]]:
        """Name of an instruction to (computation, instruction)."""
        return {op.name: (computation, op) for computation, op in self.module.ops()}

    @cached_property
    def callers(self) -> dict[str, tuple[str, Op]]:
        """Name of a computation to the (computation, instruction) that calls it."""
        return {
            name: (computation, op)
            for computation, op in self.module.ops()
            for name in op.callees
            if op.opcode in _CALLERS
        }

    def source(self, name: str, index: Index, *, through_loops: bool) -> tuple[str, Index] | None:
        """Goes one step back to the value that a value copies unchanged; None if an op computes the value.

        Args:
          name: Name of an instruction.
          index: Entry of its result.
          through_loops: Whether to trace a loop's carry to its initial value, or to the result of the body.
        """
        if name not in self.places:
            return None
        computation, op = self.places[name]
        # entry i of a loop's result is entry i of its carry: the initial value, or returned by the previous iteration
        if op.opcode == "while" and index:
            return (op.operands[0], index) if through_loops else _callee_result(self.module, op.callees[0], index)
        if op.opcode == "parameter" and computation in self.callers:
            caller = self.callers[computation][1]
            if caller.opcode == "while":
                if index:
                    return (
                        (caller.operands[0], index)
                        if through_loops
                        else _callee_result(self.module, computation, index)
                    )
                return None
            number = int(op.operand_text) if op.operand_text.isdigit() else 0
            return (caller.operands[number], index) if number < len(caller.operands) else None
        if op.opcode in ("fusion", "fusion-start", "call", "async-start") and op.callees:
            return _callee_result(self.module, op.callees[0], index)
        if op.opcode == "get-tuple-element":
            return op.operands[0], (int(op.attribute("index") or 0), *index)
        if op.opcode == "tuple" and index and index[0] < len(op.operands):
            return op.operands[index[0]], index[1:]
        # its start returns (operand, result): go on with the second; `-start` below drops its index
        if op.opcode == "all-gather-done" and op.operands:
            return op.operands[0], (1, *index)
        if op.opcode in _SAME and op.operands:
            entry = index[1:] if op.opcode.endswith("-start") else index  # it returns (operand, result)
            if len(op.operands) == 1:
                return op.operands[0], entry
            return (op.operands[entry[0]], entry[1:]) if entry and entry[0] < len(op.operands) else None
        return None

    def parts(self, op: Op) -> list[Op]:
        """Returns the values that XLA concatenated to send them as one, or the value itself."""
        op = self._leave_fusions(op)
        concatenation, parameters = op, None
        siblings = self.module.ops_by_name[self.places[op.name][0]]
        if op.opcode == "fusion" and op.callees:
            inner = self.module.computations[op.callees[0]]
            concatenation = next(node for node in inner if node.root)
            parameters = {node.name: int(node.operand_text) for node in inner if node.opcode == "parameter"}
        if concatenation.opcode != "concatenate" or len(concatenation.arrays[0].dims) != 1:
            return [_undo_reshapes(self.module, op, siblings)]
        operands = []
        for name in concatenation.operands:
            if parameters is None:
                operands.append(siblings[name])
            elif name in parameters:
                operands.append(siblings[op.operands[parameters[name]]])
            else:
                return [op]
        return [_undo_reshapes(self.module, node, siblings) for node in operands]

    def _leave_fusions(self, op: Op) -> Op:
        """Returns the operand of the fusion that a parameter inside of it refers to."""
        computation = self.places[op.name][0]
        while op.opcode == "parameter" and computation in self.callers:
            caller_computation, caller = self.callers[computation]
            if caller.opcode not in ("fusion", "fusion-start", "async-start"):
                break
            op, computation = (
                self.module.ops_by_name[caller_computation][caller.operands[int(op.operand_text)]],
                caller_computation,
            )
        return op

    def label(self, op: Op) -> str:
        """Returns the label of an instruction, or of its reducer if XLA drops it, as for combined reductions."""
        if op.label or "to_apply=" not in op.unquoted_attributes:
            return op.label
        return next((node.label for node in self.module.computations[op.callees[0]] if node.root), "")

    def producer(self, name: str, index: Index = ()) -> Op | None:
        """Returns the nearest labelled instruction that computes a value, or None."""
        visited = set()
        while name in self.places and (name, index) not in visited and len(visited) < _STEPS:
            visited.add((name, index))
            op = self.places[name][1]
            if op.label and op.opcode not in ("while", "parameter", "get-tuple-element", "tuple", "call"):
                return op
            source = self.source(name, index, through_loops=False)
            if source is None:
                return None
            name, index = source
        return None

    def argument_number(self, name: str, index: Index = ()) -> int | None:
        """Returns the number of the argument that a value copies, slices or casts, or None."""
        visited = set()
        while name in self.places and (name, index) not in visited and len(visited) < _STEPS:
            visited.add((name, index))
            computation, op = self.places[name]
            if op.opcode == "parameter" and computation == self.module.entry:
                return int(op.operand_text) if not index else None
            source = self.source(name, index, through_loops=True)
            if source is None and op.opcode in _SLICES:
                source = (op.operands[0], index)
            if source is None and op.opcode == "dynamic-update-slice":  # one layer's, written into a stack
                source = (op.operands[1], index)
            if source is None:
                return None
            name, index = source
        return None


def _undo_reshapes(module: Module, op: Op, here: dict[str, Op]) -> Op:
    """Returns the value before reshapes, which do not change bytes."""
    is_call = op.opcode == "fusion" and len(op.callees) == 1
    if is_call:
        root = next(node for node in module.computations[op.callees[0]] if node.root)
        if root.opcode not in _RESHAPES:
            return op
        source = _undo_reshapes(module, root, module.ops_by_name[op.callees[0]])
        return op if source.opcode == "parameter" else source
    while op.opcode in _RESHAPES and op.operands and op.operands[0] in here:
        operand = here[op.operands[0]]
        if len(operand.arrays) != 1 or operand.bytes != op.bytes:
            break
        op = operand
    return op


def _callee_result(module: Module, computation: str, index: Index) -> tuple[str, Index]:
    root = next(op for op in module.computations[computation] if op.root)
    if root.opcode == "tuple" and index and index[0] < len(root.operands):
        return root.operands[index[0]], index[1:]
    return root.name, index
