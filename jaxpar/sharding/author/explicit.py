"""Models in JAX's explicit-sharding style: their shardings become constraints on the Auto axes of a step.

    jnp.einsum(..., out_sharding=P("fsdp", None, "tp"))      computed, then constrained by a layout's rules
    jax.sharding.reshard(x, P("fsdp", None, "tp"))           constrained
    auto_axes(f, out_sharding=...)(x)                        f(x), constrained
    with_sharding_constraint(x, P("data", None))             constrained: the examples over all axes that split them
    with_sharding_constraint(x, NamedSharding(mesh, spec))   constrained, where the mesh is the author's own
    jax.device_put(x, NamedSharding(mesh, spec))             likewise
    jax.jit(f, out_shardings=P("data", None))(x)             likewise, dims without an axis whole
    nn.with_logical_constraint(x, names, mesh=mesh)          constrained on the step's mesh
    nn.with_partitioning(init, names), and logical           names of dims of a parameter, and no constraint
    jax.shard_map(f, mesh=mesh, ...)                         on the step's mesh, where that has the author's axes
    outside of a step                                        recorded for an initializer, else ignored

Why not a mesh with Explicit axes: they put the sharding into the type of every array, so losses, optimizers and parts
of a model that do not expect it stop working. Also, the names are those of the author's mesh, where one axis may be two
of a layout (`fsdp` stands for all axes that split the batch). So jaxpar treats the names as `jp.constrain` treats names
of dims, and XLA shards all other arrays.

JAX has no public hook for this. All of its functions parse an `out_sharding` with one internal function and pass it to
a primitive; this file replaces both while a model is traced.

A model may also keep a mesh of its author. A dim that is sharded there is sharded on the step's mesh; a dim that is
unsharded there is left to XLA, because that mesh may have only one device. In a spec without a mesh, the axes are
translated likewise, but a dim without an axis is unsharded. jaxpar's own code constrains arrays with a NamedSharding on
the step's mesh, which is used unchanged.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import jax
from flax import linen as nn
from flax.core import spmd
from flax.linen import spmd as linen_spmd
from flax.nnx import variablelib
from jax import lax
from jax.extend.core.primitives import device_put_p
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, get_abstract_mesh

from jaxpar.errors import refuse
from jaxpar.mesh.axes import batch_axes
from jaxpar.models.dim_names import constrain_to, step_rules
from jaxpar.sharding.author.manual_mesh import entry_axes, manual_mesh
from jaxpar.sharding.author.value_specs import is_recording, record_spec

# functions that modules of JAX and Flax import from each other
_FUNCTIONS = (
    "canonicalize_sharding",
    "_get_new_mesh",
    "_with_sharding_constraint",
    "_with_sharding_constraint_one_fallback",
    "_create_sharding_for_array",
    "_shmap_checks",
    "shard_value",
    "_remap_sharding_metadata",
)
_SHARDING_PARAMETERS = ("out_sharding", "sharding", "dst_sharding")  # its names as a parameter of primitives
_NOWHERE = "nowhere"  # an axis of the mesh that stands for the author's if there is none
_translations: list[ExitStack] = []  # one, while a model is traced: it undoes the replacements


@contextmanager
def sharding_translation() -> Iterator[None]:
    """Context in which models are traced: it turns the shardings that a model requests into constraints."""
    if _translations:
        yield
        return
    constraints = _wrap_binds(_pjit_primitive("sharding_constraint_p"), _bind_of_constraint)
    puts = _wrap_binds([device_put_p], _bind_of_device_put)
    with _replacing(_functions()), constraints, puts, _open_boxes(), ExitStack() as primitives:
        _translations.append(primitives)
        try:
            yield
        finally:
            _translations.clear()


@contextmanager
def no_mesh() -> Iterator[None]:
    """Unsets the caller's mesh while a model is initialized for the mesh of a layout."""
    # without a mesh, sets nothing: jax 0.10.2 would treat the empty mesh as another context, and trace everything again
    unset = get_abstract_mesh().empty
    with nullcontext() if unset else jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


def translate_spec(spec: PartitionSpec, sizes: Mapping[str, int]) -> PartitionSpec:
    """Translates a spec of a model to the axes of a step's mesh.

    The author's axis of examples stands for all axes of the layout that split examples, except those that the spec
    names itself.

    Args:
      spec: A spec in axes of the author's mesh.
      sizes: Axis of the step's mesh to size.

    Raises:
      JaxparError: If the spec names an axis that the step's mesh lacks and no rule maps.
    """
    written = {name for entry in spec for name in entry_axes(entry)}
    used_axes: set[str] = set()
    dims: list = []
    for entry in spec:
        wanted = dict.fromkeys(axis for name in entry_axes(entry) for axis in _axes(name, spec, sizes, written))
        present = tuple(axis for axis in wanted if sizes[axis] > 1 and axis not in used_axes)
        used_axes.update(present)
        dims.append(present or (entry if entry is PartitionSpec.UNCONSTRAINED else None))
    return PartitionSpec(*dims)


def _axes(name: str, spec: PartitionSpec, sizes: Mapping[str, int], written: set[str]) -> Sequence[str]:
    rules = step_rules.get()
    # iterates to the end, so that a step's rules record the name, and a rule for it is not refused as idle
    ruled = [axes for ruled_name, axes in rules if ruled_name == name and axes is not PartitionSpec.UNCONSTRAINED]
    if ruled:
        return axes_tuple(ruled[0])
    if name in batch_axes(sizes):
        examples = (axis for ruled_name, axes in rules if ruled_name == "batch" for axis in axes_tuple(axes))
        return tuple(axis for axis in examples if axis == name or axis not in written)
    if name in sizes:
        return (name,)
    raise refuse(
        f"the model splits an array as {spec}, and {name!r} is no axis of the mesh",
        rule=f"axes that a model names are {', '.join(sizes)}, or have a rule",
        fix=f'rules={{"{name}": "tensor"}} in Parallel, or {{"{name}": None}}; or the model without shardings of its '
        "own, where it has such a setting",
    )


def axes_tuple(axes: str | Iterable[str] | None) -> tuple[str, ...]:
    """Returns the axes of a rule or of one dim as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _step_sharding(sharding: NamedSharding | PartitionSpec | None) -> NamedSharding | None:
    """Translates a sharding in the model to the mesh of the step; outside of a step it stays on the author's mesh."""
    if sharding is None or (
        isinstance(sharding, NamedSharding) and (sharding.mesh == get_abstract_mesh() or _has_author_mesh(sharding))
    ):
        return sharding
    bare = [primitive for primitive in _primitives() if "bind" not in vars(primitive)]
    for primitives in _translations:  # only now: other models use JAX's own `bind`
        primitives.enter_context(_wrap_binds(bare, _bind_of_computation))
    return _translate_sharding(sharding)


def _translate_sharding(sharding: NamedSharding | PartitionSpec) -> NamedSharding:
    """Translates a sharding from the author's mesh to that of the step; outside of a step its spec is unchanged."""
    mesh, spec = get_abstract_mesh(), _written_spec(sharding)
    if mesh.empty or not step_rules.get():
        return _author_sharding(spec)
    if {*mesh.axis_types} == {AxisType.Manual}:  # each device has its own shard, and XLA splits nothing
        return NamedSharding(mesh, PartitionSpec(*(None,) * len(spec)))
    # XLA cannot split over an axis that is manual here
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    sizes = {axis: 1 if kind == AxisType.Manual else mesh.shape[axis] for axis, kind in kinds}
    return NamedSharding(mesh, translate_spec(spec, sizes))


def _author_sharding(spec: PartitionSpec) -> NamedSharding:
    """Returns a sharding on a placeholder of the author's mesh: its axes have size 1, as their sizes are unknown."""
    names = dict.fromkeys(name for entry in spec for name in entry_axes(entry))
    axes = (_NOWHERE, *names)
    return NamedSharding(AbstractMesh((1,) * len(axes), axes, axis_types=(AxisType.Auto,) * len(axes)), spec)


def _has_author_mesh(sharding: NamedSharding) -> bool:
    return _NOWHERE in sharding.mesh.axis_names


def _written_spec(sharding: NamedSharding | PartitionSpec) -> PartitionSpec:
    """Returns a sharding's spec without axes of size 1 on the author's mesh, which split nothing."""
    if isinstance(sharding, PartitionSpec):
        return sharding
    if _has_author_mesh(sharding):
        return sharding.spec
    sizes = sharding.mesh.shape
    return PartitionSpec(*(tuple(axis for axis in entry_axes(entry) if sizes[axis] > 1) for entry in sharding.spec))


def _constrain(x: object, sharding: NamedSharding, *, whole: bool = False) -> Any:
    """Constrains each dim that its axes divide; `whole` makes dims without axes unsharded, else XLA shards them."""
    if not all(hasattr(leaf, "ndim") for leaf in jax.tree.leaves(x)):
        return x  # a Python number, among the arguments of `auto_axes`
    if _has_author_mesh(sharding):
        return record_spec(x, sharding.spec)
    sizes = sharding.mesh.shape

    def constrain_array(x):
        entries = (*sharding.spec, *(None,) * (x.ndim - len(sharding.spec)))
        dims = [PartitionSpec.UNCONSTRAINED if entry is None and not whole else entry for entry in entries]
        fitting = [_fits(size, entry, sizes) for size, entry in zip(x.shape, dims, strict=True)]
        spec = [entry if fits else PartitionSpec.UNCONSTRAINED for entry, fits in zip(dims, fitting, strict=True)]
        return constrain_to(x, PartitionSpec(*spec)) if any(fitting) else x

    return jax.tree.map(constrain_array, x)


def _unshard_free_dims(sharding: NamedSharding) -> NamedSharding:
    """Replaces UNCONSTRAINED dims by unsharded ones, because `jit` takes no UNCONSTRAINED dims for its arguments."""
    dims = (None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in sharding.spec)
    return NamedSharding(sharding.mesh, PartitionSpec(*dims))


def _fits(size: int, entry: Any, sizes: Mapping[str, int]) -> bool:
    if entry is PartitionSpec.UNCONSTRAINED:
        return False
    ways = 1
    for axis in axes_tuple(entry):
        ways *= sizes[axis]
    return size % ways == 0


def _functions() -> dict[str, Callable]:
    def canonicalize_sharding(sharding: Any, name: str, check_mesh_consistency: bool = True) -> Any:
        return _step_sharding(sharding)

    def _get_new_mesh(axes: object, axis_type: object, name: str, shardings: object = None, **others: Any) -> Any:
        if name != "auto_axes":
            return new_mesh(axes, axis_type, name, shardings=shardings, **others)
        mesh = get_abstract_mesh()  # the same mesh, and an axis that it lacks, so that JAX reshards the result
        return SimpleNamespace(prev=mesh, new=mesh, axes=(_NOWHERE,))

    resolve, create, check, remap, new_mesh = (
        linen_spmd._with_sharding_constraint_one_fallback,
        vars(sys.modules["jax._src.pjit"])["_create_sharding_for_array"],
        vars(sys.modules["jax._src.shard_map"])["_shmap_checks"],
        vars(variablelib)["_remap_sharding_metadata"],
        vars(sys.modules["jax._src.pjit"])["_get_new_mesh"],
    )
    by_step: list[bool] = []  # whether the names of a constraint are resolved by the rules of the step

    def _with_sharding_constraint_one_fallback(names: Any, x: Any, *args: Any, rules: Any = None, **kwargs: Any) -> Any:
        by_step.append(rules is step_rules.get())
        if by_step[-1] and names is not None:  # Flax refuses repeated names, but an author without rules may have them
            repeats = {i for i, name in enumerate(names) if isinstance(name, str) and name in tuple(names)[:i]}
            names = tuple(PartitionSpec.UNCONSTRAINED if i in repeats else name for i, name in enumerate(names))
        try:
            return resolve(names, x, *args, rules=rules, **kwargs)
        finally:
            by_step.pop()

    def _with_sharding_constraint(x: object, axis_resources: PartitionSpec | None, mesh: object = None) -> Any:
        step_mesh = get_abstract_mesh()
        if axis_resources is None or step_mesh.empty:
            return x
        if by_step and by_step[-1]:
            return lax.with_sharding_constraint(x, NamedSharding(step_mesh, axis_resources))
        return lax.with_sharding_constraint(x, axis_resources)  # by the author's rules, to the author's axes

    def _create_sharding_for_array(mesh: object, x: object, name: str, api_name: str) -> Any:
        if isinstance(x, PartitionSpec) and api_name == "with_sharding_constraint":
            return _author_sharding(x)
        if isinstance(x, PartitionSpec) and api_name == "jit":
            step_mesh = _translate_sharding(x)
            return create(mesh, None, name, api_name) if _has_author_mesh(step_mesh) else _unshard_free_dims(step_mesh)
        return create(mesh, x, name, api_name)

    def _shmap_checks(mesh: Any, axis_names: Any, in_specs: Any, out_specs: Any, *args: Any) -> Any:
        step_mesh, axis_names = manual_mesh(mesh, axis_names, (in_specs, out_specs))
        return check(step_mesh, axis_names, in_specs, out_specs, *args)

    def _remap_sharding_metadata(metadata: dict[str, Any]) -> None:
        remap(metadata)
        rules = author_rules()
        if rules and metadata.get(
            "out_sharding"
        ):  # the names as they are when the variable is created, where Flax places it by them
            metadata["sharding_rules"] = spmd.composite_rules(rules, metadata.get("sharding_rules"))

    def shard_value(value: object, *_: Any) -> Any:
        return value

    return {
        "canonicalize_sharding": canonicalize_sharding,
        "_get_new_mesh": _get_new_mesh,
        "_with_sharding_constraint": _with_sharding_constraint,
        "_with_sharding_constraint_one_fallback": _with_sharding_constraint_one_fallback,
        "_create_sharding_for_array": _create_sharding_for_array,
        "_shmap_checks": _shmap_checks,
        "_remap_sharding_metadata": _remap_sharding_metadata,
        "shard_value": shard_value,
    }


def author_rules() -> tuple[tuple[str, Any], ...]:
    """Returns the current Flax rules that an author or a user set; () if they are the step's own."""
    rules = spmd.get_logical_axis_rules()
    return () if rules is step_rules.get() else tuple((name, axes) for name, axes in rules)


def _primitives() -> list:
    found = [vars(lax)[name] for name in ("dot_general_p", "reshape_p", "broadcast_in_dim_p", "iota_p", "reduce_sum_p")]
    return [*found, *_pjit_primitive("reshard_p")]


def _pjit_primitive(primitive: str) -> list:
    """Returns a list with JAX's internal primitive of that name; an empty list if this version of JAX has none."""
    return [value for value in [vars(sys.modules["jax._src.pjit"]).get(primitive)] if value is not None]


@contextmanager
def _replacing(functions: dict[str, Callable]) -> Iterator[None]:
    prefixes = ("jax._src.", "jax.sharding", "flax.linen.spmd", "flax.core.spmd", "flax.nnx.variablelib")
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(prefixes)]
    before = [(module, name, vars(module)[name]) for module in modules for name in _FUNCTIONS if name in vars(module)]
    for module, name, _ in before:
        setattr(module, name, functions[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _bind_of_computation(bind: Callable) -> Callable:
    """Wraps `bind` of a primitive with an `out_sharding`: computes without it, then constrains the result."""

    def run(*args, **params):
        key = next((name for name in _SHARDING_PARAMETERS if isinstance(params.get(name), NamedSharding)), None)
        if key is None or any(kind == AxisType.Explicit for kind in params[key].mesh.axis_types):
            return bind(*args, **params)
        out = args[0] if key == "dst_sharding" else bind(*args, **{**params, key: None})
        return _constrain(out, params[key])

    return run


def _bind_of_constraint(bind: Callable) -> Callable:
    """Wraps `bind` of `with_sharding_constraint`: translates a sharding on the author's mesh to the step's mesh."""

    def run(x, *, sharding, **params):
        if not isinstance(sharding, NamedSharding) or sharding.mesh.shape_tuple == get_abstract_mesh().shape_tuple:
            return bind(x, sharding=sharding, **params)
        step = _translate_sharding(sharding)
        return _constrain(x, step, whole=_has_author_mesh(sharding) and {*step.mesh.axis_types} != {AxisType.Manual})

    return run


def _bind_of_device_put(bind: Callable) -> Callable:
    """Wraps `bind` of `jax.device_put`: constrains arrays that go to the author's mesh, or records their spec."""

    def run(*args, **params):
        mesh = get_abstract_mesh()
        foreign = [
            isinstance(to, NamedSharding) and to.mesh.shape_tuple != mesh.shape_tuple for to in params["devices"]
        ]
        in_step = not mesh.empty and step_rules.get()
        if not any(foreign) or not (in_step or is_recording()):
            return bind(*args, **params)
        pairs = zip(args, params["devices"], foreign, strict=True)
        return [_constrain(x, _translate_sharding(to)) if is_foreign else x for x, to, is_foreign in pairs]

    return run


@contextmanager
def _open_boxes() -> Iterator[None]:
    """Makes Flax unbox Linen's boxes without constraining the values: the layout decides how parameters are sharded.

    Flax unboxes in every call, to compare shapes. `nn.DenseGeneral` does so while its kernel is still flattened to two
    dims, although the box names three.
    """
    before = {kind: kind.unbox for kind in (nn.Partitioned, nn.LogicallyPartitioned)}

    def open_box(unbox: Callable, self: object) -> Any:
        if isinstance(self, nn.LogicallyPartitioned) and self.rules is None and (rules := author_rules()):
            object.__setattr__(self, "rules", rules)  # Flax would place it by the rules at its creation
        return unbox(self, apply_constraint=False)

    for kind, unbox in before.items():
        kind.unbox = lambda self, apply_constraint=True, unbox=unbox: open_box(unbox, self)  # pyright: ignore
    try:
        yield
    finally:
        for kind, unbox in before.items():
            kind.unbox = unbox  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _wrap_binds(primitives: Sequence[Any], how: Callable[[Callable], Callable]) -> Iterator[None]:
    for primitive in primitives:
        primitive.bind = how(primitive.bind)
    try:
        yield
    finally:
        for primitive in primitives:
            del primitive.bind
