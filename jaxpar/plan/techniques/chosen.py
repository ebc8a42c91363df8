"""Which form of context a call of attention takes where the declaration leaves it open: the fastest that has the room.

    gather, ring, ring x ulysses, ulysses     each of those that divide tokens and heads, in seconds of `crossover`
    gathered scores                           of one layer, and what the others keep, have to fit beside the state

Pieces that travel are priced as a run meets them: by cuDNN's kernel where it takes them and none but plain JAX is asked
for, else in blocks of plain JAX. Where the kernel is asked for, only forms that have it are weighed.

It is a formula of shapes, of dtypes and of a chip, so it is the same on simulated, absent and real devices of one chip:
of a kernel it assumes that it passes its trial on the device (`jaxpar.models.blocks.trial`), or the run stops.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxpar.errors import refuse
from jaxpar.mesh.chips import CHIPS
from jaxpar.models.settings.cudnn import HOPPER, why_no_part
from jaxpar.parallel.techniques.open_choice import Call, Choice
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE, Hardware
from jaxpar.plan.machine.software import JAXPAR_FUSED
from jaxpar.plan.model import exchanged
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.context import ways
from jaxpar.plan.techniques.crossover import seconds
from jaxpar.units import show_bytes, show_seconds

ASSUMED = "h100"
SPARE = 0.05  # of the memory stays free, as in a search
IN_BLOCKS = replace(JAXPAR_FUSED, parts=None)


def choose(call: Call) -> Choice:
    """Returns the fastest form whose scores fit beside the state; by less memory, if none does.

    Raises:
      JaxparError: If cuDNN's kernel is asked for, and no form has it.
    """
    key = call.chip if call.chip in HARDWARE else ASSUMED
    hardware, width = HARDWARE[key], call.heads * call.head_dim
    shape = Shape(
        layers=1, dim=width, heads=call.heads, kv_heads=call.kv_heads, vocab=1, seq=call.seq, causal=call.causal
    )
    plain = Candidate(context=call.context, tensor=call.tensor, microbatch=call.rows, remat="full")
    made = [replace(plain, context_by=by, ulysses=ulysses) for by, ulysses in ways(shape, call.context, call.tensor)]
    gather, blocks = made[0], _in_blocks(call, shape, made[1:], hardware)
    if call.kernel == "cudnn":
        made = _with_kernel(call, made[1:], blocks)
    took = {each: seconds(shape, each, hardware, IN_BLOCKS if blocks.get(each) else JAXPAR_FUSED) for each in made}
    room = int((1 - SPARE) * hardware.memory) - call.held
    fits = {each: _scores(shape, each, call.layers) <= room for each in made}
    far = [each for each in made if each is not gather]
    first = min([each for each in made if fits[each]] or far or made, key=lambda each: took[each])
    chip = hardware.chip.name + _assumed(call.chip) * (call.chip != key)
    told = ", ".join(f"{_name(each)} {show_seconds(took[each])}" for each in sorted(made, key=lambda each: took[each]))
    why = f"context by auto: {_name(first)}, for rows of {call.seq:,} tokens on {chip}: a layer takes {told} (modelled"
    why += f", {said})" if (said := _said({each: blocks[each] for each in far})) else ")"
    return Choice(by=first.context_by, ulysses=first.ulysses, why=why + _beside(call, shape, gather, fits.get(gather)))


def _in_blocks(call: Call, shape: Shape, far: list[Candidate], hardware: Hardware) -> dict[Candidate, str]:
    """Returns for each form whose pieces travel why blocks of plain JAX meet them; "" where cuDNN's kernel does."""
    gpu, found = hardware.chip.gpu, {}
    other = any(chip.key == call.chip and not chip.is_gpu for chip in CHIPS)
    for each in far:
        why = "as asked" if call.kernel == "plain" else "these devices are no GPUs" if other else why_no_part(
            dtype=call.dtype, head_dim=call.head_dim, causal=call.causal, window=call.window, segments=call.segments,
            softcap=call.softcap, ring=int(exchanged.groups(each)),
            capability=gpu.capability[0] + gpu.capability[1] / 10 if gpu else HOPPER,
        )  # fmt: skip
        uneven = "heads of keys are not cut as those of queries are"
        found[each] = why or ("" if exchanged.by_kernel(shape, each, JAXPAR_FUSED) else uneven)
    return found


def _with_kernel(call: Call, far: list[Candidate], blocks: Mapping[Candidate, str]) -> list[Candidate]:
    """Returns the forms whose pieces cuDNN's kernel meets."""
    if found := [each for each in far if not blocks[each]]:
        return found
    why = dict.fromkeys(f"{_name(each)}: {blocks[each]}" for each in far)
    of = f"{call.dtype}[{call.rows}, {call.seq}, {call.heads}, {call.head_dim}], {call.kv_heads} heads of keys"
    raise refuse(
        f"context_kernel='cudnn' with context_by='auto' for q {of}, over context={call.context}: "
        + ("; ".join(why) or "no form but gather divides the tokens and heads"),
        rule="where cuDNN's kernel is asked for, auto takes a form whose parts it runs: gather has none",
        fix="context_kernel='auto', which takes the fastest form, by the kernel or not, and says so",
    )


def _said(blocks: Mapping[Candidate, str]) -> str:
    """Returns what meets the pieces of forms that travel, in words."""
    plain = {each: why for each, why in blocks.items() if why}
    why = "; ".join(dict.fromkeys(plain.values()))
    if not plain:
        return "pieces met by cuDNN's kernel, as on a GPU where it passes its trial" * bool(blocks)
    if len(plain) == len(blocks):
        return f"in blocks of plain JAX: {why}"
    names = ", ".join(_name(each) for each in blocks if each not in plain)
    return f"{names} by cuDNN's kernel, as on a GPU where it passes its trial, others in blocks of plain JAX: {why}"


def _assumed(chip: str) -> str:
    return f", assumed, as {chip} is not planned for" if chip else ", assumed, as no chip is named"


def _beside(call: Call, shape: Shape, gather: Candidate, fits: bool | None) -> str:
    """Returns whether scores of gathered keys fit, in words; or that those are not weighed, for the kernel is asked."""
    if fits is None:
        return "; gather has no kernel, which is asked for"
    those = "a layer that gathers" if call.layers == 1 else f"{call.layers} layers that gather, and keep shares,"
    beside = f"beside a state of {show_bytes(call.held)}" if call.held else "alone"
    verdict = "fit" if fits else "do not fit"
    return f"; scores of {those} are {show_bytes(_scores(shape, gather, call.layers))}, which {verdict} {beside}"


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
