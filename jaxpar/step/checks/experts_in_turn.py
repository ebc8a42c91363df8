"""Warns of matrices over `expert` that are no experts, and of experts that a Python loop takes one by one.

The devices of `expert` see other examples. What other matrices compute with a dim over `expert` is exchanged in every
layer, and a loop that takes one expert at a time leaves nothing that they could compute at once: each matrix is sent to
all of them.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from jaxpar.hlo.source_frames import equation_frame
from jaxpar.hlo.text import SourceFrame
from jaxpar.models.dim_names import spec_axes
from jaxpar.models.islands import MIXTURE
from jaxpar.parallel.layout import Layout

AXIS = "expert"


def check_experts(layout: Layout, jaxpr: Jaxpr) -> None:
    """Warns if a rule splits dims of several sizes over `expert`, or if the model takes experts one by one.

    Args:
      layout: A layout in which `expert` has several devices.
      jaxpr: The traced step.
    """
    for message in (*_mixed_rules(layout), *_loops(layout, jaxpr)):
        warnings.warn(f"{layout.blueprint.name}: {message}", stacklevel=4)


def _mixed_rules(layout: Layout) -> Iterator[str]:
    """Yields a message for each rule of the user by which `expert` splits dims of several sizes."""
    for name, axes in layout.parallel.rules.items():
        if AXIS not in spec_axes(axes):
            continue
        dims: dict[int, str] = {}
        experts = ""
        for path, place in layout.placements.items():
            for dim, (size, named) in enumerate(zip(place.leaf.shape, place.names, strict=True)):
                if named == name:
                    dims.setdefault(size, f"dim {dim} of {path} ({size})")
            if place.names[:1] == (name,) and len(place.names) > 2 and place.leaf.shape[0] == min(dims):
                experts = "/".join(path.split("/")[-2:])
        if len(dims) > 1:
            yield (
                f"rules={{{name!r}: {axes!r}}} splits {' and '.join(dims.values())}, which are not all experts: "
                "`expert` splits the examples too, so what other matrices compute is exchanged in every layer\n"
                f"  fix: in place of the rule, paths={{{experts or 'experts/up'!r}: ('expert', 'embed', 'mlp')}} and "
                "so on for the experts alone; `expert` then shards other parameters as fsdp does"
            )


def _loops(layout: Layout, jaxpr: Jaxpr) -> Iterator[str]:
    """Yields a message if all entries of a stack of experts are taken one by one."""
    stacks = {
        place.leaf.shape: path
        for path, place in layout.placements.items()
        if len(place.leaf.shape) > 2 and AXIS in spec_axes(place.used[0] if place.used else None)
    }
    entries: defaultdict[str, set[int]] = defaultdict(set)
    for equation, frame in _slices(jaxpr, None):
        stack, entry = (variable.aval.shape for variable in (*equation.invars, *equation.outvars))  # pyright: ignore[reportAttributeAccessIssue]
        if stack not in stacks or entry != (1, *stack[1:]):
            continue
        entries[path := stacks[stack]].add(equation.params["start_indices"][0])
        if len(entries[path]) == stack[0]:
            size, line = layout.sizes[AXIS], f"{Path(frame.file).name}:{frame.line}" if frame else "a line"
            yield (
                f"{line} takes the {stack[0]} experts of {path} one by one, so every device computes all of them for "
                f"its own examples, and each matrix is sent to all {size} devices of `expert`\n"
                f"  fix: expert=1 and fsdp={size}, which gathers each stack once; or one matmul of all experts, "
                f"batched by dim 0; or {MIXTURE}"
            )
            return


def _slices(jaxpr: Jaxpr, enclosing: SourceFrame | None) -> Iterator[tuple[JaxprEqn, SourceFrame | None]]:
    """Yields all slices at constant indices, those of inner jaxprs too, with the user's lines."""
    for equation in jaxpr.eqns:
        frame = equation_frame(equation, enclosing)
        if equation.primitive.name == "slice":
            yield equation, frame
        for inner in jaxprs_in_params(equation.params):
            yield from _slices(inner, frame)
