"""The variables of a Linen module: as its initializer makes them, and as jaxpar keeps them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.core import meta
from flax.linen.partitioning import AxisMetadata
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse
from jaxpar.sharding.author.explicit import author_rules
from jaxpar.sharding.author.value_specs import Spec
from jaxpar.sharding.calls.norm_axes import over_bound_axes
from jaxpar.sharding.flat_names import fitted, flat_dims
from jaxpar.sharding.linen.parameters import Parameters
from jaxpar.sharding.linen.sow import Path, parted, recorded_sows
from jaxpar.sharding.names import OVERWRITE, Leaf, Tree, Use, nest, path_of, pick
from jaxpar.sharding.nnx_model import axes_in, names_in

HIDDEN = ("params", "intermediates")  # collections that are not part of the model's state
NONE: Mapping[str, tuple] = MappingProxyType({})


class Initializer:
    """Stands in for the model in the call that creates its parameters.

    Attributes:
      variables: What the module made, in boxes.
      flat: Parameters whose initializers are called with flat dims, and these: see `flat_names`.
      sown: Paths of values that the module sows, and that every further call would make larger.
    """

    training = True

    def __init__(self, module: nn.Module, key):
        self.module, self.key = module, key
        self.variables: Any = {}
        self.flat: dict[str, tuple[int, ...]] = {}
        self.sown: set[Path] = set()

    def __call__(self, *args, method: Any = None, **kwargs):
        """Creates the module's variables and returns what the call does."""
        rngs = {"params": self.key, "dropout": jax.random.fold_in(self.key, 1)}
        # eager sharding of NNX modules inside: names stay metadata, as those of Linen do
        sows = recorded_sows(lambda path, constant: None if constant else self.sown.add(path))
        with nn.intercept_methods(self._noting), nnx.use_eager_sharding(False), sows:
            out, self.variables = self.module.init_with_output(rngs, *args, method=method, **kwargs)
        return out

    def _noting(self, call, args, kwargs, context):
        """Notes the parameters whose initializers are called with flat dims."""
        module = context.module
        if isinstance(module, nn.DenseGeneral):
            count = lambda dims: len(dims) if isinstance(dims, Sequence) else 1  # noqa: E731
            dims = flat_dims(count(module.axis), count(module.features), count(module.batch_dims))
            self.flat |= {"/".join((*module.path, name)): flat for name, flat in dims.items()}
        with over_bound_axes(module):
            return call(*args, **kwargs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Variables:
    """The variables of a module: in Linen's own trees, and in those of jaxpar.

    Attributes:
      params: Structure of Linen's tree of parameters; names in it may have a "/" (`nn.WeightNorm`), which in jaxpar's
        leads to one more dict.
      leaves: Every parameter by its path, in the order of that tree.
      others: Every other array that lasts, by its path in jaxpar's tree.
      lasting: Collections that last, such as BatchNorm's.
      sown: Collections that hold values which every call makes anew.
      sown_paths: Paths of these values; a call adds those that no initializer sows.
    """

    params: Any
    leaves: Mapping[str, Leaf]
    others: Mapping[str, Leaf]
    lasting: tuple[str, ...]
    sown: tuple[str, ...]
    sown_paths: set[Path]

    @classmethod
    def of(
        cls,
        boxed: Mapping[str, Any],
        name: str,
        flat: Mapping[str, tuple[int, ...]],
        sown_paths: set[Path],
        specs: Mapping[str, Spec | None] = NONE,
    ) -> "Variables":
        """Returns them for what a module made, as shapes in boxes.

        Args:
          boxed: What it made.
          name: What the user calls it.
          flat: The flat dims of its parameters.
          sown_paths: Paths of the values that it sows.
          specs: Path of a parameter to the spec that is written on its value.
        """
        said, apart = _said_apart(boxed)
        others = [collection for collection in boxed if collection not in (*HIDDEN, *apart)]
        states = {each: parted(boxed[each], sown_paths, (each,))[0] for each in others}
        sown = tuple(each for each in others if any(path[0] == each for path in sown_paths))
        lasting = tuple(each for each in others if states[each] or each not in sown)
        rest = {"collections": {each: states[each] for each in lasting}, "key": jax.eval_shape(jax.random.key, 0)}
        params = boxed.get("params", {})
        return cls(
            params=jax.tree.structure(unboxed(params)),
            leaves=_leaves(params, name, flat, said.get("params", {}), specs),
            others=_leaves(rest, name, said=_of_the_rest(said)),
            lasting=lasting,
            sown=("intermediates", *sown),  # of which Linen says nothing when it makes a module's variables
            sown_paths=sown_paths,
        )

    @cached_property
    def in_pieces(self) -> list[str]:
        """The collections that hold a large array."""
        return sorted({path.split("/")[1] for path, leaf in self.others.items() if leaf.large})

    @property
    def overwritten(self) -> frozenset[str]:
        """Paths of `others` whose gradient is their new value."""
        return frozenset(path for path in self.others if path.split("/")[1:2] == [OVERWRITE])

    def stored(self, made: Mapping[str, Any], key: jax.Array) -> tuple[Tree, Tree]:
        """Returns (params, rest) as jaxpar keeps them, for what the module made, and the key of its calls."""
        values = self.params.flatten_up_to(made.get("params", {}))
        params = nest(dict(zip(self._words, values, strict=True)))
        states = {name: parted(made[name], self.sown_paths, (name,))[0] for name in self.lasting}
        return params, {"collections": states, "key": key}

    def parameters(self, values: Tree, use: Use) -> Parameters:
        """Returns Linen's own tree of parameters that apply `use` where they are read."""
        return Parameters(jax.tree.unflatten(self.params, [pick(values, words) for words in self._words]), use)

    @cached_property
    def _words(self) -> list[tuple[str, ...]]:
        return [tuple(path.split("/")) for path in self.leaves]


def _names(path: str, box: Any) -> tuple | None:
    """Returns the names that a box gives to dims: Linen's own, or that of an NNX variable inside of Linen."""
    return getattr(box, "names", None) or names_in(path, getattr(box, "metadata", {}))


def _axes(names: Sequence, box: Any, rules: Sequence) -> tuple | None:
    """Returns the mesh axes of dims by the author's rules, of the box or in force around; None without rules.

    Names of `nn.with_partitioning` are axes of a mesh already, and no rules apply to them.
    """
    if not meta.is_axis_metadata(box):  # names that `flax.linen.partitioning` has sown
        return _by_rules(names, rules)
    if isinstance(box, nn.LogicallyPartitioned):
        return _by_rules(names, box.rules or ())
    return axes_in(names, getattr(box, "metadata", {}))


def _by_rules(names: Sequence, rules: Sequence) -> tuple | None:
    spec = logical_to_mesh_axes(tuple(names), tuple(rules)) if rules else None
    return None if spec is None else tuple(spec)


def unboxed(tree):
    """Returns the values without their boxes, and without the constraint that a box would apply."""
    return jax.tree.map(
        lambda box: getattr(box, "value", box) if meta.is_axis_metadata(box) else box,
        tree,
        is_leaf=meta.is_axis_metadata,
    )


def _said_apart(boxed: Mapping[str, Any]) -> tuple[dict[str, dict[str, tuple]], list[str]]:
    """Returns {collection: {path: names of dims}} for the collections in which `flax.linen.partitioning` keeps these.

    It sows the names of `params` into `params_axes`, as T5X's models do, and of others likewise. There are no arrays in
    such a collection: it is no state, and its names follow as the second of what is returned.
    """
    said: dict[str, dict[str, tuple]] = {}
    for collection in (each for each in boxed if each.endswith("_axes")):
        flat, _ = jax.tree_util.tree_flatten_with_path(boxed[collection], is_leaf=lambda x: isinstance(x, AxisMetadata))
        if flat and all(isinstance(each, AxisMetadata) for _, each in flat):
            names = {path_of(keys).removesuffix("_axes"): each.names for keys, each in flat}
            # of a parameter that is a tree of arrays they are a tree of names, which are not told apart here
            plain = {path: tuple(each) for path, each in names.items() if isinstance(each, tuple | PartitionSpec)}
            said[collection.removesuffix("_axes")] = plain
    return said, [f"{collection}_axes" for collection in said]


def _of_the_rest(said: Mapping[str, Mapping[str, tuple]]) -> dict[str, tuple]:
    """Returns names of dims by path in jaxpar's tree, of the collections that are no parameters."""
    return {
        f"collections/{collection}/{path}": names
        for collection, each in said.items()
        if collection != "params"
        for path, names in each.items()
    }


def _leaves(
    boxed: Tree,
    name: str,
    flat: Mapping[str, tuple] = NONE,
    said: Mapping[str, tuple] = NONE,
    specs: Mapping[str, Spec | None] = NONE,
) -> dict[str, Leaf]:
    """Returns every array of a tree.

    Names of its dims, or of its flat dims, are in a box around it, or said apart; or a spec is written on its value.
    """
    leaves, rules = {}, author_rules()
    for keys, box in jax.tree_util.tree_flatten_with_path(boxed, is_leaf=meta.is_axis_metadata)[0]:
        names = _names(path_of(keys), box)
        # one array; or several, of a box around a tuple of them: its names are of those that have as many dims
        for more, value in jax.tree_util.tree_flatten_with_path(unboxed(box))[0]:
            path, rank = path_of([*keys, *more]), len(value.shape)
            given: Any = said.get(path) if names is None or (more and len(names) != rank) else names
            axes, spec = None if given is None else _axes(given, box, rules), specs.get(path)
            if given is None and spec is not None:  # stacked dims come first: a lifted `vmap` adds none to the spec
                given = axes = (*(None,) * (rank - len(spec)), *spec)
            given, axes = (dims and fitted(dims, rank, flat.get(path, ())) for dims in (given, axes))
            if path in leaves:
                raise refuse(
                    f"{name} has {path} twice", rule="a parameter has a path of its own", fix='names without "/"'
                )
            leaves[path] = Leaf(tuple(value.shape), value.dtype, given, axes=axes)
    return leaves
