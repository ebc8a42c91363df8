"""The parameters of a Linen module while a step is traced: each is gathered and cast where it is read.

self.param("kernel", ...)                         ─┐
self.variables["params"]["embed"]["embedding"]    ─┼─► values["kernel"] ─► use(path, stored) ─► read
nn.scan, nn.remat, nn.map_variables, jax.tree      ───► stored: a nested dict of plain arrays
"""

from collections.abc import Iterator
from typing import Any

import jax

from jaxpar.sharding.adapters import Adapted
from jaxpar.sharding.names import Use, path_of


class Parameters(dict):
    """A nested dict of stored parameters that applies `use` to those that are read by name.

    To `jax.tree`, and so to whatever Flax lifts, it has the leaves and paths of the plain nested dict that it stands
    for: layers that a scan slices are gathered inside of its body, and what a module makes of its own parameters
    (`nn.WeightNorm`) is computed from the shards as stored, and gathered where a layer reads it.
    """

    def __init__(self, stored: dict[str, Any], use: Use, inside: str = ""):
        """Makes them.

        Args:
          stored: Name to array, or to a dict of them.
          use: What happens to a parameter where the module reads it, by its path.
          inside: The path of `stored` itself, with "/" behind it; "" for all parameters of a module.
        """
        at = lambda name: f"{inside}{name}/"  # noqa: E731
        super().__init__({k: Parameters(v, use, at(k)) if type(v) is dict else v for k, v in stored.items()})
        self.use, self.inside = use, inside

    def __getitem__(self, name: str) -> Any:
        value, path = super().__getitem__(name), self.inside + name
        if isinstance(value, dict):
            return value
        # an array; or a tuple of them, where an initializer returns one
        return jax.tree_util.tree_map_with_path(
            lambda keys, leaf: self.use(path_of([path, *keys]), leaf),
            value,
            is_leaf=lambda leaf: isinstance(leaf, Adapted),
        )

    # dict(...), {**...} and copy() take what is stored, past __getitem__, unless there is an __iter__ of its own
    def __iter__(self) -> Iterator[str]:
        """Iterates over the names."""
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """Returns what is read by a name, or the default."""
        return self[name] if name in self else default

    def items(self) -> Any:
        """Returns each name with what is read by it."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """Returns what is read by each name."""
        return [self[name] for name in self]


def as_stored(tree: Any) -> Any:
    """Returns a plain nested dict of what a nested dict holds, of which nothing is read."""
    if not isinstance(tree, dict):
        return tree
    return {name: as_stored(dict.__getitem__(tree, name)) for name in tree}


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
