"""Converts the variables of a Linen module from its initializer's boxed trees to jaxpar's nested dicts, and back."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.core import meta
from flax.errors import ModifyScopeVariableError, ScopeCollectionNotFound
from flax.linen.partitioning import AxisMetadata
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import PartitionSpec

from jaxpar.errors import JaxparError, refuse
from jaxpar.sharding.author.explicit import author_rules
from jaxpar.sharding.author.value_specs import Spec
from jaxpar.sharding.flax_layers import without_unbound_axes
from jaxpar.sharding.linen_calls import Parameters, Path, recording_sows, split_sown
from jaxpar.sharding.names import OVERWRITE, Leaf, Tree, Use, format_path, nest, pick
from jaxpar.sharding.nnx_model import metadata_axes, metadata_names
from jaxpar.sharding.rules import fit_names, flat_dims, without_blank_names

HIDDEN = ("params", "intermediates")  # collections that are not part of the model's state
NONE: Mapping[str, tuple] = MappingProxyType({})


class Initializer:
    """Replaces the model in the call that creates its parameters.

    Attributes:
      variables: The module's variables, in Flax's boxes.
      flat: Path to flat dims, for each parameter whose initializer is called with flat dims: see `flat_dims`.
      sown: Paths of the sown tuples that each further call would lengthen.
    """

    training = True

    def __init__(self, module: nn.Module, key):
        self.module, self.key = module, key
        self.variables: Any = {}
        self.flat: dict[str, tuple[int, ...]] = {}
        self.sown: set[Path] = set()

    def __call__(self, *args, method: Callable | str | None = None, **kwargs):
        """Creates the module's variables and returns the output of the call."""
        rngs = {"params": self.key, "dropout": jax.random.fold_in(self.key, 1)}
        # no eager sharding of NNX modules inside: names stay metadata, as Linen's do
        sows = recording_sows(lambda path, constant: None if constant else self.sown.add(path))
        with nn.intercept_methods(self._record_flat_dims), nnx.use_eager_sharding(False), sows:
            out, self.variables = self.module.init_with_output(rngs, *args, method=method, **kwargs)
        return out

    def _record_flat_dims(self, call, args, kwargs, context):
        """Records the parameters whose initializers are called with flat dims."""
        module = context.module
        if isinstance(module, nn.DenseGeneral):
            count = lambda dims: len(dims) if isinstance(dims, Sequence) else 1  # noqa: E731
            dims = flat_dims(count(module.axis), count(module.features), count(module.batch_dims))
            self.flat |= {"/".join((*module.path, name)): flat for name, flat in dims.items()}
        with without_unbound_axes(module):
            return call(*args, **kwargs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Variables:
    """The structure of a module's variables, in Linen's trees and in those of jaxpar.

    Attributes:
      params: Structure of Linen's tree of parameters. A name in it may contain "/" (`nn.WeightNorm`); jaxpar's tree has
        one more level there.
      leaves: Path to parameter, in the order of Linen's tree.
      others: Path in jaxpar's tree to every other array of the state.
      state_collections: Collections of the state, such as BatchNorm's.
      sown: Collections with sown values, which every call creates anew.
      sown_paths: Paths of sown values; a call adds the ones that the initializer does not sow.
    """

    params: Any
    leaves: Mapping[str, Leaf]
    others: Mapping[str, Leaf]
    state_collections: tuple[str, ...]
    sown: tuple[str, ...]
    sown_paths: set[Path]

    @classmethod
    def from_boxed(
        cls,
        boxed: Mapping[str, Any],
        name: str,
        flat: Mapping[str, tuple[int, ...]],
        sown_paths: set[Path],
        specs: Mapping[str, Spec | None] = NONE,
    ) -> "Variables":
        """Builds the structure from a module's boxed abstract variables.

        Args:
          boxed: The variables of the module, as shapes in Flax's boxes.
          name: The user's name of the module.
          flat: The flat dims of its parameters.
          sown_paths: Paths of its sown values.
          specs: Path of a parameter to the spec that the author gave its value.
        """
        annotations, annotated = _sown_annotations(boxed)
        collections = [collection for collection in boxed if collection not in (*HIDDEN, *annotated)]
        states = {key: split_sown(boxed[key], sown_paths, (key,))[0] for key in collections}
        sown = tuple(key for key in collections if any(path[0] == key for path in sown_paths))
        lasting = tuple(key for key in collections if states[key] or key not in sown)
        rest = {"collections": {key: states[key] for key in lasting}, "key": jax.eval_shape(jax.random.key, 0)}
        params = boxed.get("params", {})
        return cls(
            params=jax.tree.structure(unbox(params)),
            leaves=without_blank_names(_leaves(params, name, flat, annotations.get("params", {}), specs)),
            others=_leaves(rest, name, annotations=_state_annotations(annotations)),
            state_collections=lasting,
            sown=("intermediates", *sown),  # Linen does not list it among a module's variables
            sown_paths=sown_paths,
        )

    @cached_property
    def large_collections(self) -> list[str]:
        """Names of the collections with a large array."""
        return sorted({path.split("/")[1] for path, leaf in self.others.items() if leaf.large})

    @property
    def overwritten(self) -> frozenset[str]:
        """Paths in `others` of arrays whose gradient is their new value, such as the scales of fp8 matmuls."""
        return frozenset(path for path in self.others if path.split("/")[1:2] == [OVERWRITE])

    def to_state(self, variables: Mapping[str, Any], key: jax.Array) -> tuple[Tree, Tree]:
        """Converts the module's variables and the key of its calls to jaxpar's (params, rest)."""
        values = self.params.flatten_up_to(variables.get("params", {}))
        params = nest(dict(zip(self._words, values, strict=True)))
        states = {name: split_sown(variables[name], self.sown_paths, (name,))[0] for name in self.state_collections}
        return params, {"collections": states, "key": key}

    def parameters(self, values: Tree, use: Use) -> Parameters:
        """Converts parameters to Linen's tree, which applies `use` to each one where the module reads it."""
        return Parameters(self.linen_tree(values), use)

    def linen_tree(self, values: Tree) -> Any:
        """Converts parameters to Linen's tree."""
        return jax.tree.unflatten(self.params, [pick(values, words) for words in self._words])

    @cached_property
    def _words(self) -> list[tuple[str, ...]]:
        return [tuple(path.split("/")) for path in self.leaves]


def _names(path: str, box: object) -> tuple | None:
    """Returns the names that a box gives to dims: a box of Linen, or of an NNX variable inside of a Linen module."""
    return getattr(box, "names", None) or metadata_names(path, getattr(box, "metadata", {}))


def _axes(names: Sequence, box: object, rules: Sequence) -> tuple | None:
    """Maps names of dims to mesh axes by the rules in the box, else by the current Flax rules; None without rules.

    Names of `nn.with_partitioning` are mesh axes already, so no rules apply to them.
    """
    if not meta.is_axis_metadata(box):  # `flax.linen.partitioning` sows it
        return _apply_rules(names, rules)
    if isinstance(box, nn.LogicallyPartitioned):
        return _apply_rules(names, box.rules or ())
    return metadata_axes(names, getattr(box, "metadata", {}))


def _apply_rules(names: Sequence, rules: Sequence) -> tuple | None:
    spec = logical_to_mesh_axes(tuple(names), tuple(rules)) if rules else None
    return None if spec is None else tuple(spec)


def unbox(tree):
    """Unboxes the values, without the constraint that a box would apply."""
    return jax.tree.map(
        lambda box: getattr(box, "value", box) if meta.is_axis_metadata(box) else box,
        tree,
        is_leaf=meta.is_axis_metadata,
    )


def _sown_annotations(boxed: Mapping[str, object]) -> tuple[dict[str, dict[str, tuple]], list[str]]:
    """Collects the dim names that `flax.linen.partitioning` sows: {collection: {path: names}}, and their collections.

    It sows the names of `params` into the collection `params_axes`, as in T5X's models, and likewise for others. Such a
    collection has no arrays, so it is not part of the state.
    """
    annotations: dict[str, dict[str, tuple]] = {}
    for collection in (item for item in boxed if item.endswith("_axes")):
        flat, _ = jax.tree_util.tree_flatten_with_path(boxed[collection], is_leaf=lambda x: isinstance(x, AxisMetadata))
        if flat and all(isinstance(item, AxisMetadata) for _, item in flat):
            names = {format_path(keys).removesuffix("_axes"): item.names for keys, item in flat}
            # for a parameter that is a tree of arrays, its names are a tree as well, which is not supported here
            plain = {path: tuple(item) for path, item in names.items() if isinstance(item, tuple | PartitionSpec)}
            annotations[collection.removesuffix("_axes")] = plain
    return annotations, [f"{collection}_axes" for collection in annotations]


def _state_annotations(annotations: Mapping[str, Mapping[str, tuple]]) -> dict[str, tuple]:
    """Maps paths in jaxpar's tree to names of dims, for arrays in collections other than `params`."""
    return {
        f"collections/{collection}/{path}": names
        for collection, names_by_path in annotations.items()
        if collection != "params"
        for path, names in names_by_path.items()
    }


def _leaves(
    boxed: Tree,
    name: str,
    flat: Mapping[str, tuple] = NONE,
    annotations: Mapping[str, tuple] = NONE,
    specs: Mapping[str, Spec | None] = NONE,
) -> dict[str, Leaf]:
    """Returns path to `Leaf` for every array of a tree.

    The names of its dims come from a box, from an `_axes` collection, or from a spec that the author gave its value.
    """
    leaves, rules = {}, author_rules()
    for keys, box in jax.tree_util.tree_flatten_with_path(boxed, is_leaf=meta.is_axis_metadata)[0]:
        names = _names(format_path(keys), box)
        # one array; or several, for a box around a tuple: its names apply to arrays of the same rank
        for subpath, value in jax.tree_util.tree_flatten_with_path(unbox(box))[0]:
            path, rank = format_path([*keys, *subpath]), len(value.shape)
            dim_names: Any = annotations.get(path) if names is None or (subpath and len(names) != rank) else names
            axes, spec = None if dim_names is None else _axes(dim_names, box, rules), specs.get(path)
            if dim_names is None and spec is not None:  # stacked dims come first: a lifted `vmap` adds none to the spec
                dim_names = axes = (*(None,) * (rank - len(spec)), *spec)
            dim_names, axes = (dims and fit_names(dims, rank, flat.get(path, ())) for dims in (dim_names, axes))
            if path in leaves:
                raise refuse(
                    f"{name} has {path} twice", rule="a parameter has a path of its own", fix='names without "/"'
                )
            leaves[path] = Leaf(tuple(value.shape), value.dtype, dim_names, axes=axes)
    return leaves


# Refuses variables that a Linen module creates in a call but not in init: a compiled step cannot grow its state.


@contextmanager
def lock_collections(module: nn.Module, state: Mapping[str, object]) -> Iterator[None]:
    """Refuses a variable in a collection that init does not create: Flax cannot return it from a call."""
    try:
        yield
    except (ScopeCollectionNotFound, ModifyScopeVariableError) as error:
        collection = re.search(r'collection "(\w+)"', str(error))
        if collection is None or collection[1] in ("params", *state):
            raise
        raise _late_variable_error(module, f"a variable of the collection {collection[1]}") from error


def check_variables(module: nn.Module, before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Refuses variables that a call created.

    Args:
      module: The module.
      before: The module's collections before the call.
      after: The module's collections after the call.

    Raises:
      JaxparError: If there is such a variable; the message names the first.
    """
    if late := next(_find_late_variables(before, after), ""):
        raise _late_variable_error(module, f"the variable {late}")


def has_path(tree: object, path: Path) -> bool:
    """Whether a nested dict has a value at a path."""
    for name in path:
        if not isinstance(tree, dict) or name not in tree:
            return False
        tree = tree[name]
    return True


def _find_late_variables(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in after.items():
        if name not in before:
            yield prefix + name
        elif isinstance(value, dict) and isinstance(before[name], dict):
            yield from _find_late_variables(before[name], value, f"{prefix}{name}/")


def _late_variable_error(module: nn.Module, variable: str) -> JaxparError:
    return refuse(
        f"{type(module).__name__} makes {variable} while it is called, and not in its init",
        rule="state that lasts is there from the start: a compiled step cannot grow it",
        fix="self.variable(...) in init too, not behind `if not self.is_initializing()`; self.sow(...) for what only "
        "this call needs",
    )
