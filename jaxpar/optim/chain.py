"""The optimizer of a job: an optax chain and its learning rate, from a handful of settings."""

from collections.abc import Callable, Collection
from inspect import signature
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import refuse
from jaxpar.optim.extra import PLATEAU
from jaxpar.optim.muon import STACKS, VECTOR, Names
from jaxpar.optim.named import RATES, Own, call, find_optimizer, find_schedule
from jaxpar.optim.optimizer import SETTINGS, SWEPT, Optimizer
from jaxpar.optim.per_layer import LAYERWISE, of_one_layer, per_layer
from jaxpar.optim.schedule import Schedule

NONE = Own()
MASKS = {"adamw": "mask", "lion": "mask", "lamb": "mask", "lars": "weight_decay_mask"}  # which weights are decayed
RATIOS = "trust_ratio_mask"  # the argument of optax's lars: which weights have a ratio
OR_NONE = {"sgd": "momentum", "adafactor": "weight_decay_rate"}  # None, and not 0, leaves these out


def schedule(spec: Optimizer, steps: int, *, own: Own = NONE, **given: Any) -> Callable:
    """Returns the learning rate as a function of the step, over a run of `steps`.

    Args:
      spec: The settings.
      steps: Of the run.
      own: The user's own functions that the settings name.
      **given: `learning_rate` and `final`, where they are arrays.
    """
    rest = max(1, steps - spec.warmup)
    highest, final = given.get("learning_rate", spec.learning_rate), given.get("final", spec.final)
    if spec.schedule.name and spec.schedule.name != PLATEAU:
        falling = _named(spec.schedule, highest, rest, own)
    else:
        falling = {
            "constant": lambda: optax.constant_schedule(highest),
            PLATEAU: lambda: optax.constant_schedule(highest),
            "cosine": lambda: optax.cosine_decay_schedule(highest, rest, alpha=final),
            "linear": lambda: optax.linear_schedule(highest, final * highest, rest),
        }[spec.schedule.name or spec.decay]()
    rising = optax.linear_schedule(0.0, highest, spec.warmup)
    whole = optax.join_schedules([rising, falling], [spec.warmup]) if spec.warmup else falling
    if not spec.drops:
        return whole
    dropped = optax.piecewise_constant_schedule(1.0, {step: 1 / factor for step, factor in spec.drops})
    return lambda count: whole(count) * dropped(count)


def _named(spec: Schedule, highest: Any, rest: int, own: Own) -> Callable:
    """Returns the schedule that the settings name, from its first step."""
    function, rate = find_schedule(spec.name, own.schedule)
    given = {rate: highest}
    if own.schedule and "steps" in signature(own.schedule).parameters:
        given["steps"] = rest
    return call(spec.name, function, spec.arguments, given, key="optimizer.schedule.arguments")


def build(
    spec: Optimizer,
    steps: int,
    swept: Collection[str] = (),
    *,
    own: Own = NONE,
    names: Callable[[], Names] = dict,
) -> optax.GradientTransformation:
    """Returns the optax chain: clipping by global norm, then the optimizer with its schedule.

    Args:
      spec: The settings.
      steps: Of the run.
      swept: Those of `SWEPT` that are arrays in its state, and constants of the program otherwise.
      own: The user's own functions that the settings name.
      names: Returns the names of the dims of each parameter, by which stacked layers are known; asked if weights decay.

    Raises:
      JaxparError: If there is no optimizer or schedule of such a name, or with such arguments.
    """
    if not swept:
        return _made(spec, steps, own, names)

    # optax reads the names of settings off the signature
    def made(learning_rate=None, final=None, weight_decay=None, beta1=None, beta2=None, clip=None):
        each = dict(zip(SWEPT, (learning_rate, final, weight_decay, beta1, beta2, clip), strict=True))
        return _made(spec, steps, own, names, **{name: value for name, value in each.items() if value is not None})

    return optax.inject_hyperparams(made)(**{name: float(getattr(spec, name)) for name in swept})


def _made(
    spec: Optimizer, steps: int, own: Own, names: Callable[[], Names], **given: Any
) -> optax.GradientTransformation:
    """Returns the chain, with arrays for some settings: an array is always there, whatever its value."""
    rate: Any = schedule(spec, steps, own=own, **given)
    if spec.name not in SETTINGS and not own.optimizer and spec.is_constant:  # some of optax's take a number alone
        rate = given.get("learning_rate", spec.learning_rate)
    settings = {name: given.get(key, getattr(spec, key)) for name, key in SETTINGS.get(spec.name, {}).items()}
    if (name := OR_NONE.get(spec.name)) and not isinstance(settings[name], jax.Array):
        settings[name] = settings[name] or None
    layerwise = spec.name in LAYERWISE and not own.optimizer
    dims = of_one_layer(names) if layerwise else names
    if mask := MASKS.get(spec.name):
        settings[mask] = matrices(dims if "weight_decay" in given or spec.weight_decay else dict)
    if spec.name == "lars" and RATIOS not in spec.arguments:  # biases and norms have no ratio, as in the paper's runs
        settings[RATIOS] = matrices(dims)
    function = find_optimizer(spec.name, own.optimizer)
    settings[RATES.get(spec.name, "learning_rate")] = rate
    made = call(spec.name, function, spec.arguments, settings, key="optimizer.arguments")
    if isinstance(made, optax.MultiSteps):
        made = made.gradient_transformation()
    if layerwise:
        made = per_layer(made, names)
    if not isinstance(made, optax.GradientTransformation):
        raise refuse(
            f'optimizer.name = "{spec.name}" makes a {type(made).__name__}',
            rule="an optimizer is an optax chain",
            fix="return optax.chain(...)",
        )
    if spec.schedule.name == PLATEAU:
        scaling = call(
            PLATEAU, optax.contrib.reduce_on_plateau, spec.schedule.arguments, {}, key="optimizer.schedule.arguments"
        )
        made = optax.chain(made, scaling)
    if "clip" in given:  # 0 does not clip
        largest = jnp.where(given["clip"] > 0, given["clip"], jnp.inf)
        return optax.chain(optax.clip_by_global_norm(largest), made)
    return optax.chain(optax.clip_by_global_norm(spec.clip), made) if spec.clip else made


def matrices(names: Callable[[], Names]) -> Callable[[Any], Any]:
    """Returns a function of parameters to which of them are decayed: those of a stack of layers as each alone is.

    Biases and scales are vectors, whatever their dims: those of attention have one of heads and one of each head.

    Args:
      names: Returns the names of the dims of each parameter by its path, or None where it has none.
    """

    def mask(params: Any) -> Any:
        known = names()

        def one(keys: Any, leaf: Any) -> bool:
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            stacks = sum(1 for _ in takewhile(lambda name: name in STACKS, known.get(path) or ()))
            return leaf.ndim - stacks > 1 and not VECTOR.search(path)

        return jax.tree_util.tree_map_with_path(one, params)

    return mask
