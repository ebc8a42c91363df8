"""Reads of a compiled program only what leads to its matmuls: a few lines of thousands, in a fraction of the time.

    ENTRY ── while ── body ── fusion ── dot, and the instructions that have its operands' shapes

All else is left out of the module that comes of it: it knows of FLOP, and of nothing else.
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
    """Returns the module of a text with matmuls, convolutions, their operands, and what calls them; see `text.parse`.

    Args:
      text: As XLA printed it just now: damage is not looked for.
    """
    heads = list(_HEAD.finditer(text))
    starts, names = [head.start() for head in heads], [head[2] for head in heads]
    found: dict[str, dict[int, Op]] = {name: {} for name in names}

    def keep(at: int) -> Op:
        """Keeps the instruction on whose line a position is."""
        begin, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        here = found[names[bisect_right(starts, at) - 1]]
        return here.get(begin) or here.setdefault(begin, instruction(text[begin:end].strip(), 0))

    callers: dict[str, list[int]] = {}
    for call in _CALL.finditer(text):
        for name in (call[1] or call[2]).split(","):
            callers.setdefault(name.strip().lstrip("%"), []).append(call.start())
    for hit in _MATMUL.finditer(text):
        begin = starts[bisect_right(starts, hit.start()) - 1]
        for name in keep(hit.start()).operands:
            at = text.find(f"%{name} = ", begin)
            keep(at if at >= 0 else text.index(f" {name} = ", begin) + 1)
    todo = [name for name, ops in found.items() if ops]
    while todo:
        for at in callers.pop(todo.pop(), ()):
            keep(at)
            todo.append(names[bisect_right(starts, at) - 1])
    return Module(
        name="",
        partitions=1,
        entry=next(head[2] for head in heads if head[1]),
        computations={name: [ops[at] for at in sorted(ops)] for name, ops in found.items()},
        scheduled=False,
        frames={},
    )
