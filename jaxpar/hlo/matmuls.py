"""Parses only the lines of a compiled program that lead to its matmuls: a few of thousands, in a fraction of the time.

    ENTRY ── while ── body ── fusion ── dot, and the instructions that have its operands' shapes

The resulting module lacks all else: use it for FLOP only.
"""

import re
from bisect import bisect_right

from jaxpar.hlo.text import Module, Op, instruction

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$", re.MULTILINE)
_MATMUL = re.compile(r" (?:dot|convolution)\(|\"__cublas\$|\"__cudnn\$conv")
_CALL = re.compile(
    r" (?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)| branch_computations=\{([^}]*)\}"
)


def parse_matmuls(text: str) -> Module:
    """Returns the module of a text's matmuls, convolutions, their operands, and their callers; see `text.parse`.

    Args:
      text: As XLA printed it just now: damage is not looked for.
    """
    heads = list(_HEAD.finditer(text))
    starts, names = [head.start() for head in heads], [head[2] for head in heads]
    selected: dict[str, dict[int, Op]] = {name: {} for name in names}

    def keep(position: int) -> Op:
        """Parses and keeps the instruction on the line of a position."""
        begin, end = text.rfind("\n", 0, position) + 1, text.find("\n", position)
        by_start = selected[names[bisect_right(starts, position) - 1]]
        return by_start.get(begin) or by_start.setdefault(begin, instruction(text[begin:end].strip(), 0))

    callers: dict[str, list[int]] = {}
    for call in _CALL.finditer(text):
        for name in (call[1] or call[2]).split(","):
            callers.setdefault(name.strip().lstrip("%"), []).append(call.start())
    for matmul in _MATMUL.finditer(text):
        begin = starts[bisect_right(starts, matmul.start()) - 1]
        for name in keep(matmul.start()).operands:
            position = text.find(f"%{name} = ", begin)
            keep(position if position >= 0 else text.index(f" {name} = ", begin) + 1)
    todo = [name for name, ops in selected.items() if ops]
    while todo:
        for position in callers.pop(todo.pop(), ()):
            keep(position)
            todo.append(names[bisect_right(starts, position) - 1])
    return Module(
        name="",
        partitions=1,
        entry=next(head[2] for head in heads if head[1]),
        computations={name: [ops[position] for position in sorted(ops)] for name, ops in selected.items()},
        scheduled=False,
        frames={},
    )
