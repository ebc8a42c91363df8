"""Checks a user's rules: in the declaration alone, and against the dim names of the model.

A rule may be for a dim of a parameter, whose name is in the blueprint, or of an activation, whose name is known when a
step is traced.
"""

import re
from collections.abc import Iterable

from jaxpar.errors import JaxparError, Problem, suggest
from jaxpar.parallel.declaration import OPTIONAL, Parallel
from jaxpar.sharding.names import Blueprint, Leaf
from jaxpar.sharding.rules import names_of_dims

REGULAR = "a path rule is a regular expression"


def rule_problems(parallel: Parallel, blueprint: Blueprint) -> list[Problem]:
    """Returns rules for unknown axes, path rules that match nothing, and unknown dim names of paths and of lines."""
    leaves, problems = {**blueprint.other_leaves, **blueprint.leaves}, []
    words = {*names_of_dims(parallel.sizes), *parallel.sizes, *parallel.rules, *_names(leaves.values())}
    for name, axes in parallel.rules.items():
        rule_axes = (axes,) if isinstance(axes, str) else tuple(axes or ())
        for axis in rule_axes:
            if axis not in parallel.sizes and axis not in OPTIONAL:  # of size 1
                problems.append(
                    Problem(f"rule {name} -> {axis!r}", "a rule names mesh axes", suggest(axis, parallel.sizes))
                )
        if "pipe" in rule_axes and name != "layers":
            problems.append(
                Problem(
                    f"rule {name} -> 'pipe'",
                    "the axis `pipe` splits layers and nothing else",
                    f"one of: {', '.join(axis for axis in parallel.sizes if axis != 'pipe')}",
                )
            )
        if len(set(rule_axes)) < len(rule_axes):
            problems.append(
                Problem(
                    f"rule {name} -> {rule_axes}",
                    "a dim is split over an axis once",
                    f"{name} -> {tuple(dict.fromkeys(rule_axes))}",
                )
            )
    problems += [
        Problem(
            f"activations={{{key!r}: {tuple(names)}}} names a dim {name!r} that has no rule",
            "a line gives a dim a name of jaxpar's, of the model, or of `rules`; or None",
            suggest(name, words, otherwise=f'None, or rules={{"{name}": "tensor"}} as well'),
        )
        for key, names in parallel.activations.items()
        for name in dict.fromkeys(names)
        if name and name not in words
    ]
    for pattern, names in parallel.paths.items():
        problems += [
            Problem(
                f"path rule {pattern!r} names a dim {name!r}",
                "a path rule gives a dim a name of jaxpar's, of the model, or of `rules`; or None",
                suggest(name, words, otherwise=f'None, or rules={{"{name}": "tensor"}} as well'),
            )
            for name in names
            if name and name not in words
        ]
        try:
            matches = any(re.search(rf"(^|/)(?:{pattern})$", path) for path in leaves)
        except re.error as error:
            problems.append(
                Problem(
                    f"path rule {pattern!r}: {error}",
                    REGULAR,
                    f"{re.sub(r'(?<![.)])[*]', '.*', pattern)!r}" if "*" in pattern else repr(re.escape(pattern)),
                )
            )
            continue
        if not matches:
            problems.append(
                Problem(
                    f"path rule {pattern!r} matches no parameter of {blueprint.name}",
                    "every rule matches the end of at least one path",
                    _as_expression(pattern, leaves)
                    or (
                        suggest(pattern, blueprint.leaves)
                        if len(blueprint.leaves) < 20
                        else "the end of a path that layout.explain(), or `jaxpar check --explain`, lists"
                    ),
                )
            )
    return problems


def _as_expression(pattern: str, paths: Iterable[str]) -> str:
    """Translates a glob to a regular expression that matches a path; "" if it is not a glob or matches no path."""
    expression = re.sub(r"(?<![.)\]])[*]", ".*", pattern)
    if expression == pattern or not any(re.search(rf"(^|/)(?:{expression})$", path) for path in paths):
        return ""
    return f"{expression!r}: a pattern is a regular expression"


def check_rules(parallel: Parallel, blueprint: Blueprint, activation_dims: set[str]) -> None:
    """Refuses rules for names that neither a parameter nor an activation has.

    Args:
      parallel: The declaration, with inferred sizes.
      blueprint: The model.
      activation_dims: Names of dims of activations, collected while a step was traced.

    Raises:
      JaxparError: If there are such rules; the message has all of them, with the most similar names that exist.
    """
    leaves = [*blueprint.other_leaves.values(), *blueprint.leaves.values()]
    dim_names = _names(leaves) | {name for names in parallel.paths.values() for name in names if name}
    dim_names |= activation_dims | names_of_dims(parallel.sizes).keys()
    problems = [
        Problem(
            f"rule {name!r} matches nothing: no dim of {blueprint.name} has that name, of a parameter or an activation",
            "every rule matches at least one dim",
            suggest(name, dim_names),
        )
        for name in parallel.rules
        if name not in dim_names
    ]
    if problems:
        raise JaxparError(*problems)


def _names(leaves: Iterable[Leaf]) -> set[str]:
    return {name for leaf in leaves for name in (*(leaf.names or ()), *_axes(leaf)) if isinstance(name, str)}


def _axes(leaf: Leaf) -> Iterable[str | None]:
    """Yields the axes of the author's mesh that the author's rules give to dims of a leaf."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in leaf.axes or ())
    return (axis for entry in entries for axis in entry)
