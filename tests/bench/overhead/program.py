"""What XLA made of a step: its temporary memory, how often it launches a collective, and what travels."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jaxpar.hlo.attribution import ArrayCauses
from jaxpar.hlo.provenance import DataFlow
from jaxpar.hlo.text import parse
from jaxpar.hlo.trip_counts import walk
from jaxpar.inspector.compiled import compile_program
from jaxpar.inspector.ledger import entries
from jaxpar.mesh.collective import KINDS


@dataclass(frozen=True, kw_only=True)
class Program:
    """One step as compiled, of one device.

    Attributes:
      temporary: Bytes of temporary memory.
      launches: Collectives that a step starts; arrays that XLA combined are one.
      wire: Bytes that a device sends in a step, by ring algorithms.
    """

    temporary: int
    launches: int
    wire: int


def compiled(lowered: Any, mesh: Mesh) -> Program:
    """Returns what XLA makes of a lowered step.

    Args:
      lowered: As `jax.jit(...).lower` returns it.
      mesh: Simulated devices, or GPUs that are absent.
    """
    made = compile_program(lowered, list(mesh.devices.flat))
    module, sizes = parse(made.text), {str(axis): size for axis, size in mesh.shape.items()}
    trace, causes = DataFlow(module), ArrayCauses(())
    launches, wire = 0, 0.0
    for visit in walk(module):
        if visit.op.opcode.removesuffix("-start") in KINDS and (sent := entries(trace, visit, sizes, causes)):
            launches += visit.times or 1
            wire += sum(each.step_wire for each in sent)
    return Program(temporary=made.temporary, launches=launches, wire=round(wire))
