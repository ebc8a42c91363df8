"""Refuses collectives that would deadlock: in a branch that only some stages take, with devices of other stages.

    a tick of 1f1b     stage 0  forward    all-reduce over tensor: all its members are in stage 0        ends
                       stage 1  backward   collective-permute over tensor: XLA includes all devices      never ends

If a table mixes kinds of ops, a conditional chooses the op of each stage and tick. A collective inside this conditional
may include only devices of one stage. XLA's partitioner inserts such collectives, so they are only visible in the
compiled program. A phased table has no conditional: all stages run the same kind of op in a tick.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpar.errors import refuse
from jaxpar.hlo.replica_groups import attribute_text, axes_of_groups, parse_groups
from jaxpar.hlo.source_frames import shorten_label, user_frame
from jaxpar.hlo.text import Module, Op, parse
from jaxpar.mesh.collective import KINDS
from jaxpar.sharding.names import CHOICE

if TYPE_CHECKING:  # a plain step loads no pipeline
    from jaxpar.pipeline.tables.schedule import Schedule

_ALL_MEET = ("collective-permute", "send", "recv")  # all devices take part, not only those in the pairs


def check_branches(program: str | Module, sizes: Mapping[str, int], schedule: "Schedule") -> None:
    """Refuses a table whose program has, in a branch for some stages, a collective with devices of other stages.

    Args:
      program: The compiled program, or its text.
      sizes: Mesh axis to size, outermost first; partition i is the i-th device of the mesh.
      schedule: The table that the program runs.

    Raises:
      JaxparError: If there is such a collective; the message has the first, and a phased schedule without conditionals.
    """
    if schedule.phased or (isinstance(program, str) and "conditional(" not in program):
        return
    module = parse(program) if isinstance(program, str) else program
    for name in _branch_computations(module):
        for op in module.computations[name]:
            if _joins_several_stages(op, module, sizes):
                raise _refusal(op, module, schedule)


def _branch_computations(module: Module) -> list[str]:
    """Returns the computations in the branches of the executor's conditional, and all computations that these call."""
    names: dict[str, None] = {}
    # XLA may have made a conditional without a label from the executor's: better to count it than to miss it
    choices = (op for _, op in module.ops() if op.opcode == "conditional" and (CHOICE in op.label or not op.label))
    todo = [name for op in choices for name in op.callees]
    while todo:
        name = todo.pop()
        if name not in names:
            names[name] = None
            todo += [inner for op in module.computations[name] for inner in (*op.callees, *op.condition)]
    return list(names)


def _joins_several_stages(op: Op, module: Module, sizes: Mapping[str, int]) -> bool:
    kind = op.opcode.removesuffix("-start")
    if kind in _ALL_MEET:
        return "is_host_transfer=true" not in op.attributes
    if kind not in KINDS:
        return False
    groups = parse_groups(attribute_text(op.attributes, "replica_groups"), module.partitions)
    return any(axis.strip("~") == "pipe" for axis in axes_of_groups(groups, sizes))


def _refusal(op: Op, module: Module, schedule: "Schedule"):
    frame = user_frame(module.stack(op))
    location = f" ({Path(frame.file).name}, line {frame.line})" if frame else ""
    kind = op.opcode.removesuffix("-start")
    article = "an" if kind[0] in "aeiou" else "a"
    phased = "interleaved_phased" if schedule.chunks > 1 else "1f1b_phased"
    return refuse(
        f"{article} {kind} in {shorten_label(op.label)}{location}, in an op that only some stages "
        f"of {schedule.name} run in that tick",
        rule="if stages run different ops in a tick, a collective inside of an op must not span several stages: the "
        "other stages would never join it, and the run would hang",
        fix=f'schedule="{phased}", where all stages run the same op in a tick; or layers without communication along a '
        "split dim (a shift of tokens communicates with sequence=True or context)",
    )
