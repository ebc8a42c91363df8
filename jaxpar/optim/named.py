"""Optimizers and schedules by any name of optax's, or as a user's own functions; their arguments are checked.

adagrad              optax.adagrad(learning_rate, **arguments)
exponential_decay    optax.exponential_decay(init_value=learning_rate, **arguments)
my_module:function   function(learning_rate, **arguments)
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import optax

from jaxpar.errors import JaxparError, Problem, nearest, refuse, users_code
from jaxpar.optim.extra import PLATEAU

RATES = {"polyak_sgd": "max_learning_rate"}  # optimizers whose rate has another name than `learning_rate`
HIGHEST = ("peak_value", "init_value", "value")  # the argument of an optax schedule that is the highest rate
MORE = {  # which optimizers need something else to what is said in its place
    "dpsgd": '"adamw", or another one of optax',
    "lbfgs": '"adamw", or another one of optax',
    PLATEAU: f'schedule = "{PLATEAU}", with any optimizer',
    "schedule_free": '"schedule_free_adamw", "schedule_free_sgd", or "package.module:function" for another base',
    "sophia": '"adamw", or another one of optax',
}
ALONE = (
    "an optimizer is given gradients and loss of the whole batch, its state and parameters: no function, "
    "no other optimizer, and no gradients of each example"
)
TYPES = 'arguments of its types; decay = "constant" and warmup = 0, if it is an optimizer that takes no schedule'


@dataclass(frozen=True, kw_only=True)
class Own:
    """The user's own functions that an optimizer's settings name by import path; None where they name none."""

    optimizer: Callable | None = None
    schedule: Callable | None = None


@cache
def optimizers() -> dict[str, Callable]:
    """Returns the optimizers of optax that take a learning rate, and at each update no more than the loss besides."""
    found = {**_functions(vars(optax.contrib)), **_functions(vars(optax))}
    return {
        name: function
        for name, function in found.items()
        if RATES.get(name, "learning_rate") in inspect.signature(function).parameters and name not in MORE
    }


@cache
def schedules() -> dict[str, Callable]:
    """Returns the schedules of optax that have a highest rate; others are made of schedules."""
    return {name: each for name, each in _functions(vars(optax.schedules)).items() if _highest(each)}


def _functions(room: Mapping[str, Any]) -> dict[str, Callable]:
    return {
        name: each for name, each in room.items() if inspect.isfunction(each) and not name.startswith(("_", "scale_by"))
    }


def _highest(function: Callable) -> str:
    """Returns the argument of a schedule that the learning rate is given as."""
    return next((name for name in HIGHEST if name in inspect.signature(function).parameters), "")


def find_optimizer(name: str, own: Callable | None) -> Callable:
    """Returns the function of a name.

    Raises:
      JaxparError: If there is none, or it needs more than a step gives to it.
    """
    if own is not None:
        return _taking_rate(name, own, "optimizer.name")
    if name in MORE:
        raise refuse(f'optimizer.name = "{name}"', rule=ALONE, fix=MORE[name])
    known = optimizers()
    if name not in known:
        raise refuse(
            f'optimizer.name = "{name}"',
            rule='an optimizer of optax that takes a learning rate, or "package.module:function"',
            fix=nearest(name, known),
        )
    return known[name]


def find_schedule(name: str, own: Callable | None) -> tuple[Callable, str]:
    """Returns the function of a name, and the argument that the learning rate is given as.

    Raises:
      JaxparError: If there is none.
    """
    if own is not None:
        return _taking_rate(name, own, "optimizer.schedule.name"), "learning_rate"
    known = schedules()
    if name not in known:
        raise refuse(
            f'optimizer.schedule.name = "{name}"',
            rule='a schedule of optax with a highest rate, or "package.module:function"',
            fix=nearest(name, known),
        )
    return known[name], _highest(known[name])


def _taking_rate(name: str, own: Callable, key: str) -> Callable:
    what = "an optimizer" if key == "optimizer.name" else "a schedule"
    rule = f"{what} is a function of learning_rate and its arguments"
    if not callable(own):
        raise refuse(
            f'{key} = "{name}" is a {type(own).__name__}', rule=rule, fix='"my_module:my_function", the name of one'
        )
    if "learning_rate" not in inspect.signature(own).parameters:
        raise refuse(f'{key} = "{name}": {signature(name, own)}', rule=rule, fix="def make(learning_rate): ...")
    return own


def signature(name: str, function: Callable) -> str:
    """Returns a function's name, its arguments, and what they are by default."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parts = [
        stars.get(each.kind, "") + each.name + (f"={each.default!r:.40}" if each.default is not each.empty else "")
        for each in inspect.signature(function).parameters.values()
    ]
    return f"{name}({', '.join(parts)})"


def call(name: str, function: Callable, arguments: Mapping[str, Any], given: Mapping[str, Any], *, key: str) -> Any:
    """Returns what a function makes of its arguments.

    Args:
      name: As the job says it.
      function: Of that name.
      arguments: As the job says them.
      given: What other settings say: not to be said again.
      key: Of the arguments, such as `optimizer.arguments`.

    Raises:
      JaxparError: With every argument that it has not, that is missing, or that another key says.
    """
    known = inspect.signature(function).parameters.values()
    named = [each.name for each in known if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    needed = [each.name for each in known if each.name in named and each.default is each.empty]
    takes_any = any(each.kind == each.VAR_KEYWORD for each in known)
    rule = signature(name, function)
    problems = [
        Problem(f"{key}.{each}", f"{name} has it from the optimizer's other keys", "leave it out")
        for each in arguments
        if each in given
    ]
    problems += [
        Problem(f"{key}.{each}", rule, nearest(each, [name for name in named if name not in given] or ["none"]))
        for each in arguments
        if each not in named and not takes_any
    ]
    problems += [
        Problem(f"{key} without {each}", rule, f"arguments = {{ {each} = ... }}")
        for each in needed
        if each not in arguments and each not in given
    ]
    if problems:
        raise JaxparError(*problems)
    with users_code(f"{name} with {key} = {dict(arguments)!r:.200}", rule=rule, fix=TYPES):
        return function(**given, **{each: _counted(value) for each, value in arguments.items()})


def _counted(value: Any) -> Any:
    """Returns a table whose keys are steps with numbers for them: keys of TOML are text."""
    steps = isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value)
    return {int(key): each for key, each in value.items()} if steps else value
