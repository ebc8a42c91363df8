"""Context parallelism: devices split every sequence, and attention communicates between its shards.

    gather     all keys and values on every device     attention_gather.py     short sequences, any number of tokens
    ring       keys and values rotate                  ring_attention/         long sequences, memory of one shard
    ulysses    heads for tokens                        ring_attention/         long sequences, as many devices as heads
    auto       of those that fit in memory, the fastest by the planner's formulas

To add an implementation: a file beside `attention_gather.py` with a function of the arguments of `jp.attention`, and a
row of `HOW`. `Parallel(context_by=name)` chooses it, or `Parallel(how={"context": name})` for one that a user adds.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Lowered

from jaxpar.errors import Problem, nearest_divisor, refuse, suggest
from jaxpar.mesh.chips import find_chip
from jaxpar.mesh.xla import CompilerOption
from jaxpar.models.dim_names import get_spec
from jaxpar.models.islands import QUERIES, note
from jaxpar.parallel.declaration import Axes, Parallel
from jaxpar.parallel.layout import Layout, per_device, with_note
from jaxpar.parallel.techniques.attention_gather import gather
from jaxpar.parallel.techniques.base import KERNELS, AttentionCall, Compose, Technique, TracedStep, axes_tuple
from jaxpar.sharding.infer_stacks import longest_list
from jaxpar.sharding.names import shard_bytes


def ring(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """Attention over rotating sequence shards; see `distributed_attention`, which is imported at the first call."""
    from jaxpar.parallel.techniques.ring_attention.attention import distributed_attention

    return distributed_attention(q, k, v, **options)


def auto(
    q: jax.Array, k: jax.Array, v: jax.Array, *, layout: Layout, step: TracedStep, kernel: str = "auto", **masks: Any
) -> jax.Array:
    """Attention by the implementation that the planner finds fastest; notes the choice and its reason.

    The choice is made during tracing, for the layout's chip, which need not be present.
    """
    spec, masked = get_spec(QUERIES), {name: mask for name, mask in masks.items() if mask is not None}
    cut = () if spec is None or spec[2] is None else (spec[2],) if isinstance(spec[2], str) else spec[2]
    choice = step.choose(
        AttentionCall(
            sequences=max(1, q.shape[0] // layout.replicas),
            seq=k.shape[1],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            causal=bool(masks["causal"]),
            window=masked.get("window"),
            segments="segments" in masked,
            softcap="softcap" in masked,
            dtype=str(q.dtype),
            context=layout.sizes["context"],
            tensor=math.prod(layout.sizes.get(axis, 1) for axis in cut),
            state_bytes=training_bytes(layout),
            layers=depth(layout) if step.saves_activations else 1,
            chip=chip_key(layout),
            kernel=kernel,
        )
    )
    note(choice.why)
    if choice.context_by == "gather" and kernel != "auto":
        note(f"context_kernel={kernel!r} does nothing, as keys are gathered")
    run = gather if choice.context_by == "gather" else partial(ring, ulysses=choice.ulysses, kernel=kernel)
    return run(q, k, v, **masks)


HOW: dict[str, Mapping[str, Callable]] = {
    "gather": {"attention": gather},
    "ring": {"attention": ring},
    "ulysses": {"attention": partial(ring, ulysses=0)},
    "auto": {"attention": auto},
}
WHY = {
    "gather": "every device gathers all keys and values, which is least to wait for while rows are short",
    "ring": "keys and values rotate while queries attend to those that arrived; no scores are kept",
    "ulysses": "devices exchange heads for tokens, and each meets all keys with its own heads; no scores are kept",
    "auto": "a plan's fastest form of those whose scores fit, chosen as a step is traced, which then says it",
}
KERNEL = {
    "auto": "parts of attention are run by cuDNN's kernel on GPUs in 16 bits where it takes heads and masks, else, "
    "and on simulated devices, in blocks of plain JAX; the step's report says which",
    "cudnn": "parts of attention are run by cuDNN's kernel, as asked",
    "plain": "parts of attention are run in blocks of plain JAX, as asked",
}
_AT_ONCE = CompilerOption(
    name="xla_gpu_experimental_parallel_collective_overlap_limit",
    value=2,
    why="a ring step sends keys and gradients of keys; if only one collective runs at a time, it waits for the other",
)
# of each row one entry of a floating-point array, as take_along_axis of logits; a mixture of experts takes vectors
_PICK = re.compile(r'"?stablehlo\.gather(?!.*offset_dims).*operand_batching_dims.*: \(tensor<[0-9x]*x(bf|f)\d')


def names(parallel: Parallel) -> dict[str, Axes]:
    """Returns the axes of a sequence; with sequence parallelism also `tensor`, unless an earlier dim uses that axis."""
    return {"seq": ("context", *["tensor"] * parallel.sequence)}


def problems(parallel: Parallel) -> list[Problem]:
    """Returns the problems of `context_by`, `context_kernel` and `ulysses`."""
    by, devices, ulysses, kernel = parallel.context_by, parallel.context, parallel.ulysses, parallel.context_kernel
    if type(devices) is not int:
        return []  # refused where sizes are
    if by not in HOW:
        rule = f"context_by is one of {', '.join(HOW)}"
        return [Problem(f"context_by={by!r}", rule, suggest(str(by), HOW))]
    errors = []
    if by != "gather" and devices == 1:
        fix = "context=2 or more, or leave context_by out"
        errors.append(
            Problem(
                f"context_by={by!r} with context=1 does nothing",
                "it chooses the attention between devices of `context`",
                fix,
            )
        )
    if by != "gather" and "context" in parallel.how:
        got = f"context_by={by!r} and how={{'context': {parallel.how['context']!r}}}"
        errors.append(Problem(got, "attention runs in one way", "one of the two"))
    if kernel not in KERNELS:
        rule = f"context_kernel is one of {', '.join(KERNELS)}"
        errors.append(Problem(f"context_kernel={kernel!r}", rule, suggest(str(kernel), KERNELS)))
    elif kernel != "auto" and by == "gather":
        got = f"context_kernel={kernel!r} with context_by='gather' does nothing"
        errors.append(Problem(got, "it says what runs the parts of attention where pieces travel", "context_by='ring'"))
    if type(ulysses) is not int or ulysses < 1 or (devices > 0 and devices % ulysses):
        fix = f"ulysses={nearest_divisor(devices, ulysses) or 1}" if type(ulysses) is int else "ulysses=2"
        rule = "the devices of the context axis that exchange heads are equal groups of it"
        errors.append(Problem(f"ulysses={ulysses!r} of context={devices}", rule, fix))
    elif ulysses > 1 and by != "ring":
        rule = "ulysses says how many devices of a ring exchange heads; context_by='ulysses' is all of them"
        errors.append(Problem(f"ulysses={ulysses} with context_by={by!r}", rule, "context_by='ring'"))
    return errors


def bind(layout: Layout, functions: Mapping[str, Callable], step: TracedStep) -> Mapping[str, Callable]:
    """Binds the arguments of attention: the kernel, the devices that exchange heads, or the layout for `auto`."""
    parallel = layout.parallel
    arguments: dict[str, Any] = {"kernel": parallel.context_kernel} if parallel.context_kernel != "auto" else {}
    if functions is HOW["auto"]:
        arguments |= {"layout": layout, "step": step}
    if parallel.ulysses > 1 and functions is HOW["ring"]:
        arguments["ulysses"] = parallel.ulysses
    rotates = any(functions is HOW[by] for by in HOW if by != "gather")
    return {"attention": partial(functions["attention"], **arguments)} if arguments and rotates else functions


def resolve(layout: Layout, compose: Compose) -> Layout:
    """Adds notes on the implementation of attention, and the reason for it."""
    by, ulysses = layout.parallel.implementations.get("context", "gather"), layout.parallel.ulysses
    groups = f"; {ulysses} devices at a time exchange heads, {layout.sizes['context'] // ulysses} such groups rotate"
    reason = WHY.get(by, "as it was added to jaxpar")
    layout = with_note(layout, f"context by {by}: {reason}{groups if ulysses > 1 else ''}")
    kernel, rotates = layout.parallel.context_kernel, by in HOW and by != "gather"
    addition = "; auto takes a form that has it" if (by, kernel) == ("auto", "cudnn") else ""
    return with_note(layout, f"context: {KERNEL[kernel]}{addition}") if rotates else layout


def compiler_options(layout: Layout) -> list[CompilerOption]:
    """Lets XLA run two permutes at once, if keys rotate."""
    return [_AT_ONCE] if layout.parallel.implementations.get("context") in ("ring", "auto") else []


def splits_tables(layout: Layout) -> bool:
    """Whether a pipeline splits tokens over one axis that XLA handles, and the tables of its lookups over another."""
    spread = layout.parallel.pipeline.head == "spread"  # the vocabulary is then split over `pipe`
    splits_tokens = max(layout.sizes["context"], layout.sizes.get("expert", 1)) > 1
    return layout.sizes["pipe"] > 1 and splits_tokens and (layout.sizes["tensor"] > 1 or spread)


def check(layout: Layout, named: set[str], lowered: Lowered) -> None:
    """Refuses a context axis that splits no dim, or a program that XLA cannot partition.

    Raises:
      JaxparError: If no dim is named seq, and no rule splits another; or if a pipeline that splits both sequences and
        vocabulary looks up an entry per row, on which XLA 0.10 to 0.12 ends the process.
    """
    sizes, name = layout.sizes, layout.blueprint.name
    if sizes["context"] == 1:
        return
    if not any("context" in axes_tuple(layout.names.get(dim_name)) for dim_name in named):
        unruled = sorted(named - layout.names.keys())
        fixes = ['jp.constrain(x, "batch", "seq", "embed") on the stream']
        if unruled:
            rule = f"rules={{{unruled[0]!r}: 'context'}} in Parallel"
            fixes.append(f"{rule} if that is the sequence, of the names without a rule: {', '.join(unruled)}")
        raise refuse(
            f"context={sizes['context']}, but {name} names no activation dim seq",
            rule="context parallelism splits the dim that is called seq, or that a rule of the user's splits; else its "
            "devices all do the same work",
            fix=f"{', or '.join(fixes)}, or context=1",
        )
    check_picks(layout, lowered)


def check_picks(layout: Layout, lowered: Lowered) -> None:
    """Refuses a pipeline in which XLA would end the process, at a lookup of an entry per row of what an axis splits.

    Raises:
      JaxparError: If XLA splits tokens over `context` or `expert` there, and the vocabulary over another axis.
    """
    sizes, name = layout.sizes, layout.blueprint.name
    if splits_tables(layout) and _PICK.search(lowered.as_text()):
        axis = "tensor" if sizes["tensor"] > 1 else "pipe"
        tokens = "context" if sizes["context"] > 1 else "expert"
        head = "" if axis == "tensor" else ", head='spread'"
        raise refuse(
            f"take_along_axis in {name} or its loss, on pipe={sizes['pipe']} x {tokens}={sizes[tokens]} x "
            f"tensor={sizes['tensor']}{head}",
            rule=f"inside of a pipeline XLA picks no entry per row out of what is split over {tokens} and {axis}: it "
            "ends the process",
            fix="a sum over the entries that compares each with the label, as jp.next_token_loss does; or pipe=1, "
            f"{tokens}=1 or " + ("tensor=1" if axis == "tensor" else "head='last'"),
        )


CONTEXT = Technique(
    axis="context",
    problems=problems,
    names=names,
    resolve=resolve,
    check=check,
    how=HOW,
    bind=bind,
    compiler_options=compiler_options,
)


def training_bytes(layout: Layout) -> int:
    """Returns the bytes per device of all parameters, and of gradients and two Adam moments of trained parameters."""
    trained = [place for path, place in layout.placements.items() if path not in layout.frozen]
    whole = sum(shard_bytes(place.leaf, place.whole, layout.sizes) for place in trained)
    sharded = sum(shard_bytes(place.leaf, place.sharded, layout.sizes) for place in trained)
    stage = layout.parallel.stage
    gradients, moments = sharded if stage >= 2 else whole, 2 * (sharded if stage >= 1 else whole)
    return per_device(layout, layout.placements) + gradients + moments


def depth(layout: Layout) -> int:
    """Returns the number of layers of the model's deepest stack or list; 1 if there is none."""
    stacks = [place.leaf.shape[0] for place in layout.placements.values() if place.names[:1] == ("layers",)]
    return max([*stacks, *map(len, longest_list(layout.blueprint.leaves, 1).values())], default=1)


def chip_key(layout: Layout) -> str:
    """Returns the chip of the devices, else the target chip: a key of `jaxpar.mesh.chips`, or "" if none is known."""
    present = isinstance(layout.mesh, Mesh) and not layout.simulated
    chip = find_chip(layout.device_mesh.devices.flat[0].device_kind) if present else None
    return chip.key if chip else layout.target
