"""Which form of context a call of attention takes where the declaration leaves it open: the fastest that has the room.

    gather, ring, ring x ulysses, ulysses     each of those that divide tokens and heads, in seconds of `crossover`
    gathered scores                           of one layer, and what the others keep, have to fit beside the state

Pieces that travel are priced in blocks of plain JAX: what cuDNN's kernel takes for them has not been measured.

It is a formula of shapes and of a chip, so it is the same on simulated, absent and real devices of one chip.
"""

from dataclasses import dataclass, replace

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.software import JAXPAR_FUSED
from jaxpar.plan.model import exchanged
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.context import ways
from jaxpar.plan.techniques.crossover import seconds
from jaxpar.units import show_bytes, show_seconds

ASSUMED = "h100"
SPARE = 0.05  # of the memory stays free, as in a search


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of attention, over all devices.

    Attributes:
      rows: Rows of a replica.
      seq: Tokens of a row.
      heads: Heads of queries.
      kv_heads: Those of keys.
      head_dim: Width of one.
      causal: Whether the mask is causal.
      context: Devices that share a row.
      tensor: Devices that share the heads.
      held: Bytes of a device's training state.
      layers: Layers whose shares the backward pass keeps: all without recomputation, 1 where they are made again.
      chip: For which chip, a key of `HARDWARE`; "" where none is known.
    """

    rows: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    context: int
    tensor: int = 1
    held: int = 0
    layers: int = 1
    chip: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A form: `by` and `ulysses` as `jaxpar.Parallel` has them, and why, in a sentence."""

    by: str
    ulysses: int
    why: str


def choose(call: Call) -> Choice:
    """Returns the fastest form whose scores fit beside the state; by less memory, if none does."""
    key = call.chip if call.chip in HARDWARE else ASSUMED
    hardware, width = HARDWARE[key], call.heads * call.head_dim
    shape = Shape(
        layers=1, dim=width, heads=call.heads, kv_heads=call.kv_heads, vocab=1, seq=call.seq, causal=call.causal
    )
    plain = Candidate(context=call.context, tensor=call.tensor, microbatch=call.rows, remat="full")
    made = [replace(plain, context_by=by, ulysses=ulysses) for by, ulysses in ways(shape, call.context, call.tensor)]
    took = {each: seconds(shape, each, hardware, JAXPAR_FUSED) for each in made}
    room = int((1 - SPARE) * hardware.memory) - call.held
    fits = {each: _scores(shape, each, call.layers) <= room for each in made}
    gather = made[0]
    first = min([each for each in made if fits[each]] or made[1:] or made, key=lambda each: took[each])
    told = ", ".join(f"{_name(each)} {show_seconds(took[each])}" for each in sorted(made, key=lambda each: took[each]))
    those = "a layer that gathers" if call.layers == 1 else f"{call.layers} layers that gather, and keep shares,"
    size = f"scores of {those} are {show_bytes(_scores(shape, gather, call.layers))}"
    beside = f"beside a state of {show_bytes(call.held)}" if call.held else "alone"
    verdict = "fit" if fits[gather] else "do not fit"
    known = call.chip == key
    why_chip = f", assumed, as {call.chip} is not planned for" if call.chip else ", assumed, as no chip is named"
    chip = hardware.chip.name + why_chip * (not known)
    why = (
        f"context by auto: {_name(first)}, for rows of {call.seq:,} tokens on {chip}: a layer takes {told} "
        f"(modelled, in blocks of plain JAX); "
        f"{size}, which {verdict} {beside}"
    )
    return Choice(by=first.context_by, ulysses=first.ulysses, why=why)


def _scores(shape: Shape, candidate: Candidate, layers: int) -> float:
    """Returns the bytes of scores that a layer's backward pass works with, and the others keep; of pieces that travel,
    none.
    """
    if exchanged.travels(candidate):
        return 0.0
    own = JAXPAR_FUSED.pieces or JAXPAR_FUSED
    scores = candidate.microbatch * shape.heads * shape.seq**2 / candidate.context / candidate.tensor
    return (own.worked + own.kept[0] * (layers - 1)) * scores


def _name(candidate: Candidate) -> str:
    both = candidate.context_by == "ring" and candidate.ulysses > 1
    return candidate.context_by + f" x ulysses {candidate.ulysses}" * both
