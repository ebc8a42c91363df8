"""`jp.compose` and `jp.train_step`: a layout and its step, with the choices that other packages make for them.

An integer program chooses the dims that `tensor` splits if `specs="found"`, and the planner the attention method if
`context_by="auto"`. Both are imported only then.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import optax
from jax.sharding import Mesh

from jaxpar.errors import refuse, suggest
from jaxpar.mesh.devices import Simulated
from jaxpar.parallel import compose as composer
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.base import AttentionCall, AttentionChoice
from jaxpar.sharding.names import Blueprint
from jaxpar.step.memory_error import OutOfMemoryError
from jaxpar.step.numerics import Numerics
from jaxpar.step.state import check_seed
from jaxpar.step.step import NONE, Loss, Step


def compose(
    model: Callable | Blueprint, parallel: Parallel, devices: Sequence[Any] | Mesh | Simulated | int | None = None
) -> Layout:
    if getattr(parallel, "specs", "") == "found":
        model = _with_finder(composer.as_blueprint(model))
    return composer.compose(model, parallel, devices)


compose.__doc__ = composer.compose.__doc__


def _with_finder(blueprint: Blueprint) -> Blueprint:
    """Lets specs be found for the example call of `jp.from_nnx` or `jp.from_linen`."""
    if blueprint.example is None or blueprint.find_specs is not None:
        return blueprint

    def find(parallel: Parallel) -> tuple[Parallel, str]:
        from jaxpar.specs.find import find_specs_of_call  # imported here, so that other layouts do not load it

        found = find_specs_of_call(blueprint, parallel)
        return found.parallel, found.sentence

    return replace(blueprint, find_specs=find)


def train_step(
    layout: Layout,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    guard: bool = False,
    seed: int = 0,
    measures: Mapping[str, Callable] = NONE,
    **numerics: Any,
) -> Step:
    """Returns the training step of a layout.

    Args:
      layout: From `compose`.
      loss: Function of (model, batch[, key]) that returns (sum, count), or a dict of such pairs with an entry `loss`.
        The random key depends on step and microbatch, not on the layout; all evaluations share one key.
      optimizer: The optax chain passed to `init_state`.
      guard: Whether to skip the update if the loss or the gradients are not finite, or the loss is above a limit.
      seed: Seed of the loss's random keys.
      measures: Additional evaluation metrics by name: functions of (model, batch) that return (sum, count).
      **numerics: `accumulate`, `precision`, `remat`, `offload`, `collectives`: see `Numerics`.

    Raises:
      JaxparError: If a setting is unknown or has an invalid value.
    """
    names = [field.name for field in dataclasses.fields(Numerics)]
    for key in numerics:
        if key not in names:
            raise refuse(
                f"{key}={numerics[key]!r:.60}", rule=f"a step takes {', '.join(names)}", fix=suggest(key, names)
            )
    if not callable(loss):
        raise refuse(
            f"loss={loss!r:.60}",
            rule="a loss is a function of (model, batch), or of (model, batch, key)",
            fix="jp.next_token_loss, or lambda model, batch: (jnp.sum(losses), losses.size)",
        )
    settings = Numerics(**numerics)
    return Step(
        layout,
        loss,
        optimizer,
        settings,
        guard=guard,
        seed=check_seed(seed),
        measures=measures,
        choose=choose_attention,
        explain=explain_out_of_memory,
    )


def explain_out_of_memory(step: Step, kind: str, batch: Mapping[str, object], error: BaseException) -> OutOfMemoryError:
    """Explains that a step is out of memory. The import is here because other steps do not need it."""
    from jaxpar.train.memory_explanation import explain_step

    return explain_step(step, kind, batch, error)


def choose_attention(call: AttentionCall) -> AttentionChoice:
    """Resolves `context_by="auto"` with the planner. The import is here because most steps do not need the planner."""
    from jaxpar.plan.techniques.auto_context import choose_form

    return choose_form(call)
