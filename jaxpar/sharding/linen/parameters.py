"""Gathers and casts each parameter of a Linen module where the module reads it, while a step is traced.

self.param("kernel", ...)                         ─┐
self.variables["params"]["embed"]["embedding"]    ─┼─► values["kernel"] ─► use(path, stored) ─► read
nn.scan, nn.remat, nn.map_variables, jax.tree      ───► stored: a nested dict of plain arrays
"""

from collections.abc import Iterator
from typing import Any

import jax

from jaxpar.sharding.adapters import AdaptedMatrix
from jaxpar.sharding.names import Use, path_of


class Parameters(dict):
    """A nested dict of stored parameters that applies `use` to each parameter that is read by name.

    `jax.tree`, and so Flax's lifted transforms, see the leaves and paths of the plain nested dict: layers that a scan
    slices are gathered inside of its body, and values that a module computes from its own parameters (`nn.WeightNorm`)
    are computed from the shards as stored, and gathered where a layer reads them.
    """

    def __init__(self, stored: dict[str, Any], use: Use, inside: str = ""):
        """Wraps stored parameters.

        Args:
          stored: Name to array, or to a dict of them.
          use: Maps (path, stored parameter) to the value that the module reads.
          inside: The path of `stored` with a trailing "/"; "" for all parameters of a module.
        """
        child = lambda name: f"{inside}{name}/"  # noqa: E731
        super().__init__({k: Parameters(v, use, child(k)) if type(v) is dict else v for k, v in stored.items()})
        self.use, self.inside = use, inside

    def __getitem__(self, name: str) -> Any:
        value, path = super().__getitem__(name), self.inside + name
        if isinstance(value, dict):
            return value
        # an array; or a tuple of them, where an initializer returns one
        return jax.tree_util.tree_map_with_path(
            lambda keys, leaf: self.use(path_of([path, *keys]), leaf),
            value,
            is_leaf=lambda leaf: isinstance(leaf, AdaptedMatrix),
        )

    # without an own __iter__, dict(...), {**...} and copy() would bypass __getitem__ and take the stored values
    def __iter__(self) -> Iterator[str]:
        """Iterates over the names."""
        return super().__iter__()

    def get(self, name: str, default: object = None) -> Any:
        """Returns the gathered value of a name, or the default."""
        return self[name] if name in self else default

    def items(self) -> Any:
        """Returns each name with its gathered value."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """Returns the gathered value of each name."""
        return [self[name] for name in self]


def to_dict(tree: object) -> Any:
    """Converts to a plain nested dict of stored values, without reading any."""
    if not isinstance(tree, dict):
        return tree
    return {name: to_dict(dict.__getitem__(tree, name)) for name in tree}


def _flatten_with_keys(tree: Parameters):
    names = sorted(tree)
    return [(jax.tree_util.DictKey(name), dict.__getitem__(tree, name)) for name in names], _aux(tree, names)


def _flatten(tree: Parameters):
    names = sorted(tree)
    return [dict.__getitem__(tree, name) for name in names], _aux(tree, names)


def _aux(tree: Parameters, names: list[str]) -> tuple:
    return tuple(names), tree.use, tree.inside


def _unflatten(aux: tuple, values) -> Parameters:
    names, use, inside = aux
    return Parameters(dict(zip(names, values, strict=True)), use, inside)


jax.tree_util.register_pytree_with_keys(Parameters, _flatten_with_keys, _unflatten, _flatten)
