"""The optimizer of a job: an optax chain and its learning rate, from a handful of settings."""

from collections.abc import Callable

import jax
import optax

from jaxpar.optim.optimizer import Optimizer


def schedule(spec: Optimizer, steps: int) -> Callable:
    """Returns the learning rate as a function of the step, over a run of `steps`."""
    rest = max(1, steps - spec.warmup)
    falling = {
        "constant": lambda: optax.constant_schedule(spec.learning_rate),
        "cosine": lambda: optax.cosine_decay_schedule(spec.learning_rate, rest, alpha=spec.final),
        "linear": lambda: optax.linear_schedule(spec.learning_rate, spec.final * spec.learning_rate, rest),
    }[spec.decay]()
    rising = optax.linear_schedule(0.0, spec.learning_rate, spec.warmup)
    return optax.join_schedules([rising, falling], [spec.warmup]) if spec.warmup else falling


def build(spec: Optimizer, steps: int) -> optax.GradientTransformation:
    """Returns the optax chain: clipping by global norm, then the optimizer with its schedule."""
    rate = schedule(spec, steps)
    made = {
        "adamw": lambda: optax.adamw(rate, spec.beta1, spec.beta2, weight_decay=spec.weight_decay, mask=_matrices),
        "adam": lambda: optax.adam(rate, spec.beta1, spec.beta2),
        "sgd": lambda: optax.sgd(rate, spec.beta1 or None),
        "lion": lambda: optax.lion(rate, spec.beta1, spec.beta2, weight_decay=spec.weight_decay, mask=_matrices),
        "lamb": lambda: optax.lamb(rate, spec.beta1, spec.beta2, weight_decay=spec.weight_decay, mask=_matrices),
        "lars": lambda: optax.lars(rate, spec.weight_decay, weight_decay_mask=_matrices, momentum=spec.beta1),
        "adafactor": lambda: optax.adafactor(rate, weight_decay_rate=spec.weight_decay or None),
        "muon": lambda: optax.contrib.muon(rate, weight_decay=spec.weight_decay),
    }[spec.name]()
    return optax.chain(optax.clip_by_global_norm(spec.clip), made) if spec.clip else made


def _matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
