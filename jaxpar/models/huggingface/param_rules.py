"""Rules that map the parameters of any Flax model to tensors of a Hugging Face folder, in both directions.

    parameter                     tensor                                      dims of the tensor -> of the parameter
    layers/{}/attn/query/kernel   model.layers.{}.self_attn.q_proj.weight     (heads dim) embed -> embed heads dim
    blocks/attn/query/kernel      model.layers.{}.self_attn.q_proj.weight     (heads dim) embed -> embed heads dim
    layers/{}/attn/query/kernel   transformer.h.{}.attn.c_attn.weight         embed (heads+ dim) -> embed heads dim

`{}` is a number. Those that only the tensor's name has count the leading dims of a stacked parameter, so the second
rule stacks the layers along dim 0. Dims are written as in einops. A `+` marks the dim along which the parameters that
share a tensor are concatenated, in the order of their rules.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from jaxpar.errors import Problem, suggest
from jaxpar.models.huggingface.param_mapping import ParamMapping, groups, joint_size, tensor_shape
from jaxpar.models.huggingface.weights import shorten

Rule = str | tuple[str, str] | None
EXAMPLE = '("model.layers.{}.mlp.up_proj.weight", "hidden embed -> embed hidden")'
RULE = "a rule is the name of a tensor and its dims, or None for a parameter that the folder does not have"


def expand(
    rules: Mapping[str, Rule], leaves: Mapping[str, Any]
) -> tuple[dict[str, ParamMapping | None], list[Problem]]:
    """Applies rules to all parameters of a model.

    Args:
      rules: Path of a parameter to its rule; a path may have `{}` for a number, and `*` if its rule is None.
      leaves: Path to a parameter, or anything else with its `shape`.

    Returns:
      Path to mapping, None for a parameter that the folder does not have; in the order of the rules. And the problems:
      rules that are malformed or match nothing, parameters with no rule or two, parameters whose dims do not fit.
    """
    result: dict[str, ParamMapping | None] = {}
    owners: dict[str, str] = {}
    problems: list[Problem] = []
    for pattern, value in rules.items():
        matches = _match_paths(str(pattern), leaves, wild=value is None)
        if not matches:
            problems.append(
                Problem(f"rule {pattern!r:.100} matches no parameter", "each rule maps parameters of the model",
                        suggest(str(pattern).replace("{}", "0"), leaves, otherwise=f"one of {shorten(list(leaves))}"))
            )  # fmt: skip
        for path, numbers in matches.items():
            if path in owners:
                problems.append(_duplicate_problem(path, owners[path], pattern))
                continue
            owners[path] = str(pattern)
            mapping = _parse(path, numbers, value, tuple(leaves[path].shape))
            if isinstance(mapping, Problem):
                problems.append(mapping)
                break  # the same for each number
            result[path] = mapping
    if missing := [path for path in leaves if path not in owners]:
        fix = f"rules[{missing[0]!r}] = {EXAMPLE}, or None to initialize it"
        problems.append(Problem(f"parameters without a rule: {shorten(missing)}", "each parameter has a rule", fix))
    if problems:
        return result, problems
    result = _concatenate(result)
    return result, _sharing_problems(result)


def _duplicate_problem(path: str, first: str, second: str) -> Problem:
    return Problem(
        f"{path} has two rules, {first!r:.80} and {second!r:.80}",
        "each parameter has one rule",
        "leave one of them out",
    )


def _match_paths(pattern: str, leaves: Mapping[str, Any], *, wild: bool) -> dict[str, tuple[str, ...]]:
    """Returns the parameters that a rule is for, each with the numbers at its `{}`."""
    if wild and "{}" not in pattern:
        return {path: () for path in leaves if fnmatchcase(path, pattern)}
    compiled = re.compile(re.escape(pattern).replace(r"\{\}", r"(\d+)"))
    found = {path: compiled.fullmatch(path) for path in leaves}
    return {path: match.groups() for path, match in found.items() if match}


def _parse(path: str, numbers: tuple[str, ...], value: Rule, shape: tuple[int, ...]) -> ParamMapping | Problem | None:
    if value is None:
        return None
    parts: list[Any] = [value] if isinstance(value, str) else list(value) if isinstance(value, tuple | list) else []
    if (
        not 1 <= len(parts) <= 2
        or not all(isinstance(part, str) for part in parts)
        or re.search(r"[{}]", parts[0].replace("{}", ""))
    ):
        return Problem(f"the rule of {path} is {value!r:.100}", RULE, EXAMPLE)
    name, count = parts[0], parts[0].count("{}")
    stacked, dims = shape[: max(0, count - len(numbers))], shape[max(0, count - len(numbers)) :]
    if count < len(numbers) or len(stacked) != max(0, count - len(numbers)):
        return Problem(
            f"{path} {list(shape)} and {name}, which has {count} {{}}",
            "a tensor's name has a {} for each {} of the path, and one for each leading dim that stacks tensors",
            "a {} for each number that the tensors' names differ in",
        )
    if len(parts) == 1 and len(dims) > 1:
        return Problem(
            f"{path} {list(dims)} is mapped to {name} without its dims",
            "the dims of matrices are written, because Flax stores most of them transposed",
            f'({name!r}, "b a -> a b"), or "a b -> a b" if both have one order',
        )
    sides = _parse_dims(parts[1] if len(parts) == 2 else " -> ".join(["a" * len(dims)] * 2))
    if isinstance(sides, str) or len(sides[1]) != len(dims):
        got = sides if isinstance(sides, str) else f"{len(sides[1])} dims on the right, the parameter has {list(dims)}"
        return Problem(
            f"dims {parts[-1]!r:.100} of {path}: {got}",
            "dims are the tensor's -> the parameter's, the same words on both sides, as in einops",
            '"(heads head_dim) embed -> embed heads head_dim"',
        )
    (flat, joint), ours = sides
    return ParamMapping(
        path=path, dims=ours, tensor_name=_fill_numbers(name, numbers), tensor_dims=flat, part=slice(0, 0), joint=joint,
        stacked=stacked, sizes=dict(zip(ours, dims, strict=True)),
    )  # fmt: skip


def _fill_numbers(name: str, numbers: tuple[str, ...]) -> str:
    """Fills the first `{}` of a tensor's name with the numbers of a path."""
    for number in numbers:
        name = name.replace("{}", number, 1)
    return name


def _parse_dims(text: str) -> tuple[tuple[tuple[str, ...], str], str] | str:
    """Parses `tensor dims -> parameter dims`, with one letter for each word; returns the error if that fails.

    Returns:
      (the tensor's dims, the letter of the dim marked with + or ""), and the letters of the parameter's dims.
    """
    theirs, arrow, ours = text.partition("->")
    if not arrow or re.sub(r"\([\w\s+]*\)|\w+\+?|\s", "", theirs) or re.sub(r"\w+|\s", "", ours):
        return "not of the form tensor -> parameter"
    tokens = re.findall(r"\(([^()]*)\)|(\w+\+?)", theirs)
    flat = [(inner or single).split() for inner, single in tokens]
    words, marked = ours.split(), [word for group in flat for word in group if "+" in word]
    if sorted(word.strip("+") for group in flat for word in group) != sorted(words) or len({*words}) != len(words):
        return "the two sides have different words, or one of them twice"
    if len(marked) > 1 or any(not re.fullmatch(r"\w+\+?", word) for group in flat for word in group):
        return "one word may end with +"
    letters = {word: chr(ord("a") + number) for number, word in enumerate(words)}
    dims = tuple("".join(letters[word.strip("+")] for word in group) for group in flat)
    return (dims, letters[marked[0].strip("+")] if marked else ""), "".join(letters.values())


def _concatenate(mappings: Mapping[str, ParamMapping | None]) -> dict[str, ParamMapping | None]:
    """Assigns to each parameter its range of the tensor that it shares, in the order of the rules."""
    ends: dict[str, int] = {}
    result: dict[str, ParamMapping | None] = {}
    for path, mapping in mappings.items():
        if mapping is not None:
            start = ends.get(mapping.tensor_name, 0)
            end = start + (mapping.sizes[mapping.joint] if mapping.joint else 0)
            ends[mapping.tensor_name], mapping = end, replace(mapping, part=slice(start, end))
        result[path] = mapping
    return result


def _sharing_problems(mappings: Mapping[str, ParamMapping | None]) -> list[Problem]:
    """Reports parameters that share a tensor without a concatenated dim, or with other dims that differ."""
    problems = []
    for name, group in groups([mapping for mapping in mappings.values() if mapping is not None]).items():
        total, paths = joint_size(group), ", ".join(mapping.path for mapping in group)
        if len(group) > 1 and not all(mapping.joint for mapping in group):
            rule = "two parameters share a tensor only if they are concatenated in it"
            fix = 'mark that dim with +: "embed (heads+ dim) -> embed heads dim"'
            problems.append(Problem(f"{name} is the tensor of {paths}", rule, fix))
            continue
        shapes = {(m.stacked, m.joint_dim, tensor_shape([replace(m, part=slice(0, total))])) for m in group}
        if len(shapes) > 1:
            rule = "parameters that share a tensor have the same sizes in all other dims"
            problems.append(
                Problem(f"{name} is shared by {paths}, whose dims differ", rule, "other dims in their rules")
            )
    return problems


def tensor_shapes(mappings: list[ParamMapping]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor by its name."""
    return {
        name.format(*place): tensor_shape(group)
        for name, group in groups(mappings).items()
        for place in np.ndindex(group[0].stacked)
    }
