"""Models in JAX's explicit-sharding style: what they say of arrays is a constraint on the Auto axes of a step.

    jnp.einsum(..., out_sharding=P("fsdp", None, "tp"))      computed, then constrained as a layout's rules say
    jax.sharding.reshard(x, P("fsdp", None, "tp"))           constrained
    auto_axes(f, out_sharding=...)(x)                        f(x), constrained
    with_sharding_constraint(x, NamedSharding(mesh, spec))   constrained, where the mesh is the author's own
    nn.with_logical_constraint(x, names, mesh=mesh)          constrained on the step's mesh
    nn.with_partitioning(init, names), and logical           names of dims of a parameter, and no constraint
    outside of a step                                        as if nothing were said

Why not a mesh with Explicit axes: sharding in the types of arrays binds everything that touches them, so that losses,
optimizers and parts of a model that know nothing of it stop working; and the names are those of the author's mesh,
where one axis may be two of a layout (`fsdp` is all that splits the batch). So the names are read as `jp.constrain`
reads names of dims, and XLA places the rest.

JAX has no public hook for this. All of its functions read an `out_sharding` by one function of its own, and hand it to
a primitive; while a model is traced, these are replaced here, and nowhere else.

A model may also keep the mesh that its author made it with. What it splits there is split on the step's mesh; a dim
that is whole there is free, for that mesh may be one device alone. A bare PartitionSpec in `with_sharding_constraint`
is about the step's mesh already, and is taken as it is.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import jax
from flax import linen as nn
from flax.core import spmd
from flax.linen import spmd as linen_spmd
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, get_abstract_mesh

from jaxpar.errors import refuse
from jaxpar.mesh.axes import batch_axes

# what the modules of JAX and of Flax import from each other
_NAMES = ("canonicalize_sharding", "auto_axes", "_with_sharding_constraint")
_SAID = ("out_sharding", "sharding", "dst_sharding")  # what primitives call it
_NOWHERE = AbstractMesh((1,), ("nowhere",), axis_types=(AxisType.Auto,))
_installed: list[ExitStack] = []  # one, while a model is traced: it takes back what is replaced


@contextmanager
def understood() -> Iterator[None]:
    """Takes what a model says of sharding as constraints, while the context lasts: a model is traced in it."""
    if _installed:
        yield
        return
    constraints = _bound(_held("sharding_constraint_p"), _placed)
    with _replaced(_functions()), constraints, _open_boxes(), ExitStack() as primitives:
        _installed.append(primitives)
        try:
            yield
        finally:
            _installed.clear()


@contextmanager
def outside_of_meshes() -> Iterator[None]:
    """Forgets the mesh that a caller has set, while a model is made for one of a layout's own."""
    # where there is none, nothing is set: to jax 0.10.2 that would be another context, in which all is traced again
    none = get_abstract_mesh().empty
    with nullcontext() if none else jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


def translated(spec: PartitionSpec, sizes: Any) -> PartitionSpec:
    """Returns a spec on the axes of a step's mesh for one that a model wrote on its own; a dim without is free.

    Args:
      spec: As the model has it.
      sizes: Axis of the step's mesh to size.

    Raises:
      JaxparError: If it names an axis that no rule maps.
    """
    taken: set[str] = set()
    dims: list = []
    for entry in spec:
        wanted = dict.fromkeys(axis for name in _names(entry) for axis in _axes(name, spec, sizes))
        kept = tuple(axis for axis in wanted if sizes[axis] > 1 and axis not in taken)
        taken.update(kept)
        dims.append(kept or PartitionSpec.UNCONSTRAINED)
    return PartitionSpec(*dims)


def _axes(name: str, spec: PartitionSpec, sizes: Any) -> Sequence[str]:
    rules = spmd.get_logical_axis_rules()
    # read to their end: so do a step's rules learn which names a model has, and a rule for one is not refused as idle
    ruled = [axes for known, axes in rules if known == name and axes is not PartitionSpec.UNCONSTRAINED]
    if ruled:
        return _tuple(ruled[0])
    if name in batch_axes(sizes):  # the author's only axis of examples may be several of a layout
        return tuple(axis for known, axes in rules if known == "batch" for axis in _tuple(axes))
    if name in sizes:
        return (name,)
    raise refuse(
        f"the model splits an array as {spec}, and {name!r} is no axis of the mesh",
        rule=f"axes that a model names are {', '.join(sizes)}, or have a rule",
        fix=f'rules={{"{name}": "tensor"}} in Parallel, or {{"{name}": None}}; or the model without shardings of its '
        "own, where it has such a setting",
    )


def _names(entry: Any) -> tuple[str, ...]:
    """Returns the axes of one dim in a spec."""
    return entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()


def _tuple(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _said(sharding: Any) -> NamedSharding | None:
    """Returns what a model said as a sharding on the mesh of the step, or on none outside of one."""
    mesh = get_abstract_mesh()
    if sharding is None or (isinstance(sharding, NamedSharding) and sharding.mesh in (mesh, _NOWHERE)):
        return sharding
    for primitives in _installed:  # a model that says nothing is traced by JAX's own
        primitives.enter_context(_bound([each for each in _primitives() if "bind" not in vars(each)], _computed))
    return _on_mesh_of_step(sharding)


def _on_mesh_of_step(sharding: NamedSharding | PartitionSpec) -> NamedSharding:
    """Returns what a sharding says of the author's mesh, as one on the mesh of the step; on none outside of a step."""
    mesh = get_abstract_mesh()
    if mesh.empty or not spmd.get_logical_axis_rules():
        return NamedSharding(_NOWHERE, PartitionSpec())
    if {*mesh.axis_types} == {AxisType.Manual}:  # each device has its part in hand, and XLA splits nothing
        return NamedSharding(mesh, PartitionSpec(*(None,) * len(_splits(sharding))))
    return NamedSharding(mesh, translated(_splits(sharding), mesh.shape))


def _splits(sharding: NamedSharding | PartitionSpec) -> PartitionSpec:
    """Returns the axes that split dims: on the author's mesh, an axis of one device splits nothing."""
    if isinstance(sharding, PartitionSpec):
        return sharding
    sizes = sharding.mesh.shape
    return PartitionSpec(*(tuple(axis for axis in _names(entry) if sizes[axis] > 1) for entry in sharding.spec))


def _constrained(x: Any, sharding: NamedSharding) -> Any:
    """Returns arrays split as a model said, in the dims that the axes divide."""
    sizes = sharding.mesh.shape

    def one(x):
        dims = [entry if entry != () else None for entry in sharding.spec][: x.ndim]
        fitting = [_fits(size, entry, sizes) for size, entry in zip(x.shape, dims, strict=False)]
        spec = [entry if fits else PartitionSpec.UNCONSTRAINED for entry, fits in zip(dims, fitting, strict=True)]
        free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(spec))
        return lax.with_sharding_constraint(x, PartitionSpec(*spec, *free)) if any(fitting) else x

    return jax.tree.map(one, x)


def _fits(size: int, entry: Any, sizes: Any) -> bool:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return False
    ways = 1
    for axis in _tuple(entry):
        ways *= sizes[axis]
    return size % ways == 0


def _functions() -> dict[str, Callable]:
    def canonicalize_sharding(sharding: Any, name: str, check_mesh_consistency: bool = True) -> Any:
        return _said(sharding)

    def auto_axes(f: Callable | None = None, /, *, axes: Any = None, out_sharding: Any = None) -> Callable:
        if f is None:
            return lambda function: auto_axes(function, axes=axes, out_sharding=out_sharding)

        def called(*args, **kwargs):
            said = kwargs.pop("out_sharding", None) if out_sharding is None else out_sharding
            shardings = jax.tree.map(_said, said, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
            out = f(*args, **kwargs)
            return _constrained(out, shardings) if isinstance(shardings, NamedSharding) else out

        return called

    constraint = linen_spmd._with_sharding_constraint

    def _with_sharding_constraint(x: Any, axis_resources: Any, mesh: Any = None) -> Any:
        return constraint(x, axis_resources)  # Flax has resolved names by the step's rules: to axes of the step's mesh

    return {
        "canonicalize_sharding": canonicalize_sharding,
        "auto_axes": auto_axes,
        "_with_sharding_constraint": _with_sharding_constraint,
    }


def _primitives() -> list:
    found = [vars(lax)[name] for name in ("dot_general_p", "reshape_p", "broadcast_in_dim_p", "iota_p", "reduce_sum_p")]
    return [*found, *_held("reshard_p")]


def _held(primitive: str) -> list:
    """Returns a primitive of `jit`, in a list that is empty where this JAX has no such."""
    return [held for held in [vars(sys.modules["jax._src.pjit"]).get(primitive)] if held is not None]


@contextmanager
def _replaced(functions: dict[str, Callable]) -> Iterator[None]:
    of = ("jax._src.", "jax.sharding", "flax.linen.spmd")
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(of)]
    before = [(module, name, vars(module)[name]) for module in modules for name in _NAMES if name in vars(module)]
    for module, name, _ in before:
        setattr(module, name, functions[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _computed(bind: Callable) -> Callable:
    """Returns `bind` of a primitive that computes, whose result is then constrained as the model said."""

    def run(*args, **params):
        said = next((name for name in _SAID if isinstance(params.get(name), NamedSharding)), None)
        if said is None or any(kind == AxisType.Explicit for kind in params[said].mesh.axis_types):
            return bind(*args, **params)
        out = args[0] if said == "dst_sharding" else bind(*args, **{**params, said: None})
        return _constrained(out, params[said])

    return run


def _placed(bind: Callable) -> Callable:
    """Returns `bind` of `with_sharding_constraint`, on the mesh of the step where the model has one of its own."""

    def run(x, *, sharding, **params):
        if not isinstance(sharding, NamedSharding) or sharding.mesh.shape_tuple == get_abstract_mesh().shape_tuple:
            return bind(x, sharding=sharding, **params)
        return _constrained(x, _on_mesh_of_step(sharding))

    return run


@contextmanager
def _open_boxes() -> Iterator[None]:
    """Leaves out what a Linen box says when Flax opens it: where parameters lie is the layout's to say.

    Flax opens one in every call, to compare shapes, and `nn.DenseGeneral` does so while its kernel is still flat: of
    two dims, where the box names three.
    """
    before = {kind: kind.unbox for kind in (nn.Partitioned, nn.LogicallyPartitioned)}
    for kind, unbox in before.items():
        kind.unbox = lambda self, apply_constraint=True, unbox=unbox: unbox(self, apply_constraint=False)  # pyright: ignore
    try:
        yield
    finally:
        for kind, unbox in before.items():
            kind.unbox = unbox  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _bound(primitives: Sequence[Any], how: Callable[[Callable], Callable]) -> Iterator[None]:
    for primitive in primitives:
        primitive.bind = how(primitive.bind)
    try:
        yield
    finally:
        for primitive in primitives:
            del primitive.bind
