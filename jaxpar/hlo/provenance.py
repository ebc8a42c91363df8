"""Provenance of values: back through tuples, loops, calls and copies, to the op or argument they come from."""

from functools import cached_property

from jaxpar.hlo.text import Module, Op

_CALLERS = ("while", "fusion", "fusion-start", "call", "async-start", "conditional")
_SAME = ("bitcast", "copy", "convert", "reshape", "transpose", "copy-start", "copy-done", "async-done", "fusion-done",
         "all-gather-done", "all-gather", "all-gather-start", "opt-barrier", "optimization-barrier")  # fmt: skip
_RESHAPES = ("bitcast", "reshape")
_SLICES = ("dynamic-slice", "slice")
_STEPS = 40  # back from a value, after which its maker is called unknown

Index = tuple[int, ...]


class Trace:
    """The values of a module and where they come from."""

    def __init__(self, module: Module):
        self.module = module

    @cached_property
    def places(self) -> dict[str, tuple[str, Op]]:
        """Instruction to (computation, instruction)."""
        return {op.name: (computation, op) for computation, op in self.module.ops()}

    @cached_property
    def callers(self) -> dict[str, tuple[str, Op]]:
        """Computation to (computation, instruction) that calls it."""
        return {
            name: (computation, op)
            for computation, op in self.module.ops()
            for name in op.called
            if op.opcode in _CALLERS
        }

    def back(self, name: str, index: Index, *, through_loops: bool) -> tuple[str, Index] | None:
        """Returns the value that a value is taken from unchanged, one step back, or None where it is made.

        Args:
          name: Of an instruction.
          index: Which entry of its result.
          through_loops: Follow a loop's carry to its initial value; else to the result of its body.
        """
        if name not in self.places:
            return None
        computation, op = self.places[name]
        # entry i of a loop's result is entry i of its carry: given at first, or returned by the turn before
        if op.opcode == "while" and index:
            return (op.operands[0], index) if through_loops else self._returned(op.called[0], index)
        if op.opcode == "parameter" and computation in self.callers:
            caller = self.callers[computation][1]
            if caller.opcode == "while":
                if index:
                    return (caller.operands[0], index) if through_loops else self._returned(computation, index)
                return None
            number = int(op.inside) if op.inside.isdigit() else 0
            return (caller.operands[number], index) if number < len(caller.operands) else None
        if op.opcode in ("fusion", "fusion-start", "call", "async-start") and op.called:
            return self._returned(op.called[0], index)
        if op.opcode == "get-tuple-element":
            return op.operands[0], (int(op.attribute("index") or 0), *index)
        if op.opcode == "tuple" and index and index[0] < len(op.operands):
            return op.operands[index[0]], index[1:]
        # its start returns (what it read, what came): go on with the second, of which `-start` below drops the number
        if op.opcode == "all-gather-done" and op.operands:
            return op.operands[0], (1, *index)
        if op.opcode in _SAME and op.operands:
            inside = index[1:] if op.opcode.endswith("-start") else index  # it returns what it read, what came
            if len(op.operands) == 1:
                return op.operands[0], inside
            return (op.operands[inside[0]], inside[1:]) if inside and inside[0] < len(op.operands) else None
        return None

    def _returned(self, computation: str, index: Index) -> tuple[str, Index]:
        root = next(op for op in self.module.computations[computation] if op.root)
        if root.opcode == "tuple" and index and index[0] < len(root.operands):
            return root.operands[index[0]], index[1:]
        return root.name, index

    def parts(self, op: Op) -> list[Op]:
        """Returns the values that XLA laid end to end to send them as one, or the value itself."""
        op = self._outside(op)
        whole, parameters = op, None
        outside = self.module.named[self.places[op.name][0]]
        if op.opcode == "fusion" and op.called:
            inner = self.module.computations[op.called[0]]
            whole = next(each for each in inner if each.root)
            parameters = {each.name: int(each.inside) for each in inner if each.opcode == "parameter"}
        if whole.opcode != "concatenate" or len(whole.arrays[0].dims) != 1:
            return [self._unflattened(op, outside)]
        found = []
        for name in whole.operands:
            if parameters is None:
                found.append(outside[name])
            elif name in parameters:
                found.append(outside[op.operands[parameters[name]]])
            else:
                return [op]
        return [self._unflattened(each, outside) for each in found]

    def _outside(self, op: Op) -> Op:
        """Returns the operand of a fusion that a parameter inside it stands for."""
        computation = self.places[op.name][0]
        while op.opcode == "parameter" and computation in self.callers:
            where, caller = self.callers[computation]
            if caller.opcode not in ("fusion", "fusion-start", "async-start"):
                break
            op, computation = self.module.named[where][caller.operands[int(op.inside)]], where
        return op

    def _unflattened(self, op: Op, here: dict[str, Op]) -> Op:
        """Returns the value before reshapes that left its bytes as they are."""
        inside = op.opcode == "fusion" and len(op.called) == 1
        if inside:
            root = next(each for each in self.module.computations[op.called[0]] if each.root)
            if root.opcode not in _RESHAPES:
                return op
            found = self._unflattened(root, self.module.named[op.called[0]])
            return op if found.opcode == "parameter" else found
        while op.opcode in _RESHAPES and op.operands and op.operands[0] in here:
            before = here[op.operands[0]]
            if len(before.arrays) != 1 or before.bytes != op.bytes:
                break
            op = before
        return op

    def label(self, op: Op) -> str:
        """Returns the label of an instruction; where XLA lost it, as of those it combined, that of how it adds up."""
        if op.label or "to_apply=" not in op.unquoted:
            return op.label
        return next((each.label for each in self.module.computations[op.called[0]] if each.root), "")

    def maker(self, name: str, index: Index = ()) -> Op | None:
        """Returns the nearest labelled instruction that makes a value, or None."""
        seen = set()
        while name in self.places and (name, index) not in seen and len(seen) < _STEPS:
            seen.add((name, index))
            op = self.places[name][1]
            if op.label and op.opcode not in ("while", "parameter", "get-tuple-element", "tuple", "call"):
                return op
            before = self.back(name, index, through_loops=False)
            if before is None:
                return None
            name, index = before
        return None

    def given(self, name: str, index: Index = ()) -> int | None:
        """Returns the number of the program's argument that a value is a copy, a slice or a cast of, or None."""
        seen = set()
        while name in self.places and (name, index) not in seen and len(seen) < _STEPS:
            seen.add((name, index))
            computation, op = self.places[name]
            if op.opcode == "parameter" and computation == self.module.entry:
                return int(op.inside) if not index else None
            before = self.back(name, index, through_loops=True)
            if before is None and op.opcode in _SLICES:
                before = (op.operands[0], index)
            if before is None and op.opcode == "dynamic-update-slice":  # one layer's, laid into a stack
                before = (op.operands[1], index)
            if before is None:
                return None
            name, index = before
        return None
