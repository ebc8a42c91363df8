"""The blueprint of a model: everything that jaxpar needs to know of a model of any Flax API.

    factory or module ──► Blueprint ──► params (shape, dtype, names of dims)
                                   ├──► init(key)  -> params, rest        inside jit
                                   ├──► bind(params, rest) -> model       inside jit
                                   ├──► collect(model) -> rest            inside jit
                                   └──► module(params, rest) -> the user's own module

Parameters and the rest of the state (BatchNorm statistics, dropout keys) are nested dicts with string keys: jaxpar
works on pytrees, and only `linen_model.py`, `nnx_model.py` and the files beside them know Flax's modules.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxpar.units import show_count

# Bytes of an array on one device.


def shard_bytes(array: Any, spec: PartitionSpec, sizes) -> int:
    """Returns the bytes of one device's shard of an array with `shape` and `dtype`.

    >>> import jax, jax.numpy as jnp
    >>> shard_bytes(jax.ShapeDtypeStruct((8, 6), jnp.float32), PartitionSpec("fsdp"), {"fsdp": 4})
    48
    """
    return math.prod(shard_shape(array.shape, spec, sizes)) * itemsize(array.dtype)


def is_float(leaf: Any) -> bool:
    """Whether an array, or its shape and dtype, is real or complex floating point, and so has a gradient."""
    return jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)


def itemsize(dtype: Any) -> int:
    """Returns the bytes of one element; the dtype may also be that of random keys.

    >>> itemsize("float32"), itemsize(jax.random.key(0).dtype)
    (4, 8)
    """
    return dtype.itemsize if jax.numpy.issubdtype(dtype, jax.dtypes.extended) else jax.numpy.dtype(dtype).itemsize


def shard_shape(shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of one device's shard of an array; if XLA pads the last shard, that of the first.

    >>> shard_shape((8, 6), PartitionSpec("fsdp"), {"fsdp": 4})
    (2, 6)
    """
    return tuple(-(-size // ways) for size, ways in zip(shape, shard_counts(spec, len(shape), sizes), strict=True))


def shard_counts(spec: PartitionSpec, rank: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the number of shards along each dim of an array.

    >>> shard_counts(PartitionSpec(("data", "fsdp")), 2, {"data": 2, "fsdp": 4})
    (8, 1)
    """
    entries = (*spec, *(None,) * (rank - len(spec)))
    axes = ((entry,) if isinstance(entry, str) else entry or () for entry in entries)
    return tuple(math.prod(sizes[axis] for axis in each) for each in axes)


def short_dtype(dtype: DTypeLike) -> str:
    """Returns HLO's name of a dtype.

    >>> short_dtype("bfloat16")
    'bf16'
    """
    name = str(dtype) if jax.numpy.issubdtype(dtype, jax.dtypes.extended) else jax.numpy.dtype(dtype).name
    return name.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "s")


Tree = Any  # a nested dict of arrays, or of abstract arrays, specs and the like
Program = tuple[ClosedJaxpr, tuple[str, ...]]  # a traced call, and the paths of its first arguments
Use = Callable[[str, jax.Array], jax.Array]  # applied to a parameter where the model reads it: cast and gather
# names of scopes, which attribute the ops of a compiled program
SCOPE = "param:"  # begins the scope in which a parameter is read
TABLE = "pipeline:table"  # the ticks of a pipeline
CHOICE = "pipeline:choice"  # the choice of a stage's op in a tick
HALO = "halo along "  # the rows of an image that neighbours exchange; a scope ends with the name of their dim
DISPATCH = "dispatch of tokens"  # the tokens of a mixture of experts in their slots
TOKENS = "tokens to experts and back"  # the all-to-alls of a mixture of experts
MESSAGE = "pipeline:message"  # the messages between stages
UPDATES = "pipeline:ticks with updates "  # a conditional whose second branch runs in as many ticks as the scope says
GRADIENT = "pipeline:gradient"  # sums of gradients over microbatches, stages and replicas
BACKWARD = "transpose(pipeline)"  # JAX's name of the scope of the backward pass
REFERENCE = "reference"  # the first word of the paths of a frozen reference's copies of parameters
AGAIN = "rematted_computation"  # JAX's own name of the scope of recomputation in the backward pass

# Flax's name of the collection, or the type, of state whose gradient is its new value: see `flax.linen.fp8_ops`
OVERWRITE = "_overwrite_with_gradient"

# Minimum bytes of an array of other state to be sharded. A smaller collective takes as long as an empty one; of the
# statistics of ResNet-50's 53 BatchNorms the largest are 8 KiB each, and all of them together 208 KiB.
LARGE = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Leaf:
    """A parameter or another array of a model's state, as the model declares it.

    Attributes:
      shape: Global shape.
      dtype: Stored dtype, usually float32.
      names: The name of each dim, or None if the model gives none.
      constant: Whether the module holds it as an attribute instead of a variable, such as a table of positions.
      axes: For each dim, the axis or axes of the author's mesh that the author's rules map its name to, or None; the
        name itself if they have no rule for it. The whole field is None if the author gives no rules.
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
        """Whether state of this size is worth sharding, although every read of it then needs a collective."""
        return self.bytes >= LARGE


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The settings of a model's computation: dtype, remat, and whether it trains.

    Attributes:
      train: Whether dropout is active and BatchNorm uses statistics of the batch.
      dtype: Dtype of matmuls, or None for the model's own.
      remat: Name of the policy for the residuals of the backward pass (`POLICIES` in `models/settings/computing.py`).
    """

    train: bool = True
    dtype: Any = None
    remat: str = "none"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Blueprint:
    """A model before any of its arrays exist.

    Attributes:
      name: The user's name of the model, for messages.
      leaves: Every parameter by its path, such as `blocks/attention/query`.
      init: Maps a key to (params, rest); pure, traced inside jit.
      bind: Maps (params, rest, use, compute) to the model that a loss function calls; the model applies `use` to each
        parameter, and to each large array of the rest, where it reads them.
      collect: Maps a bound model to its `model_state` after the call.
      module: Maps (params, rest) to the user's own module with these arrays, ready to predict; for a model with
        adapters use the `module` of its `base`.
      takes_remat: Whether the model places rematerialization itself.
      other_leaves: Every array of the rest by its path: state other than parameters.
      overwritten: Paths of arrays of the rest whose gradient is their new value, such as the scales of fp8 matmuls.
      counts_layers: Whether its scans give the number of their layers, as Linen's `nn.scan(Block, length=12)` does.
      program: Traces a call of the model; None if its inputs are unknown.
      adapters: Path of each adapted matrix to its low-rank adapter; see `adapters.py`.
      base: The model without adapters and reference.
      rules: Flax rules in force where the model was made, as (name, axes of the author's mesh) each.
      assigned: Maps a bound model, after a call, to the parameters that it assigned, by path; None if it assigns none.
      copies: Path of each parameter of a frozen reference to the parameter that it was copied from.
      shared: Paths of parameters that the model shares with its reference, so that they must be frozen.
      example: Positional and keyword arguments of a call, as shapes or other values; None if the call is unknown.
      find_specs: Maps a declaration with `specs="found"` to the declaration with the names that were found, and a
        sentence about them; None if nothing is known of a loss or of inputs.
      has_reference: Whether `bind` returns a model and its frozen reference; see `reference.py`.
    """

    name: str
    leaves: Mapping[str, Leaf]
    init: Callable[[jax.Array], tuple[Tree, Tree]]
    bind: Callable[[Tree, Tree, Use, Compute], Any]
    collect: Callable[[Any], Tree]
    module: Callable[[Tree, Tree], Any]
    takes_remat: bool = False
    other_leaves: Mapping[str, Leaf] = field(default_factory=dict)
    overwritten: frozenset[str] = frozenset()
    counts_layers: bool = False
    program: Callable[[], Program] | None = None
    adapters: Mapping[str, Any] = field(default_factory=dict)
    base: "Blueprint | None" = None
    rules: tuple[tuple[str, Any], ...] = ()
    assigned: Callable[[Any], Mapping[str, jax.Array]] | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    example: Any = None
    find_specs: Callable[[Any], tuple[Any, str]] | None = None
    has_reference: bool = False

    def __repr__(self) -> str:
        count = show_count(sum(leaf.size for leaf in self.leaves.values()))
        return f"<model: {self.name}, {count} parameters in {len(self.leaves)} arrays>"

    @property
    def constants(self) -> frozenset[str]:
        """Paths of arrays of the rest that training never changes and that are not loaded from another run."""
        return frozenset(path for path, leaf in self.other_leaves.items() if leaf.constant)


def format_path(keys) -> str:
    """Formats a key path of `jax.tree_util` as `blocks/attention/query`."""
    return "/".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)


def nest(flat: Mapping[tuple[str, ...], Any]) -> Tree:
    """Builds a nested dict with leaves at these paths."""
    tree: dict = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def leaves_by_path(tree: Tree) -> dict[str, Any]:
    """Flattens a nested dict to leaves by path (`a/b`): the inverse of `nest`, which takes paths as tuples of words."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {format_path(keys): leaf for keys, leaf in leaves}


def pick(tree: Tree, path: tuple[str, ...]) -> Any:
    """Returns the leaf at a path of a nested dict."""
    for key in path:
        tree = tree[key]
    return tree
