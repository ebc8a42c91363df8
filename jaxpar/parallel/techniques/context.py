"""Context parallelism: devices share every sequence, and attention brings its queries and keys together.

    gather     all keys and values on every device     attention_gather.py     short rows, any number of tokens
    ring       keys and values go around               exchanged/              long rows, memory as one piece needs
    ulysses    heads for tokens                        exchanged/              long rows, as many devices as heads
    auto       whichever of them a plan has as the fastest, of those with the room

To add a way of doing that: a file beside `attention_gather.py` with a function of the arguments of `jp.attention`, and
a row of `HOW`. It is chosen by `Parallel(context_by=name)`, one that a user adds by `Parallel(how={"context": name})`.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from jaxpar.errors import Problem, nearest, nearest_divisor, refuse
from jaxpar.mesh.preset import Option
from jaxpar.models.islands import QUERIES, note
from jaxpar.models.named import spec_of
from jaxpar.parallel.declare import Axes, Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.attention_gather import gather
from jaxpar.parallel.techniques.base import Compose, Technique, Traced
from jaxpar.parallel.techniques.exchanged.attention import exchange
from jaxpar.parallel.techniques.exchanged.choice import KERNELS
from jaxpar.parallel.techniques.open_choice import Call


def auto(
    q: jax.Array, k: jax.Array, v: jax.Array, *, layout: Layout, step: Traced, kernel: str = "auto", **masks: Any
) -> jax.Array:
    """Returns attention in the form that a plan has as the fastest, and notes which and why.

    It is chosen as the step is traced, for the chip of the layout, and is the same whether that is there or not.
    """
    spec, masked = spec_of(QUERIES), {name: mask for name, mask in masks.items() if mask is not None}
    cut = () if spec is None or spec[2] is None else (spec[2],) if isinstance(spec[2], str) else spec[2]
    choice = step.choose(
        Call(
            rows=max(1, q.shape[0] // layout.replicas), seq=k.shape[1], heads=q.shape[2], kv_heads=k.shape[2],
            head_dim=q.shape[3], causal=bool(masks["causal"]), window=masked.get("window"),
            segments="segments" in masked, softcap="softcap" in masked, dtype=str(q.dtype),
            context=layout.sizes["context"], tensor=math.prod(layout.sizes.get(axis, 1) for axis in cut),
            held=layout.held, layers=layout.depth if step.keeps else 1, chip=layout.chip, kernel=kernel,
        )
    )  # fmt: skip
    note(choice.why)
    if choice.by == "gather" and kernel != "auto":
        note(f"context_kernel={kernel!r} does nothing, as keys are gathered")
    run = gather if choice.by == "gather" else partial(exchange, ulysses=choice.ulysses, kernel=kernel)
    return run(q, k, v, **masks)


HOW: dict[str, Mapping[str, Callable]] = {
    "gather": {"attention": gather},
    "ring": {"attention": exchange},
    "ulysses": {"attention": partial(exchange, ulysses=0)},
    "auto": {"attention": auto},
}
WHY = {
    "gather": "every device gathers all keys and values, which is least to wait for while rows are short",
    "ring": "keys and values go around while those that have come are met; no scores are kept",
    "ulysses": "devices exchange heads for tokens, and each meets all keys with its own heads; no scores are kept",
    "auto": "a plan's fastest form of those whose scores fit, chosen as a step is traced, which then says it",
}
KERNEL = {
    "auto": "parts of attention are run by cuDNN's kernel on GPUs in 16 bits where it takes heads and masks, else, "
    "and on simulated devices, in blocks of plain JAX; the step's report says which",
    "cudnn": "parts of attention are run by cuDNN's kernel, as asked",
    "plain": "parts of attention are run in blocks of plain JAX, as asked",
}
_AT_ONCE = Option(
    name="xla_gpu_experimental_parallel_collective_overlap_limit",
    value=2,
    why="keys and the gradients of others travel during a turn; one at a time, all of one of them is waited for",
)
_PICKS = "operand_batching_dims"  # a lookup of its own in every row, as in take_along_axis


def names(parallel: Parallel) -> dict[str, Axes]:
    """Returns the axes of a sequence: `tensor` too with sequence parallelism, where no name before it took the axis."""
    return {"seq": ("context", *["tensor"] * parallel.sequence)}


def problems(parallel: Parallel) -> list[Problem]:
    """Returns what is wrong with how attention is declared to bring pieces together."""
    by, devices, ulysses, kernel = parallel.context_by, parallel.context, parallel.ulysses, parallel.context_kernel
    if type(devices) is not int:
        return []  # refused where sizes are
    if by not in HOW:
        rule = f"context_by is one of {', '.join(HOW)}"
        return [Problem(f"context_by={by!r}", rule, nearest(str(by), HOW))]
    found = []
    if by != "gather" and devices == 1:
        fix = "context=2 or more, or leave context_by out"
        found.append(Problem(f"context_by={by!r} with context=1 does nothing", "it says how pieces meet", fix))
    if by != "gather" and "context" in parallel.how:
        got = f"context_by={by!r} and how={{'context': {parallel.how['context']!r}}}"
        found.append(Problem(got, "attention runs in one way", "one of the two"))
    if kernel not in KERNELS:
        rule = f"context_kernel is one of {', '.join(KERNELS)}"
        found.append(Problem(f"context_kernel={kernel!r}", rule, nearest(str(kernel), KERNELS)))
    elif kernel != "auto" and by == "gather":
        got = f"context_kernel={kernel!r} with context_by='gather' does nothing"
        found.append(Problem(got, "it says what runs the parts of attention where pieces travel", "context_by='ring'"))
    if type(ulysses) is not int or ulysses < 1 or (devices > 0 and devices % ulysses):
        fix = f"ulysses={nearest_divisor(devices, ulysses) or 1}" if type(ulysses) is int else "ulysses=2"
        rule = "the devices of the context axis that exchange heads are equal groups of it"
        found.append(Problem(f"ulysses={ulysses!r} of context={devices}", rule, fix))
    elif ulysses > 1 and by != "ring":
        rule = "ulysses says how many devices of a ring exchange heads; context_by='ulysses' is all of them"
        found.append(Problem(f"ulysses={ulysses} with context_by={by!r}", rule, "context_by='ring'"))
    return found


def bind(layout: Layout, own: Mapping[str, Callable], step: Traced) -> Mapping[str, Callable]:
    """Returns a ring of groups, where the devices of a group exchange heads, or a choice for the layout.

    Each with the kernel that is asked for.
    """
    parallel = layout.parallel
    asked: dict[str, Any] = {"kernel": parallel.context_kernel} if parallel.context_kernel != "auto" else {}
    if own is HOW["auto"]:
        asked |= {"layout": layout, "step": step}
    if parallel.ulysses > 1 and own is HOW["ring"]:
        asked["ulysses"] = parallel.ulysses
    travels = any(own is HOW[by] for by in HOW if by != "gather")
    return {"attention": partial(own["attention"], **asked)} if asked and travels else own


def settle(layout: Layout, compose: Compose) -> Layout:
    """Returns the layout with a sentence on how attention brings pieces together, and why so."""
    by, u = layout.parallel.ways.get("context", "gather"), layout.parallel.ulysses
    mixed = f"; {u} devices at a time exchange heads, {layout.sizes['context'] // u} such groups rotate"
    said = WHY.get(by, "as it was added to jaxpar")
    layout = layout.noted(f"context by {by}: {said}{mixed if u > 1 else ''}")
    kernel, travels = layout.parallel.context_kernel, by in HOW and by != "gather"
    only = "; auto takes a form that has it" if (by, kernel) == ("auto", "cudnn") else ""
    return layout.noted(f"context: {KERNEL[kernel]}{only}") if travels else layout


def told(layout: Layout) -> list[Option]:
    """Returns that two permutes may be under way at once, where keys go around."""
    return [_AT_ONCE] if layout.parallel.ways.get("context") in ("ring", "auto") else []


def tables_in_pieces(layout: Layout) -> bool:
    """Returns whether a pipeline splits sequences over one axis, and what they look things up in over another."""
    spread = layout.parallel.pipeline.head == "spread"  # the vocabulary is then split over `pipe`
    return layout.sizes["pipe"] > 1 < layout.sizes["context"] and (layout.sizes["tensor"] > 1 or spread)


def check(layout: Layout, named: set[str], lowered: Any) -> None:
    """Refuses a context axis where nothing is split over it, or where XLA can't split what is.

    Raises:
      JaxparError: If no dim is called seq, and no rule splits another; or if a pipeline whose sequences and vocabulary
        are both in pieces looks up an entry per row, on which XLA 0.10 to 0.12 ends the process.
    """
    sizes, name = layout.sizes, layout.blueprint.name
    if sizes["context"] == 1:
        return
    if not any("context" in _axes(layout.names.get(each)) for each in named):
        unruled = sorted(named - layout.names.keys())
        ways = ['jp.constrain(x, "batch", "seq", "embed") on the stream']
        if unruled:
            rule = f"rules={{{unruled[0]!r}: 'context'}} in Parallel"
            ways.append(f"{rule} if that is the sequence, of the names without a rule: {', '.join(unruled)}")
        raise refuse(
            f"context={sizes['context']}, but {name} names no activation dim seq",
            rule="context parallelism splits the dim that is called seq, or that a rule of the user's splits; else its "
            "devices all do the same work",
            fix=f"{', or '.join(ways)}, or context=1",
        )
    if tables_in_pieces(layout) and _PICKS in lowered.as_text():
        over = "tensor" if sizes["tensor"] > 1 else "pipe"
        head = "" if over == "tensor" else ", head='spread'"
        raise refuse(
            f"take_along_axis in {name} or its loss, on pipe={sizes['pipe']} x context={sizes['context']} x "
            f"tensor={sizes['tensor']}{head}",
            rule=f"inside of a pipeline XLA picks no entry per row out of what is split over context and {over}: it "
            "ends the process",
            fix="a sum over the entries that compares each with the label, as jp.next_token does; or pipe=1, context=1 "
            "or " + ("tensor=1" if over == "tensor" else "head='last'"),
        )


def _axes(entry: Axes) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


CONTEXT = Technique(
    axis="context", problems=problems, names=names, settle=settle, check=check, how=HOW, bind=bind, told=told
)
