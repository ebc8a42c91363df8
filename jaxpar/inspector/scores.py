"""Finds attention scores that are summed over devices: `tensor` shards head_dim instead of heads."""

from collections.abc import Sequence

from jaxpar.hlo.attribution import shorten
from jaxpar.hlo.provenance import Index, Trace
from jaxpar.hlo.text import Module, Op
from jaxpar.inspector.findings import NOTABLE, Flag
from jaxpar.inspector.subject import Subject
from jaxpar.mesh.collective import Collective
from jaxpar.units import show_bytes

_SUM = ("all-reduce", "all-reduce-start")


def find_scores(module: Module, subject: Subject, ledger: Sequence[Collective]) -> list[Flag]:
    """Flags each all-reduce over `tensor` of a matmul of two activations.

    Queries meet keys in a matmul with batch dims, of which neither operand is a parameter. If `tensor` shards the
    contracted dim, head_dim, each device has a part of every score: [batch, heads, queries, keys] is summed, which
    grows with the square of the sequence.
    """
    trace = Trace(module)
    weights = {number for number, argument in enumerate(subject.arguments) if argument.role == "parameters"}
    sums = {
        (array.bytes, shorten(trace.label(op)))
        for _, op in module.ops()
        if op.opcode in _SUM
        for name, array in zip(op.operands, op.arrays, strict=False)
        if _of_activations(trace, name, weights)
    }
    total = sum(entry.step_wire for entry in ledger)
    return [
        Flag(
            "summed scores",
            f"all-reduce over {entry.axis} of {show_bytes(entry.payload)} at {entry.source or 'an unknown line'} "
            f"({entry.cause}): each device has a part of every attention score, because tensor shards head_dim",
            'tensor on the heads: paths={"q_proj/kernel": (None, "heads", None), ...}, or names in the model',
            entry.step_wire,
        )
        for entry in ledger
        if entry.kind == "all-reduce"
        and "tensor" in {axis.lstrip("~") for axis in entry.axes}
        and (entry.payload, entry.operation) in sums
        and entry.step_wire >= NOTABLE * total
    ]


def _of_activations(trace: Trace, name: str, weights: set[int]) -> bool:
    """Whether a value comes from a batched matmul, neither operand of which is a parameter."""
    index: Index = ()
    for _ in range(20):
        op = trace.places[name][1] if name in trace.places else None
        if op is None:
            return False
        if op.opcode in ("dot", "custom-call") and _has_batch(op):
            return all(trace.argument_number(operand) not in weights for operand in op.operands[:2])
        origin = trace.source(name, index, through_loops=False)
        if origin is None:
            return False
        name, index = origin
    return False


def _has_batch(op: Op) -> bool:
    return "lhs_batch_dims={" in op.attributes or '"lhs_batch_dimensions":["' in op.attributes
