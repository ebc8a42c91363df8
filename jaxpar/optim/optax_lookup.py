"""Looks up optimizers and schedules by any name in optax, or as the user's own functions, and checks their arguments.

adagrad              optax.adagrad(learning_rate, **arguments)
exponential_decay    optax.exponential_decay(init_value=learning_rate, **arguments)
my_module:function   function(learning_rate, **arguments)
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import JaxparError, Problem, refuse, suggest, user_code_errors
from jaxpar.optim.eval_params import eval_arrays
from jaxpar.optim.optimizer import Optimizer
from jaxpar.optim.step_inputs import PLATEAU, update

RATES = {"polyak_sgd": "max_learning_rate"}  # optimizers whose rate argument is not `learning_rate`
HIGHEST = ("peak_value", "init_value", "value")  # arguments of optax schedules that are the highest rate
MORE = {  # optimizers that need more than a step provides, and the suggested replacement
    "dpsgd": '"adamw", or another one of optax',
    "lbfgs": '"adamw", or another one of optax',
    PLATEAU: f'schedule = "{PLATEAU}", with any optimizer',
    "schedule_free": '"schedule_free_adamw", "schedule_free_sgd", or "package.module:function" for another base',
    "sophia": '"adamw", or another one of optax',
}
ALONE = (
    "an optimizer receives gradients and loss of the whole batch, its state and parameters: no function, "
    "no other optimizer, and no per-example gradients"
)
TYPES = 'arguments of the right types; decay = "constant" and warmup = 0 if the optimizer takes no schedule'
LOSS = jax.ShapeDtypeStruct((), jnp.float32)
SMALL = {"matrix": jax.ShapeDtypeStruct((3, 4), jnp.float32), "vector": jax.ShapeDtypeStruct((4,), jnp.float32)}


@dataclass(frozen=True, kw_only=True)
class UserFunctions:
    """The user's own functions that the optimizer settings name by import path; None if they name none."""

    optimizer: Callable | None = None
    schedule: Callable | None = None


@cache
def optimizers() -> dict[str, Callable]:
    """Optimizers of optax that take a learning rate and need at most the loss besides the usual update arguments."""
    functions = {**_functions(vars(optax.contrib)), **_functions(vars(optax))}
    return {
        name: function
        for name, function in functions.items()
        if RATES.get(name, "learning_rate") in inspect.signature(function).parameters and name not in MORE
    }


@cache
def schedules() -> dict[str, Callable]:
    """Lists optax's schedules that take a highest rate; optax's other schedules combine schedules."""
    return {name: function for name, function in _functions(vars(optax.schedules)).items() if _highest(function)}


def _functions(namespace: Mapping[str, object]) -> dict[str, Callable]:
    return {
        name: fn for name, fn in namespace.items() if inspect.isfunction(fn) and not name.startswith(("_", "scale_by"))
    }


def _highest(function: Callable) -> str:
    """Returns the argument of a schedule that receives the learning rate."""
    return next((name for name in HIGHEST if name in inspect.signature(function).parameters), "")


def find_optimizer(name: str, user_function: Callable | None) -> Callable:
    """Looks up an optimizer's function.

    Raises:
      JaxparError: If no optimizer has that name, or it needs arguments that a step does not have.
    """
    if user_function is not None:
        return _check_takes_rate(name, user_function, "optimizer.name")
    if name in MORE:
        raise refuse(f'optimizer.name = "{name}"', rule=ALONE, fix=MORE[name])
    available = optimizers()
    if name not in available:
        raise refuse(
            f'optimizer.name = "{name}"',
            rule='an optimizer of optax that takes a learning rate, or "package.module:function"',
            fix=suggest(name, available),
        )
    return available[name]


def find_schedule(name: str, user_function: Callable | None) -> tuple[Callable, str]:
    """Looks up a schedule's function, and its argument that receives the learning rate.

    Raises:
      JaxparError: If there is none.
    """
    if user_function is not None:
        return _check_takes_rate(name, user_function, "optimizer.schedule.name"), "learning_rate"
    available = schedules()
    if name not in available:
        raise refuse(
            f'optimizer.schedule.name = "{name}"',
            rule='a schedule of optax with a highest rate, or "package.module:function"',
            fix=suggest(name, available),
        )
    return available[name], _highest(available[name])


def _check_takes_rate(name: str, user_function: Callable, key: str) -> Callable:
    kind = "an optimizer" if key == "optimizer.name" else "a schedule"
    rule = f"{kind} is a function of learning_rate and its arguments"
    if not callable(user_function):
        raise refuse(
            f'{key} = "{name}" is a {type(user_function).__name__}',
            rule=rule,
            fix='the path of one, "my_module:my_function"',
        )
    if "learning_rate" not in inspect.signature(user_function).parameters:
        raise refuse(
            f'{key} = "{name}": {signature(name, user_function)}', rule=rule, fix="def make(learning_rate): ..."
        )
    return user_function


def signature(name: str, function: Callable) -> str:
    """Describes a function: its name, arguments and defaults."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parts = [
        stars.get(param.kind, "") + param.name + (f"={param.default!r:.40}" if param.default is not param.empty else "")
        for param in inspect.signature(function).parameters.values()
    ]
    return f"{name}({', '.join(parts)})"


def call_checked(
    name: str, function: Callable, arguments: Mapping[str, object], provided: Mapping[str, object], *, key: str
) -> Any:
    """Calls a function with checked arguments.

    Args:
      name: Name of the function in the job.
      function: The function.
      arguments: Arguments from the job.
      provided: Arguments that other settings define; `arguments` must not contain them.
      key: Job key of the arguments, such as `optimizer.arguments`.

    Raises:
      JaxparError: If arguments are unknown, missing, or already set by another key; the message lists them.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [arg.name for arg in parameters if arg.kind in (arg.POSITIONAL_OR_KEYWORD, arg.KEYWORD_ONLY)]
    required = [arg.name for arg in parameters if arg.name in names and arg.default is arg.empty]
    takes_any = any(arg.kind == arg.VAR_KEYWORD for arg in parameters)
    rule = signature(name, function)
    problems = [
        Problem(f"{key}.{arg}", f"{name} gets it from the optimizer's other keys", "leave it out")
        for arg in arguments
        if arg in provided
    ]
    problems += [
        Problem(f"{key}.{arg}", rule, suggest(arg, [name for name in names if name not in provided] or ["none"]))
        for arg in arguments
        if arg not in names and not takes_any
    ]
    problems += [
        Problem(f"{key} without {arg}", rule, f"arguments = {{ {arg} = ... }}")
        for arg in required
        if arg not in arguments and arg not in provided
    ]
    if problems:
        raise JaxparError(*problems)
    with user_code_errors(f"{name} with {key} = {dict(arguments)!r:.200}", rule=rule, fix=TYPES):
        return function(**provided, **{arg: _step_keys(value) for arg, value in arguments.items()})


def _step_keys(value: Any) -> Any:
    """Converts the keys of a table to integers if all of them are steps, because TOML keys are text."""
    steps = isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value)
    return {int(key): entry for key, entry in value.items()} if steps else value


def check_chain(optimizer: optax.GradientTransformation, spec: Optimizer, params: object) -> Any:
    """Traces a chain with gradients, parameters and the loss; returns its state as shapes.

    Args:
      optimizer: The chain.
      spec: The settings it was built from.
      params: A tree of parameters as shapes, such as `SMALL`.

    Raises:
      JaxparError: If its update cannot be traced, or two transformations define one parameter to evaluate.
    """
    subject = f'optimizer.name = "{spec.name}"'
    arguments_text = f" with {spec.arguments!r:.200}" if spec.arguments else ""
    with user_code_errors(f"{subject}{arguments_text}: its update", rule=ALONE, fix=TYPES):
        state = jax.eval_shape(optimizer.init, params)
        updates, _ = jax.eval_shape(partial(update, optimizer), params, state, params, LOSS)
    eval_arrays(state)  # raises if two transformations define the parameters to evaluate
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params):
        raise refuse(f"{subject}: updates of other shapes", rule="one update per parameter", fix="optax.apply_updates")
    return state


def needs_loss(optimizer: optax.GradientTransformation, params: object = SMALL) -> bool:
    """Whether the updates of a valid chain depend on the loss."""
    state = jax.eval_shape(optimizer.init, params)
    closed = jax.make_jaxpr(partial(update, optimizer))(params, state, params, LOSS)
    loss = closed.jaxpr.invars[-1]
    return any(loss in eqn.invars for eqn in closed.jaxpr.eqns)


def check_rate(schedule: Callable, *, name: str) -> None:
    """Refuses a schedule that is not a function of the step, or whose rate is not a number.

    Raises:
      JaxparError: If it cannot be traced, or returns anything else.
    """
    got, rule = f'optimizer.schedule.name = "{name}"', "a schedule is a function of the step to a rate, as optax's are"
    with user_code_errors(got, rule=rule, fix="jnp.where instead of if"):
        shape = jax.eval_shape(lambda count: jnp.asarray(schedule(count), jnp.float32), jnp.int32(0)).shape
    if shape:
        raise refuse(f"{got}: rates of shape {list(shape)}", rule=rule, fix="one number")
