"""The protocol of a technique: the functions that a declaration, a layout and a step call.

declared    problems(parallel)           problems of the declaration alone
composed    names(parallel)              names of dims to mesh axes, in addition to those of its axis
            idle(layout)                 problems of an axis that has no effect or cannot work
            resolve(layout, compose)     its choices that the declaration left open, with a sentence on the reason
traced      how                          implementations of the islands that a model calls, such as jp.attention
lowered     check(layout, named, text)   its requirements of the model, seen in the traced step
            island_fix(layout, islands)  the island that a model should call whose devices repeat each other's work
compiled    compiler_options(layout)     XLA options that let its collectives overlap, on several GPUs

A traced step may ask a planner which implementation runs a call of attention (`context_by="auto"`):

    parallel  asks        AttentionCall ──► choose ──► AttentionChoice
    plan      answers     `jaxpar.plan.techniques.auto_context.choose_form`
    train, job hand it in `jaxpar.train_step`, and `all_techniques.tracing(layout, use, choose)`

A plan reads layouts, so `plan` imports this package, and this package knows only these types of a plan.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from jaxpar.errors import Problem, refuse
from jaxpar.mesh.axes import AXES
from jaxpar.mesh.xla import CompilerOption
from jaxpar.parallel.declaration import Axes, Parallel, size_setting
from jaxpar.parallel.layout import Layout

KERNELS = ("auto", "cudnn", "plain")  # values of `context_kernel`


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """A call of attention, over all devices.

    Attributes:
      sequences: Sequences of a replica.
      seq: Tokens of a sequence.
      heads: Heads of queries.
      kv_heads: Heads of keys.
      head_dim: Width of a head.
      causal: Whether the mask is causal.
      window: As in `jaxpar.attention`.
      segments: Whether several documents share a sequence and do not attend to each other.
      softcap: Whether scores are capped, which cuDNN's kernel does not do.
      dtype: Dtype of the queries.
      context: Devices that share a sequence.
      tensor: Devices that share the heads.
      state_bytes: Bytes of a device's training state.
      layers: Layers whose attention weights are saved for the backward pass: all layers, or 1 with recomputation.
      chip: The chip, a key of `jaxpar.plan.machine.hardware.HARDWARE`; "" if none is known.
      kernel: `context_kernel` of `jaxpar.Parallel`.
    """

    sequences: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None = None
    segments: bool = False
    softcap: bool = False
    dtype: str = "bfloat16"
    context: int
    tensor: int = 1
    state_bytes: int = 0
    layers: int = 1
    chip: str = ""
    kernel: str = "auto"


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """An implementation of context parallelism (`context_by` and `ulysses` of `jaxpar.Parallel`), and the reason."""

    context_by: str
    ulysses: int
    why: str


Choose = Callable[[AttentionCall], AttentionChoice]


def refuse_choice(call: AttentionCall) -> AttentionChoice:
    """Refuses to choose in a program without a planner.

    Raises:
      JaxparError: Always.
    """
    raise refuse(
        f"context_by='auto' over context={call.context}, in a program without a planner",
        rule="a planner chooses the implementation of attention; only jp.train_step and jobs have one",
        fix='jp.Parallel(context_by="ring"), or another form by name',
    )


Compose = Callable[[Parallel], tuple[Layout | None, list[Problem]]]


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """Facts about the step that is being traced.

    Attributes:
      choose: Makes choices that the declaration leaves to a planner.
      saves_activations: Whether layers save activations for the backward pass.
    """

    choose: Choose
    saves_activations: bool = False


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A technique, and the axis that it communicates over.

    Attributes:
      axis: Name of the axis.
      problems: Returns the problems of a declaration that do not depend on model and devices.
      names: Maps names of dims to mesh axes, in addition to or instead of the dims of the axis.
      idle: Returns problems of an axis that has no effect on a model, or does not support it.
      resolve: Returns a layout with the choices that the declaration left open, each with a sentence in `Layout.notes`.
        Its arguments are the layout, and a function that composes the same model under another declaration.
      how: Implementations of a model's islands, if any: name of the implementation to {name of the island: function}.
        The first is the default; `Parallel.how` chooses another. The default also runs if the axis has size 1 or the
        mesh lacks it, unless another technique implements the island. So without the axis it must compute what the
        plain function computes, or `bind` must omit it.
      bind: Returns these functions with further arguments bound, from a layout, the functions, and the traced step.
      check: Refuses a step, judging by the activation dims that the model named and by the lowered program.
      island_fix: Returns the island that a model should call whose devices repeat each other's work, as text, from a
        layout and the names of the islands that it called; "" if there is none.
      compiler_options: Returns XLA options for several GPUs, unless the job wants XLA's own choice
        (`collectives="plain"`).
    """

    axis: str
    problems: Callable[[Parallel], list[Problem]] = lambda _: []
    names: Callable[[Parallel], Mapping[str, Axes]] = lambda _: {}
    idle: Callable[[Layout], list[Problem]] = lambda _: []
    resolve: Callable[[Layout, Compose], Layout] = lambda layout, _: layout
    how: Mapping[str, Mapping[str, Callable]] = field(default_factory=dict)
    bind: Callable[[Layout, Mapping[str, Callable], TracedStep], Mapping[str, Callable]] = lambda _, how, __: how
    check: Callable[[Layout, set[str], Any], None] = lambda *_: None
    island_fix: Callable[[Layout, Set[str]], str] = lambda *_: ""
    compiler_options: Callable[[Layout], Iterable[CompilerOption]] = lambda _: ()


def unsplit_axis_problems(layout: Layout, axis: str, dims: str) -> list[Problem]:
    """Returns a problem if an axis splits no parameter, or vectors alone while names of matrices have no rule."""
    split = {
        path: len(place.leaf.shape) for path, place in layout.placements.items()
        if any(axis in axes_tuple(entry) for entry in place.sharded)
    }  # fmt: skip
    name = _name_to_split(layout, axis)
    if layout.sizes[axis] == 1 or (split and (name is None or max(split.values()) > 1)):
        return []
    rules = f"a rule for a dim of this model, as rules={{{name!r}: {axis!r}}}" if name else _as_paths(layout, axis)
    nothing = f"does nothing: it splits no parameter of {layout.blueprint.name}"
    vectors = f"splits only {', '.join([*split][:3])} of {layout.blueprint.name}"
    return [
        Problem(
            f"{axis}={layout.sizes[axis]} {vectors if split else nothing}",
            f"every axis of the mesh splits work; `{axis}` splits dims {dims}",
            f"{size_setting(axis, 1)} and a larger data, or {rules}",
        )
    ]


def _name_to_split(layout: Layout, axis: str) -> str | None:
    """Returns the name without a rule whose dim is largest, of those that the axis divides; None if there is none."""
    sizes = {
        name: size
        for place in layout.placements.values() for name, size in zip(place.names, place.leaf.shape, strict=True)
        if name is not None and name not in {*layout.names, *layout.sizes} and size % layout.sizes[axis] == 0
    }  # fmt: skip
    return max(sizes, key=lambda name: sizes[name], default=None)


def _as_paths(layout: Layout, axis: str) -> str:
    """Returns the fix for a model whose dims have no names: path rules."""
    names, size = AXES[axis].splits, layout.sizes[axis]
    shapes = {path: place.leaf.shape for path, place in layout.placements.items() if not any(place.names)}
    path = next((path for path, shape in shapes.items() if len(shape) > 1 and shape[-1] % size == 0), None)
    if not names or path is None:
        return "rules that name dims of this model"
    dims = (*(None,) * (len(shapes[path]) - 1), "mlp" if "mlp" in names else names[0])
    return f"names for dims that the model leaves without, as paths={{{path!r}: {dims}}}"


def axes_tuple(entry: str | Iterable[str] | None) -> tuple[str, ...]:
    """Returns the axes of one dim as a tuple."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
