"""Checks a user's rules: in the declaration alone, and against the dim names of the model.

A rule may be for a dim of a parameter, whose name is in the blueprint, or of an activation, whose name is known when a
step is traced.
"""

import re
from collections.abc import Iterable, Mapping

from jaxpar.errors import JaxparError, Problem, suggest
from jaxpar.parallel.declaration import OPTIONAL, Parallel
from jaxpar.sharding.names import Blueprint, Leaf
from jaxpar.sharding.rules import axes_by_dim_name

REGULAR = "a path rule is a regular expression"


def rule_problems(parallel: Parallel, blueprint: Blueprint) -> list[Problem]:
    """Returns rules for unknown axes, path rules that match nothing, and unknown dim names of paths and of lines."""
    leaves, problems = {**blueprint.other_leaves, **blueprint.leaves}, []
    words = {*axes_by_dim_name(parallel.sizes), *parallel.sizes, *parallel.rules, *_names(leaves.values())}
    for name, axes in parallel.rules.items():
        problems += _rule_of_a_name(name, (axes,) if isinstance(axes, str) else tuple(axes or ()), parallel)
    for key, names in parallel.activations.items():
        problems += _unknown_names(f"activations={{{key!r}: {tuple(names)}}}", "line", dict.fromkeys(names), words)
    for pattern, names in parallel.paths.items():
        problems += _unknown_names(f"path rule {pattern!r}", "path rule", names, words)
        problems += _path_rule(pattern, leaves, blueprint)
    return problems


def _rule_of_a_name(name: str, axes: tuple[str, ...], parallel: Parallel) -> list[Problem]:
    problems = [
        Problem(f"rule {name} -> {axis!r}", "a rule names mesh axes", suggest(axis, parallel.sizes))
        for axis in axes
        if axis not in parallel.sizes and axis not in OPTIONAL  # of size 1
    ]
    if "pipe" in axes and name != "layers":
        problems.append(
            Problem(
                f"rule {name} -> 'pipe'",
                "the axis `pipe` splits layers and nothing else",
                f"one of: {', '.join(axis for axis in parallel.sizes if axis != 'pipe')}",
            )
        )
    if len(set(axes)) < len(axes):
        problems.append(
            Problem(
                f"rule {name} -> {axes}",
                "a dim is split over an axis once",
                f"{name} -> {tuple(dict.fromkeys(axes))}",
            )
        )
    return problems


def _unknown_names(given: str, kind: str, names: Iterable[str | None], words: set[str]) -> list[Problem]:
    return [
        Problem(
            f"{given} names a dim {name!r} that has no rule",
            f"a {kind} gives a dim a name of jaxpar's, of the model, or of `rules`; or None",
            suggest(name, words, otherwise=f'None, or rules={{"{name}": "tensor"}} as well'),
        )
        for name in names
        if name and name not in words
    ]


def _path_rule(pattern: str, leaves: Mapping[str, Leaf], blueprint: Blueprint) -> list[Problem]:
    try:
        matches = any(re.search(rf"(^|/)(?:{pattern})$", path) for path in leaves)
    except re.error as error:
        return [
            Problem(
                f"path rule {pattern!r}: {error}",
                REGULAR,
                f"{re.sub(r'(?<![.)])[*]', '.*', pattern)!r}" if "*" in pattern else repr(re.escape(pattern)),
            )
        ]
    if matches:
        return []
    few = len(blueprint.leaves) < 20
    listed = "the end of a path that layout.explain(), or `jaxpar check --explain`, lists"
    fix = suggest(pattern, blueprint.leaves) if few else listed
    return [
        Problem(
            f"path rule {pattern!r} matches no parameter of {blueprint.name}",
            "every rule matches the end of at least one path",
            _as_expression(pattern, leaves) or fix,
        )
    ]


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
    dim_names |= activation_dims | axes_by_dim_name(parallel.sizes).keys()
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
