"""Checks the arguments of `find_specs`, and merges the names that it found with the user's own, which take priority."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

from jaxpar.errors import JaxparError, Problem, suggest
from jaxpar.models.dim_names import spec_axes
from jaxpar.parallel.compose import compose
from jaxpar.parallel.declaration import Parallel
from jaxpar.sharding.names import Blueprint
from jaxpar.sharding.source_lines import parse_line
from jaxpar.specs.names import NamedSpecs
from jaxpar.step.numerics import DTYPES


def check_arguments(
    batch: object, parallel: object, precision: object, memory: object, examples: object = False
) -> None:
    """Raises a `JaxparError` with the problems of arguments of `find_specs`."""
    problems = [*_batch_problems(batch)]
    if not isinstance(parallel, Parallel):
        problems.append(Problem(f"parallel={parallel!r:.60}", "a declaration", "jp.Parallel(fsdp=2, tensor=4)"))
    elif unknown := [axis for axis, size in parallel.sizes.items() if type(size) is not int or size < 1]:
        axis = unknown[0]
        rule = "the size of every axis is known before specs are found"
        problems.append(Problem(f"{axis}={parallel.sizes[axis]!r:.60}", rule, f"{axis}=2"))
    if not isinstance(precision, str) or precision not in DTYPES:
        fix = suggest(str(precision), DTYPES)
        problems.append(Problem(f"precision={precision!r:.60}", f"one of {', '.join(DTYPES)}", fix))
    if memory is not None and (not isinstance(memory, Real) or not float(memory) > 0):
        problems.append(
            Problem(f"memory={memory!r:.60}", "a number of bytes, or None for no limit", "memory=60 * 2**30")
        )
    if not isinstance(examples, bool):
        rule = "whether the axes may split examples too"
        problems.append(Problem(f"examples={examples!r:.60}", rule, "examples=True"))
    if problems:
        raise JaxparError(*problems)


def _batch_problems(batch: object) -> Iterable[Problem]:
    fix = 'batch={"x": jax.ShapeDtypeStruct((16, 1024), "int32")}'
    if not isinstance(batch, Mapping):
        yield Problem(f"batch={batch!r:.60}", "names to arrays, or to their shapes and dtypes", fix)
        return
    for name, leaf in batch.items():
        if isinstance(leaf, Mapping):
            got = f"batch[{name!r}] is a dict of {', '.join(map(str, leaf))}"
            flat = 'flax.traverse_util.flatten_dict(batch, sep="/"), and in the loss unflatten_dict(batch, sep="/")'
            yield Problem(got, "a batch is a dict of arrays, without nested dicts", flat)
            return
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or not leaf.shape:
            yield Problem(f"batch[{name!r}]={leaf!r:.60}", "an array, or its shape and dtype; dim 0 is examples", fix)
            return
    counts = {name: leaf.shape[0] for name, leaf in batch.items()}
    if len({*counts.values()}) > 1:
        yield Problem(
            f"a batch of {', '.join(f'{name}: {count}' for name, count in counts.items())} examples",
            "dim 0 of every array of the batch is the examples, and has the same size in all",
            "an array without examples (a position mask, say): make it in the model or loss, or repeat it per example",
        )


def merge_names(parallel: Parallel, named: NamedSpecs, params: Iterable[str]) -> tuple[Parallel, tuple[str, ...]]:
    """Adds the names that were found to the declaration; also returns the user's own that differ from them, as text.

    The user's names and rules take priority over the ones that were found, for parameters (by path) and activations
    (by source line) alike.
    """
    params, differing = [*params], {}
    for path in params:
        pattern, found = _first_pattern(parallel.paths, path), _first_pattern(named.paths, path)
        if pattern is not None and found is not None and tuple(parallel.paths[pattern]) != tuple(named.paths[found]):
            differing[pattern] = (
                f"paths {pattern!r}: {show_names(parallel.paths[pattern])} (found: {show_names(named.paths[found])})"
            )
    activations = {}
    for key, names in named.activations.items():
        of_user = {tuple(parallel.activations[line]) for line in _user_keys(key, parallel.activations)}
        if not of_user:
            activations[key] = names
        elif of_user != {tuple(names)}:
            differing[key] = f"activations {key!r} (found: {show_names(names)})"
    for name in sorted({*named.names.values()} & {*parallel.rules}):
        if spec_axes(parallel.rules[name]) != spec_axes(named.rules.get(name, named.axes.get(name))):
            differing[name] = f"rules {name!r}: {parallel.rules[name]}"
    names = replace(
        parallel,
        specs="",
        paths={**parallel.paths, **{key: value for key, value in named.paths.items() if key not in parallel.paths}},
        rules={**named.rules, **parallel.rules},
        activations={**activations, **parallel.activations},
    )
    return names, tuple(differing.values())


def replaced_annotations(
    blueprint: Blueprint, parallel: Parallel, found: Parallel, axes: Collection[str]
) -> tuple[str, ...]:
    """Describes each parameter of which these axes split other dims than the annotations in the model say.

    Args:
      blueprint: The model.
      parallel: The user's declaration, without found names.
      found: The declaration with the names from `jp.find_specs`, which a step uses.
      axes: The axes for which these names were found.
    """
    if not any(name for leaf in blueprint.leaves.values() for name in leaf.names or ()):
        return ()
    devices = math.prod(parallel.sizes.values())
    try:
        annotated = compose(blueprint, replace(parallel, specs=""), devices).placements
    except JaxparError:  # the model's own names are of another mesh
        return ()
    used = compose(blueprint, found, devices).placements
    texts: dict[str, str] = {}
    for path, leaf in blueprint.leaves.items():
        if any(leaf.names or ()) and _cuts(annotated[path].used, axes) != _cuts(used[path].used, axes):
            pattern = _first_pattern(found.paths, path) or path
            texts[pattern] = f"{pattern}: {show_names(leaf.names or ())} (found: {show_names(used[path].names)})"
    return tuple(texts.values())


def _cuts(spec: Iterable[Any], axes: Collection[str]) -> set[tuple[int, str]]:
    """Returns (dim, axis) for each of these axes that splits a dim."""
    return {(dim, axis) for dim, entry in enumerate(spec) for axis in spec_axes(entry) if axis in axes}


def _first_pattern(paths: Mapping[str, Any], path: str) -> str | None:
    """Returns the first pattern that matches a parameter's path, whose names it gets."""
    return next((pattern for pattern in paths if re.search(rf"(^|/)(?:{pattern})$", path)), None)


def _user_keys(key: str, texts: Iterable[str]) -> list[str]:
    """Returns the user's own keys that name the activations of this key."""
    line = parse_line(key)
    if line is None:
        return []
    return [text for text in texts if (user_line := parse_line(text)) is not None and user_line.wins_over(line)]


def show_names(names: Iterable[str | None]) -> str:
    """Returns the names of an array's dims as text; - for a dim without a name."""
    return ", ".join(name or "-" for name in names)
