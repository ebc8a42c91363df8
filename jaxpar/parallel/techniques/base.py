"""The protocol of a technique: what it is asked when a job is declared, composed and lowered.

declared    problems(parallel)           what is wrong with the declaration on its own
composed    names(parallel)              names of dims to mesh axes, besides what its axis splits
            idle(layout)                 why its axis would do nothing, or could not do what it should
            settle(layout, compose)      what the declaration left to it, and why in a sentence
traced      how                          what runs the islands that a model calls, such as jp.attention
lowered     check(layout, named, text)   what it needs of a model, seen in its traced step
compiled    told(layout)                 what XLA must know for its collectives to overlap, on several GPUs
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.errors import Problem
from jaxpar.mesh.axes import AXES
from jaxpar.mesh.preset import Option
from jaxpar.parallel.declare import Axes, Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.open_choice import Choose

Compose = Callable[[Parallel], tuple[Layout | None, list[Problem]]]


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The step that is traced.

    Attributes:
      choose: Answers what a declaration left to a plan.
      keeps: Whether the backward pass keeps what layers compute.
    """

    choose: Choose
    keeps: bool = False


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A technique, and the axis that it communicates over.

    Attributes:
      axis: Name of the axis.
      problems: Returns what is wrong with a declaration, before any model or device.
      names: Returns names of dims to mesh axes, besides or instead of what the axis splits by itself.
      idle: Returns why the axis does nothing for a model, or cannot do what it should.
      settle: Returns a layout in which it has chosen what the declaration left open, with a sentence on that in
        `Layout.notes`. It is given the layout, and what composes the same model under another declaration.
      how: Ways in which it runs the islands of a model, where it has any: name to the functions that implement them,
        each by the name of its island. The first is the default; `Parallel.how` chooses another.
      bind: Returns those functions with what else a layout, its declaration, and the step that is traced say of them.
      check: Refuses a step by the names of activation dims that its model used, and its lowered program.
      told: Returns options of XLA's for several GPUs, unless the job wants XLA's own choice (`collectives="plain"`).
    """

    axis: str
    problems: Callable[[Parallel], list[Problem]] = lambda _: []
    names: Callable[[Parallel], Mapping[str, Axes]] = lambda _: {}
    idle: Callable[[Layout], list[Problem]] = lambda _: []
    settle: Callable[[Layout, Compose], Layout] = lambda layout, _: layout
    how: Mapping[str, Mapping[str, Callable]] = field(default_factory=dict)
    bind: Callable[[Layout, Mapping[str, Callable], Traced], Mapping[str, Callable]] = lambda _, own, __: own
    check: Callable[[Layout, set[str], Any], None] = lambda *_: None
    told: Callable[[Layout], Iterable[Option]] = lambda _: ()


def splits_nothing(layout: Layout, axis: str, dims: str) -> list[Problem]:
    """Returns that an axis splits no parameter, where it does not."""
    used = {each for place in layout.placements.values() for entry in place.sharded for each in _axes(entry)}
    if layout.sizes[axis] == 1 or axis in used:
        return []
    known = {*layout.names, *layout.sizes, None}
    unruled = {name: axis for place in layout.placements.values() for name in place.names if name not in known}
    rules = f"rules that name dims of this model, as rules={unruled}" if unruled else _as_paths(layout, axis)
    return [
        Problem(
            f"{axis}={layout.sizes[axis]} does nothing: it splits no parameter of {layout.blueprint.name}",
            f"every axis of the mesh splits work; `{axis}` splits dims {dims}",
            f"{axis}=1 and a larger data, or {rules}",
        )
    ]


def _as_paths(layout: Layout, axis: str) -> str:
    """Returns the way out for a model whose author left dims without names, which no rule can be for."""
    names, size = AXES[axis].splits, layout.sizes[axis]
    shapes = {path: place.leaf.shape for path, place in layout.placements.items() if not any(place.names)}
    path = next((path for path, shape in shapes.items() if len(shape) > 1 and shape[-1] % size == 0), None)
    if not names or path is None:
        return "rules that name dims of this model"
    dims = (*(None,) * (len(shapes[path]) - 1), "mlp" if "mlp" in names else names[0])
    return f"names for dims that the model leaves without, as paths={{{path!r}: {dims}}}"


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
