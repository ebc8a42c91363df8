"""Builds the optax chain and the learning-rate schedule of a job from its settings."""

from collections.abc import Callable, Collection
from inspect import signature
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from jaxpar.errors import refuse
from jaxpar.optim.muon import STACKS, VECTOR, Names
from jaxpar.optim.optax_lookup import RATES, UserFunctions, call_checked, find_optimizer, find_schedule
from jaxpar.optim.optimizer import SETTINGS, SWEPT, Optimizer, RateSchedule
from jaxpar.optim.step_inputs import PLATEAU
from jaxpar.optim.wrappers import LAYERWISE, per_layer, without_stack_dims

NONE = UserFunctions()
MASKS = {"adamw": "mask", "lion": "mask", "lamb": "mask", "lars": "weight_decay_mask"}  # mask of decayed weights
RATIOS = "trust_ratio_mask"  # argument of optax's lars: mask of weights with a trust ratio
OR_NONE = {"sgd": "momentum", "adafactor": "weight_decay_rate"}  # optax needs None, not 0, to leave these out


def schedule(spec: Optimizer, steps: int, *, user_functions: UserFunctions = NONE, **given: Any) -> Callable:
    """Builds the learning rate as a function of the step.

    Args:
      spec: Optimizer settings.
      steps: Number of steps in the run.
      user_functions: The user's own functions that the settings name.
      **given: Values of `learning_rate` and `final` that are arrays.
    """
    decay_steps = max(1, steps - spec.warmup)
    highest, final = given.get("learning_rate", spec.learning_rate), given.get("final", spec.final)
    if spec.schedule.name and spec.schedule.name != PLATEAU:
        decay = _named_schedule(spec.schedule, highest, decay_steps, user_functions)
    else:
        decay = {
            "constant": lambda: optax.constant_schedule(highest),
            PLATEAU: lambda: optax.constant_schedule(highest),
            "cosine": lambda: optax.cosine_decay_schedule(highest, decay_steps, alpha=final),
            "linear": lambda: optax.linear_schedule(highest, final * highest, decay_steps),
        }[spec.schedule.name or spec.decay]()
    warmup = optax.linear_schedule(0.0, highest, spec.warmup)
    base = optax.join_schedules([warmup, decay], [spec.warmup]) if spec.warmup else decay
    if not spec.drops:
        return base
    drop_factor = optax.piecewise_constant_schedule(1.0, {step: 1 / factor for step, factor in spec.drops})
    return lambda count: base(count) * drop_factor(count)


def _named_schedule(
    spec: RateSchedule, highest: jax.Array | float, decay_steps: int, user_functions: UserFunctions
) -> Callable:
    """Builds the schedule that the settings name; it starts at its step 0."""
    function, rate = find_schedule(spec.name, user_functions.schedule)
    provided = {rate: highest}
    if user_functions.schedule and "steps" in signature(user_functions.schedule).parameters:
        provided["steps"] = decay_steps
    return call_checked(spec.name, function, spec.arguments, provided, key="optimizer.schedule.arguments")


def build(
    spec: Optimizer,
    steps: int,
    swept: Collection[str] = (),
    *,
    user_functions: UserFunctions = NONE,
    names: Callable[[], Names] = dict,
) -> optax.GradientTransformation:
    """Builds the optax chain: clipping by global norm, then the optimizer with its schedule.

    Args:
      spec: Optimizer settings.
      steps: Number of steps in the run.
      swept: Settings from `SWEPT` that are arrays in the optimizer's state instead of constants of the program.
      user_functions: The user's own functions that the settings name.
      names: Function that returns path to dim names, to recognize stacked layers; called only if needed.

    Raises:
      JaxparError: If there is no optimizer or schedule of this name, or it does not accept the arguments.
    """
    if not swept:
        return _build(spec, steps, user_functions, names)

    # optax reads the names of the settings from the signature
    def build_with(learning_rate=None, final=None, weight_decay=None, beta1=None, beta2=None, clip=None):
        settings = dict(zip(SWEPT, (learning_rate, final, weight_decay, beta1, beta2, clip), strict=True))
        return _build(
            spec, steps, user_functions, names, **{name: value for name, value in settings.items() if value is not None}
        )

    return optax.inject_hyperparams(build_with)(**{name: float(getattr(spec, name)) for name in swept})


def _build(
    spec: Optimizer, steps: int, user_functions: UserFunctions, names: Callable[[], Names], **given: Any
) -> optax.GradientTransformation:
    """Builds the chain, with arrays for some settings; an array is used even if its value has no effect."""
    rate: Any = schedule(spec, steps, user_functions=user_functions, **given)
    if (
        spec.name not in SETTINGS and not user_functions.optimizer and spec.is_constant
    ):  # some optax optimizers need a number
        rate = given.get("learning_rate", spec.learning_rate)
    settings = {name: given.get(key, getattr(spec, key)) for name, key in SETTINGS.get(spec.name, {}).items()}
    if (name := OR_NONE.get(spec.name)) and not isinstance(settings[name], jax.Array):
        settings[name] = settings[name] or None
    layerwise = spec.name in LAYERWISE and not user_functions.optimizer
    dims = without_stack_dims(names) if layerwise else names
    if mask := MASKS.get(spec.name):
        settings[mask] = decay_mask(dims if "weight_decay" in given or spec.weight_decay else dict)
    if spec.name == "lars" and RATIOS not in spec.arguments:  # no ratio for biases and norms, as in the paper's runs
        settings[RATIOS] = decay_mask(dims)
    function = find_optimizer(spec.name, user_functions.optimizer)
    settings[RATES.get(spec.name, "learning_rate")] = rate
    transformation = call_checked(spec.name, function, spec.arguments, settings, key="optimizer.arguments")
    if isinstance(transformation, optax.MultiSteps):
        transformation = transformation.gradient_transformation()
    if layerwise:
        transformation = per_layer(transformation, names)
    if not isinstance(transformation, optax.GradientTransformation):
        raise refuse(
            f'optimizer.name = "{spec.name}" makes a {type(transformation).__name__}',
            rule="an optimizer is an optax chain",
            fix="return optax.chain(...)",
        )
    if spec.schedule.name == PLATEAU:
        scaling = call_checked(
            PLATEAU, optax.contrib.reduce_on_plateau, spec.schedule.arguments, {}, key="optimizer.schedule.arguments"
        )
        transformation = optax.chain(transformation, scaling)
    if "clip" in given:  # 0 does not clip
        largest = jnp.where(given["clip"] > 0, given["clip"], jnp.inf)
        return optax.chain(optax.clip_by_global_norm(largest), transformation)
    return optax.chain(optax.clip_by_global_norm(spec.clip), transformation) if spec.clip else transformation


def decay_mask(names: Callable[[], Names]) -> Callable[[Any], Any]:
    """Builds the function that masks parameters for weight decay: it selects matrices, and stacks of matrices.

    Biases and scales count as vectors even if they have several dims, such as heads and head_dim in attention.

    Args:
      names: Function that returns path to dim names, or to None for a parameter without names.
    """

    def mask(params: optax.Params) -> Any:
        dim_names = names()

        def one(keys: KeyPath, leaf: jax.Array) -> bool:
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            stacks = sum(1 for _ in takewhile(lambda name: name in STACKS, dim_names.get(path) or ()))
            return leaf.ndim - stacks > 1 and not VECTOR.search(path)

        return jax.tree_util.tree_map_with_path(one, params)

    return mask
