"""The chain of a traced model: seconds, parameters and crossing bytes of its pieces, from its jaxpr alone.

    equations ──► pieces (those of `jp.pipelined`, or cut wherever the bytes to send do not grow)
              ──► seconds of each piece: a roofline of its equations on a chip
              ──► bytes that cross each cut: values that depend on parameters and data, and are read later

A roofline takes max(FLOP / rate, bytes / bandwidth) for a matmul or convolution (Williams et al. 2009), its inputs and
outputs once over memory; XLA fuses elementwise operations into them, so these cost nothing. A backward takes twice as
long as a forward, and three times as long if it also recomputes the forward.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from jax.extend.core import JaxprEqn, Literal, Var

from jaxpar.jaxprs.dataflow import shapes
from jaxpar.jaxprs.part_programs import JaxprCut
from jaxpar.mesh.chips import Chip
from jaxpar.partition.chain import Chain
from jaxpar.sharding.names import itemsize

MOST = 2_000  # maximum number of pieces: the time of a search grows with its square
FORWARDS = 4  # forward (1) and a backward that recomputes it (3), in units of a forward's seconds


def array_bytes(variables: Iterable[Var | Literal]) -> float:
    """Returns the bytes of arrays."""
    return float(sum(math.prod(leaf.shape) * itemsize(leaf.dtype) for leaf in shapes(variables)))


def crossing_bytes(cut: JaxprCut, outs: Iterable) -> list[float]:
    """Returns the bytes that cross a cut after each equation; 0 after the last."""
    eqns = cut.jaxpr.jaxpr.eqns
    last_read: dict[Var, int] = {}
    for i, eqn in enumerate(eqns):
        for var in eqn.invars:
            if not isinstance(var, Literal) and var in cut.sent:
                last_read[var] = i
    for var in outs:
        if not isinstance(var, Literal) and var in cut.sent:
            last_read[var] = len(eqns) - 1
    changes = [0.0] * (len(eqns) + 1)
    for i, eqn in enumerate(eqns):
        for var in eqn.outvars:
            if last_read.get(var, i) > i:
                changes[i] += array_bytes([var])
                changes[last_read[var]] -= array_bytes([var])
    totals, total = [], 0.0
    for change in changes[:-1]:
        total += change
        totals.append(total)
    return totals


def pieces_between_equations(crossing: Sequence[float], flop: Sequence[float]) -> list[int]:
    """Divides the equations of a model without `jp.pipelined` into pieces; returns the piece of each equation.

    A piece ends after an equation if the bytes that cross there are not more than after the previous equation. If these
    are more than `MOST` pieces, a piece ends only if the next equation also has FLOP, and only at every n-th such
    equation, so that at most `MOST` pieces remain.
    """
    ends = [i for i in range(1, len(crossing) - 1) if crossing[i] <= crossing[i - 1]]
    if len(ends) >= MOST:
        ends = [i for i in ends if flop[i + 1]]
    step = -(-len(ends) // MOST) or 1
    marks, pieces = set(ends[::step]), [0]
    for i in range(len(crossing) - 1):
        pieces.append(pieces[-1] + (i in marks))
    return pieces


def traced_chain(
    cut: JaxprCut, outs: Sequence, pieces: Sequence[int], flop_of: Callable[[JaxprEqn], float], chip: Chip
) -> Chain:
    """Returns the chain of a traced loss.

    Args:
      cut: The jaxpr of the loss of one microbatch.
      outs: The variables that it returns: the sum of the loss, and the count that divides it.
      pieces: The piece of each equation; it never decreases.
      flop_of: Counts the FLOP of an equation's matmuls and convolutions.
      chip: The chip whose rates give the seconds.
    """
    eqns, count = cut.jaxpr.jaxpr.eqns, max(pieces) + 1
    seconds, crossing = [0.0] * count, [0.0] * count
    for eqn, piece in zip(eqns, pieces, strict=True):
        if flop := flop_of(eqn):
            rate = chip.bf16_flops if itemsize(shapes(eqn.outvars)[0].dtype) == 2 else chip.f32_flops
            seconds[piece] += FORWARDS * max(flop / rate, array_bytes([*eqn.invars, *eqn.outvars]) / chip.bandwidth)
    for piece, passing in zip(pieces, crossing_bytes(cut, outs), strict=True):
        crossing[piece] = passing  # the value of the last equation of the piece remains
    crossing[-1] = 0.0
    parts = cut.parts(pieces, outs, count=count)
    parameters = [array_bytes(cut.inputs.params[i] for i in part.params) for part in parts]
    for piece in range(count - 2, -1, -1):  # a piece without equations, such as a reshape that does nothing
        if piece not in pieces:
            crossing[piece] = crossing[piece - 1] if piece else 0.0
    if not any(seconds):
        seconds = [1.0] * count
    names = tuple(f"piece {piece}" for piece in range(count))
    return Chain(names, tuple(seconds), tuple(parameters), tuple(crossing), tuple(crossing))
