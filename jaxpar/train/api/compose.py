"""`jp.compose`: composes a layout; an integer program chooses the dims that `tensor` splits if `specs="found"`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from jaxpar.mesh.devices import Simulated
from jaxpar.parallel import compose as composer
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Blueprint


def compose(
    model: Callable | Blueprint, parallel: Parallel, devices: Sequence[Any] | Mesh | Simulated | int | None = None
) -> Layout:
    if getattr(parallel, "specs", "") == "found":
        model = _with_finder(composer.as_blueprint(model))
    return composer.compose(model, parallel, devices)


compose.__doc__ = composer.compose.__doc__


def _with_finder(blueprint: Blueprint) -> Blueprint:
    """Lets specs be found for the example call of `jp.from_nnx` or `jp.from_linen`."""
    if blueprint.example is None or blueprint.find_specs is not None:
        return blueprint

    def find(parallel: Parallel) -> tuple[Parallel, str]:
        from jaxpar.specs.find import find_specs_of_call  # imported here, so that other layouts do not load it

        found = find_specs_of_call(blueprint, parallel)
        return found.parallel, found.sentence

    return replace(blueprint, find_specs=find)
