"""The optimizer of a job: an optax chain and its learning rate, from a handful of settings."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.optim.optimizer import SWEPT, Optimizer


def schedule(spec: Optimizer, steps: int, **given: Any) -> Callable:
    """Returns the learning rate as a function of the step, over a run of `steps`.

    Args:
      spec: The settings.
      steps: Of the run.
      **given: `learning_rate` and `final`, where they are arrays.
    """
    rest = max(1, steps - spec.warmup)
    highest, final = given.get("learning_rate", spec.learning_rate), given.get("final", spec.final)
    falling = {
        "constant": lambda: optax.constant_schedule(highest),
        "cosine": lambda: optax.cosine_decay_schedule(highest, rest, alpha=final),
        "linear": lambda: optax.linear_schedule(highest, final * highest, rest),
    }[spec.decay]()
    rising = optax.linear_schedule(0.0, highest, spec.warmup)
    whole = optax.join_schedules([rising, falling], [spec.warmup]) if spec.warmup else falling
    if not spec.drops:
        return whole
    dropped = optax.piecewise_constant_schedule(1.0, {step: 1 / factor for step, factor in spec.drops})
    return lambda count: whole(count) * dropped(count)


def build(spec: Optimizer, steps: int, swept: Collection[str] = ()) -> optax.GradientTransformation:
    """Returns the optax chain: clipping by global norm, then the optimizer with its schedule.

    Args:
      spec: The settings.
      steps: Of the run.
      swept: Those of `SWEPT` that are arrays in its state, and constants of the program otherwise.
    """
    if not swept:
        return _made(spec, steps)

    # optax reads the names of settings off the signature
    def made(learning_rate=None, final=None, weight_decay=None, beta1=None, beta2=None, clip=None):
        each = dict(zip(SWEPT, (learning_rate, final, weight_decay, beta1, beta2, clip), strict=True))
        return _made(spec, steps, **{name: value for name, value in each.items() if value is not None})

    return optax.inject_hyperparams(made)(**{name: float(getattr(spec, name)) for name in swept})


def _made(spec: Optimizer, steps: int, **given: Any) -> optax.GradientTransformation:
    """Returns the chain, with arrays for some settings: an array is always there, whatever its value."""
    rate = schedule(spec, steps, **given)
    at = lambda name: given.get(name, getattr(spec, name))  # noqa: E731
    beta1, beta2, decay = at("beta1"), at("beta2"), at("weight_decay")
    made = {
        "adamw": lambda: optax.adamw(rate, beta1, beta2, weight_decay=decay, mask=_matrices),
        "adam": lambda: optax.adam(rate, beta1, beta2),
        "sgd": lambda: optax.sgd(rate, _or_none(beta1)),
        "lion": lambda: optax.lion(rate, beta1, beta2, weight_decay=decay, mask=_matrices),
        "lamb": lambda: optax.lamb(rate, beta1, beta2, weight_decay=decay, mask=_matrices),
        "lars": lambda: optax.lars(rate, decay, weight_decay_mask=_matrices, momentum=beta1),
        "adafactor": lambda: optax.adafactor(rate, weight_decay_rate=_or_none(decay)),
        "muon": lambda: optax.contrib.muon(rate, weight_decay=decay),
    }[spec.name]()
    if "clip" in given:  # 0 does not clip
        largest = jnp.where(given["clip"] > 0, given["clip"], jnp.inf)
        return optax.chain(optax.clip_by_global_norm(largest), made)
    return optax.chain(optax.clip_by_global_norm(spec.clip), made) if spec.clip else made


def _or_none(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else value or None


def _matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
