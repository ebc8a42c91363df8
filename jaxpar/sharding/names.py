"""The blueprint of a model: all that jaxpar needs to know of it, whichever Flax wrote it.

    factory or module ──► Blueprint ──► params (shape, dtype, names of dims)
                                   ├──► init(key)  -> params, rest        inside jit
                                   ├──► bind(params, rest) -> model       inside jit
                                   └──► collect(model) -> rest            inside jit

Parameters and the rest of the state (BatchNorm statistics, dropout keys) are
nested dicts with string keys: the core of jaxpar is pytrees, Flax is at the edge.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

from jaxpar.sharding.shard_bytes import itemsize

Tree = Any  # a nested dict of arrays, or of what stands for them
Program = tuple[ClosedJaxpr, tuple[str, ...]]  # a traced call, and the paths of its first arguments
Use = Callable[[str, jax.Array], jax.Array]  # what happens to a parameter where the model reads it
# scopes, so that a compiled program can be led back to what it was made of
SCOPE = "param:"  # begins the scope in which a parameter is read
TABLE = "pipeline:table"  # around the ticks of a pipeline
CHOICE = "pipeline:choice"  # around the choice of what a stage does in a tick
MESSAGE = "pipeline:message"  # around what a stage sends to another
GRADIENT = "pipeline:gradient"  # around sums of gradients over microbatches, stages and replicas
BACKWARD = "transpose(pipeline)"  # around what a backward computes, in the words that JAX itself uses
AGAIN = "rematted_computation"  # JAX's own, around what a backward computes a second time

# Flax's name of the collection, or the type, of state whose gradient is its new value: see `flax.linen.fp8_ops`
OVERWRITE = "_overwrite_with_gradient"

# Bytes from which on an array of other state is kept in pieces. A collective of less takes as long as an empty one; of
# the statistics of ResNet-50's 53 BatchNorms the largest are 8 KiB each, and all of them together 208 KiB.
LARGE = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Leaf:
    """One parameter, or other array of a model's state, as the model declares it.

    Attributes:
      shape: Global shape.
      dtype: As stored, usually float32.
      names: The name of each dim, or None where the model gives none.
      constant: Whether it is no variable but an attribute, such as a table of positions: the model makes it, always.
      axes: For each dim what the author's own rules give its name: an axis of the author's mesh, several, or None; the
        name itself where they have none for it. None where the author gives no rules.
    """

    shape: tuple[int, ...]
    dtype: Any
    names: tuple[str | None, ...] | None
    constant: bool = False
    axes: tuple[str | tuple[str, ...] | None, ...] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for dim in self.shape:
            size *= dim
        return size

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * itemsize(self.dtype)

    @property
    def large(self) -> bool:
        """Whether an array that is no parameter is worth a collective, where it is read, to be kept in pieces."""
        return self.bytes >= LARGE


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The way a model computes: dtype, remat, and whether it trains.

    Attributes:
      train: Whether dropout drops and BatchNorm uses the batch.
      dtype: What matmuls run in, or None for what the model says.
      remat: Name of the policy for what the backward pass keeps (`POLICIES` in `models/settings/computing.py`).
    """

    train: bool = True
    dtype: Any = None
    remat: str = "none"


@dataclass(frozen=True, kw_only=True, eq=False)
class Blueprint:
    """A model before any of its arrays exist.

    Attributes:
      name: What the user calls the model, for messages.
      leaves: Every parameter by its path, such as `blocks/attention/query`.
      init: Key to (params, rest); pure, traced inside jit.
      bind: (params, rest, use, compute) to the callable a loss function sees; `use` is what happens to a parameter, or
        to a large array of the rest, where the model reads it.
      collect: A bound model to its `model_state` after the call.
      takes_remat: Whether the model places rematerialization itself.
      others: Every array of the rest by its path: state that is no parameter.
      overwritten: Paths of arrays of the rest whose gradient is their new value, such as the scales of fp8 matmuls.
      counts_layers: Whether its scans say how many layers they run, as Linen's `nn.scan(Block, length=12)` does.
      program: Traces a call of the model, where what it is called with is known.
      adapters: Path of each matrix that has one to its low-rank adapter; see `adapters.py`.
      base: The model without these.
      rules: Rules of Flax's that were in force where the model was made, as (name, axes of the author's mesh) each.
      assigned: A bound model, after a call, to the parameters that it assigned, by path; None where it assigns none.
    """

    name: str
    leaves: Mapping[str, Leaf]
    init: Callable[[jax.Array], tuple[Tree, Tree]]
    bind: Callable[[Tree, Tree, Use, Compute], Any]
    collect: Callable[[Any], Tree]
    takes_remat: bool = False
    others: Mapping[str, Leaf] = field(default_factory=dict)
    overwritten: frozenset[str] = frozenset()
    counts_layers: bool = False
    program: Callable[[], Program] | None = None
    adapters: Mapping[str, Any] = field(default_factory=dict)
    base: "Blueprint | None" = None
    rules: tuple[tuple[str, Any], ...] = ()
    assigned: Callable[[Any], Mapping[str, jax.Array]] | None = None

    @property
    def constants(self) -> frozenset[str]:
        """Paths of arrays of the rest that no run changes, and none takes from another."""
        return frozenset(path for path, leaf in self.others.items() if leaf.constant)


def path_of(keys) -> str:
    """Returns `blocks/attention/query` for a key path of `jax.tree_util`."""
    return "/".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)


def nest(flat: Mapping[tuple[str, ...], Any]) -> Tree:
    """Returns the nested dict whose leaves stand at those paths."""
    tree: dict = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def by_path(tree: Tree) -> dict[str, Any]:
    """Returns the leaves of a nested dict by their paths: the inverse of `nest`, whose paths are in words."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_of(keys): leaf for keys, leaf in leaves}


def pick(tree: Tree, path: tuple[str, ...]) -> Any:
    """Returns the leaf at a path of a nested dict."""
    for key in path:
        tree = tree[key]
    return tree
