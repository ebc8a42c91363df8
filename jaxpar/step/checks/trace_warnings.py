"""Warns of a traced step that computes more, or another loss, than its author expects.

Experts: the devices of `expert` see other examples. What other matrices compute with a dim over `expert` is exchanged
in every layer, and a loop that takes one expert at a time leaves nothing that they could compute at once: each matrix
is sent to all of them.

Pairs of rows: a contrastive loss compares each row with all others, so that an array of it grows with the square of the
rows. Each part of a batch, a microbatch or the rows of a replica with a loss of its own, has the pairs of its own rows
alone, and the loss then depends on the number of parts.

Counts: the counts of the parts of a batch are added up. One that is the same for any number of rows is then as many
times too large as there are parts.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from jaxpar.errors import JaxparError, user_code_errors
from jaxpar.hlo.source_frames import equation_frame
from jaxpar.hlo.text import SourceFrame
from jaxpar.models.dim_names import spec_axes
from jaxpar.models.experts import active_experts
from jaxpar.models.islands import MIXTURE, use_islands
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.author.explicit import sharding_translation
from jaxpar.sharding.names import Compute
from jaxpar.sharding.nnx_hooks import step_hooks
from jaxpar.step.losses import as_sums
from jaxpar.step.stochastic_loss import traceable_loss

AXIS = "expert"
Equations = list[tuple[JaxprEqn, SourceFrame | None]]
_WHOLE = "one microbatch", "one microbatch, and the exchange all_reduce"
_RULE, _FIX = (
    "a loss accepts any number of rows",
    "none is needed: pairs of rows and a constant count are not looked for",
)


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
    slices = (
        (equation, frame) for equation, frame in _all_equations(jaxpr, None) if equation.primitive.name == "slice"
    )
    for equation, frame in slices:
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


def check_parts(
    layout: Layout, loss: Callable, batch: Mapping[str, Any], *, microbatches: int, replicas: int = 1
) -> None:
    """Warns of a loss that is another one for the parts of a batch: of pairs of rows, or with a constant count.

    An array of pairs is four times as large for twice the rows. A constant count of 1 is not warned of: it is that of a
    mean. Not checked are a model that takes one number of rows alone; for pairs a loss whose operations depend on the
    number of rows, such as a Python loop over them; and counts that JAX computes, or that are not of `loss`.

    Args:
      layout: The layout of the model.
      loss: Maps (model, batch) to its sums.
      batch: Shapes of the whole batch.
      microbatches: Number of microbatches.
      replicas: Number of replicas that compute a loss of their own rows.
    """
    parts = microbatches * replicas
    rows = next(iter(batch.values())).shape[0]
    try:
        (few, count), (many, count_of_many) = _trace(layout, loss, batch, (rows // parts, 2 * rows // parts))
    except JaxparError:  # a model that takes one number of rows
        return
    if count == count_of_many and count not in (None, 1.0):
        warnings.warn(
            f"{layout.blueprint.name}: the loss counts {count:g} for {rows // parts} rows and for {2 * rows // parts}. "
            f"The counts of {parts} parts of the batch are added up, and the loss is divided by {parts * count:g}\n"
            "  fix: the count of what the loss summed, such as losses.size or the sum of the mask; ignore this if the "
            f"sum is a mean times {count:g}",
            stacklevel=4,
        )
    part = "microbatch" if replicas == 1 else "part"
    if place := _place_of_pairs(few, many):
        warnings.warn(
            f"{layout.blueprint.name}: the loss pairs the rows of a batch, as an array of {place} grows with the "
            f"square of their number. Each {part} of {parts} has the pairs of its {rows // parts} rows alone: a "
            f"contrastive loss is then not that of {rows} rows, and a mixture's capacity is of a {part}\n"
            f"  fix: {_WHOLE[replicas > 1]}; or ignore this if that is meant",
            stacklevel=4,
        )


def _place_of_pairs(few: Equations, many: Equations) -> str:
    """Returns the line of the first array that is four times as large for twice the rows, with its shape; or ""."""
    if [equation.primitive for equation, _ in few] != [equation.primitive for equation, _ in many]:
        return ""
    for (small, frame), (large, _) in zip(few, many, strict=True):
        for one, two in zip(small.outvars, large.outvars, strict=True):
            if 1 < 4 * getattr(one.aval, "size", 0) == getattr(two.aval, "size", 0):
                place = f"{Path(frame.file).name}:{frame.line}" if frame else small.primitive.name
                return f"{place} ({one.aval.str_short()})"
    return ""


def _trace(
    layout: Layout, loss: Callable, batch: Mapping[str, Any], counts: tuple[int, ...]
) -> list[tuple[Equations, float | None]]:
    """Returns the equations of the loss, and its count if that is a constant, for each number of rows."""
    blueprint = layout.blueprint
    variables = jax.eval_shape(blueprint.init, jax.eval_shape(jax.random.key, 0))

    def forward(variables, batch):
        params, model_state = variables
        model = blueprint.bind(params, model_state, lambda path, value: value, Compute())
        sums = as_sums(traceable_loss(loss)(model, batch), accumulate=1)
        return sums, sums["loss"][1]

    traces = []
    with (
        jax.set_mesh(layout.device_mesh),  # the model may use mesh axes directly
        sharding_translation(),
        step_hooks(),
        use_islands({"mixture": active_experts}),  # its slots are of a microbatch in any case
    ):
        for count in counts:
            shapes = {
                name: jax.ShapeDtypeStruct((count, *value.shape[1:]), value.dtype) for name, value in batch.items()
            }
            with user_code_errors(f"{blueprint.name} on {count} rows", rule=_RULE, fix=_FIX):
                closed = jax.make_jaxpr(forward)(variables, shapes)
            traces.append(([*_all_equations(closed.jaxpr, None)], _constant_result(closed.jaxpr, closed.consts)))
    return traces


def _constant_result(jaxpr: Jaxpr, values: Sequence[Any]) -> float | None:
    """Returns the last result if it is a constant scalar, or None; `values` are those of the jaxpr's constants."""
    result = jaxpr.outvars[-1]
    if isinstance(result, Literal):
        return float(result.val)
    constants = dict(zip(jaxpr.constvars, values, strict=True))
    return float(constants[result]) if result in constants else None


def _all_equations(jaxpr: Jaxpr, enclosing: SourceFrame | None) -> Iterator[tuple[JaxprEqn, SourceFrame | None]]:
    """Yields all equations, those of inner jaxprs too, with the user's lines."""
    for equation in jaxpr.eqns:
        frame = equation_frame(equation, enclosing)
        yield equation, frame
        for inner in jaxprs_in_params(equation.params):
            yield from _all_equations(inner, frame)
