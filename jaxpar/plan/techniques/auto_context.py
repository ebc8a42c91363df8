"""`context_by="auto"`: chooses the fastest form of context parallelism whose scores fit the device.

    gather, ring, ring x ulysses, ulysses     each form that divides tokens and heads, in seconds of `crossover`
    gathered scores                           of one layer, and the saved ones of the others, must fit with the state

A ring or Ulysses is priced by the implementation of the run: cuDNN's kernel if it supports the call, unless plain JAX
is requested; otherwise blocks of plain JAX. If the kernel is requested, only forms that use it are candidates.

The choice depends on shapes, dtypes and the chip alone, so it is the same on simulated, absent and real devices. It
assumes that the kernel passes its trial on the device (`ring_attention.choice.check_kernel`); otherwise the run stops.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxpar.errors import refuse
from jaxpar.mesh.chips import CHIPS
from jaxpar.models.settings.computing import HOPPER, why_no_part
from jaxpar.parallel.techniques.base import AttentionCall, AttentionChoice
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE, Hardware
from jaxpar.plan.machine.software import JAXPAR_FUSED
from jaxpar.plan.model import ring_attention
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.context import allowed_forms
from jaxpar.plan.techniques.crossover import layer_seconds
from jaxpar.units import show_bytes, show_seconds

DEFAULT_CHIP = "h100"
SPARE = 0.05  # share of the memory that stays free, as in a search
IN_BLOCKS = replace(JAXPAR_FUSED, ring_kernel=None)


def choose_form(call: AttentionCall) -> AttentionChoice:
    """Returns the fastest form whose scores fit in memory with the state; if none does, the fastest ring or Ulysses.

    Raises:
      JaxparError: If cuDNN's kernel is requested, and no form can use it.
    """
    key = call.chip if call.chip in HARDWARE else DEFAULT_CHIP
    hardware, width = HARDWARE[key], call.heads * call.head_dim
    shape = Shape(
        layers=1, dim=width, heads=call.heads, kv_heads=call.kv_heads, vocab=1, seq=call.seq, causal=call.causal
    )
    plain = Candidate(context=call.context, tensor=call.tensor, microbatch=call.sequences, remat="full")
    forms = [
        replace(plain, context_by=name, ulysses=heads)
        for name, heads in allowed_forms(shape, call.context, call.tensor)
    ]
    gather, blocks = forms[0], _in_blocks(call, shape, forms[1:], hardware)
    if call.kernel == "cudnn":
        forms = _with_kernel(call, forms[1:], blocks)
    costs = {
        form: layer_seconds(shape, form, hardware, IN_BLOCKS if blocks.get(form) else JAXPAR_FUSED) for form in forms
    }
    room = int((1 - SPARE) * hardware.chip.usable_memory) - call.state_bytes
    fits = {form: _scores(shape, form, call.layers) <= room for form in forms}
    sent_forms = [form for form in forms if form is not gather]
    first = min([form for form in forms if fits[form]] or sent_forms or forms, key=lambda form: costs[form])
    chip = hardware.chip.name + _assumed(call.chip) * (call.chip != key)
    timings = ", ".join(
        f"{_name(form)} {show_seconds(costs[form])}" for form in sorted(forms, key=lambda form: costs[form])
    )
    text = (
        f"context by auto: {_name(first)}, for rows of {call.seq:,} tokens on {chip}: a layer takes {timings} (modelled"
    )
    text += f", {note})" if (note := _implementation_note({form: blocks[form] for form in sent_forms})) else ")"
    return AttentionChoice(
        context_by=first.context_by,
        ulysses=first.ulysses,
        why=text + _score_note(call, shape, gather, fits.get(gather)),
    )


def _in_blocks(
    call: AttentionCall, shape: Shape, ring_forms: list[Candidate], hardware: Hardware
) -> dict[Candidate, str]:
    """Returns for each ring or Ulysses form the reason for blocks of plain JAX; "" if cuDNN's kernel is used."""
    gpu, reasons = hardware.chip.gpu, {}
    no_gpu = any(chip.key == call.chip and not chip.is_gpu for chip in CHIPS)
    for form in ring_forms:
        reason = "as asked" if call.kernel == "plain" else "these devices are no GPUs" if no_gpu else why_no_part(
            dtype=call.dtype, head_dim=call.head_dim, causal=call.causal, window=call.window, segments=call.segments,
            softcap=call.softcap, ring=int(ring_attention.groups(form)),
            capability=gpu.capability[0] + gpu.capability[1] / 10 if gpu else HOPPER,
        )  # fmt: skip
        uneven = "the axes cannot split the heads of keys as they split the heads of queries"
        reasons[form] = reason or ("" if ring_attention.uses_kernel(shape, form, JAXPAR_FUSED) else uneven)
    return reasons


def _with_kernel(call: AttentionCall, ring_forms: list[Candidate], blocks: Mapping[Candidate, str]) -> list[Candidate]:
    if matches := [form for form in ring_forms if not blocks[form]]:
        return matches
    reasons = dict.fromkeys(f"{_name(form)}: {blocks[form]}" for form in ring_forms)
    call_text = (
        f"{call.dtype}[{call.sequences}, {call.seq}, {call.heads}, {call.head_dim}], {call.kv_heads} heads of keys"
    )
    raise refuse(
        f"context_kernel='cudnn' with context_by='auto' for q {call_text}, over context={call.context}: "
        + ("; ".join(reasons) or "no form but gather divides the tokens and heads"),
        rule="with context_kernel='cudnn', auto chooses only forms that the kernel can run, not gather",
        fix="context_kernel='auto', which takes the fastest form, with or without the kernel",
    )


def _implementation_note(blocks: Mapping[Candidate, str]) -> str:
    plain = {form: reason for form, reason in blocks.items() if reason}
    reason = "; ".join(dict.fromkeys(plain.values()))
    if not plain:
        return "in cuDNN's kernel, as on a GPU where it passes its trial" * bool(blocks)
    if len(plain) == len(blocks):
        return f"in blocks of plain JAX: {reason}"
    names = ", ".join(_name(form) for form in blocks if form not in plain)
    return f"{names} in cuDNN's kernel, as on a GPU where it passes its trial, others in blocks of plain JAX: {reason}"


def _assumed(chip: str) -> str:
    return f", assumed, as {chip} is not planned for" if chip else ", assumed, as no chip is named"


def _score_note(call: AttentionCall, shape: Shape, gather: Candidate, fits: bool | None) -> str:
    """Returns as text whether scores of gathered keys fit, or that gather is excluded by a request for the kernel."""
    if fits is None:
        return "; gather is left out, as context_kernel='cudnn' cannot run it"
    layers = "a layer that gathers" if call.layers == 1 else f"{call.layers} layers that gather, and keep shares,"
    state = f"beside a state of {show_bytes(call.state_bytes)}" if call.state_bytes else "alone"
    verdict = "fit" if fits else "do not fit"
    return f"; scores of {layers} are {show_bytes(_scores(shape, gather, call.layers))}, which {verdict} {state}"


def _scores(shape: Shape, candidate: Candidate, layers: int) -> float:
    """Returns the bytes of scores in one layer's backward pass plus those that other layers save; 0 for a ring."""
    if ring_attention.uses_ring(candidate):
        return 0.0
    variant = JAXPAR_FUSED.split_sequences or JAXPAR_FUSED
    scores = candidate.microbatch * shape.heads * shape.seq**2 / candidate.context / candidate.tensor
    return (variant.working_scores + variant.saved_scores[0] * (layers - 1)) * scores


def _name(candidate: Candidate) -> str:
    combined = candidate.context_by == "ring" and candidate.ulysses > 1
    return candidate.context_by + f" x ulysses {candidate.ulysses}" * combined
