"""The subject of an inspection: a lowered program, and its user's names for the arrays it is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.errors import refuse, users_code
from jaxpar.hlo.attribution import Argument
from jaxpar.hlo.own_share import OwnShare
from jaxpar.hlo.text import BITS
from jaxpar.html.pieces import Card
from jaxpar.pipeline.tables.schedule import Schedule

ROLES = ("parameters", "optimizer state", "other state", "batch", "arguments")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A program to be inspected.

    Attributes:
      title: Its name.
      lowered: As `jax.jit(...).lower` returns it.
      mesh: Where it runs.
      arguments: Every array it is given.
      used: Path of a parameter to the shape one device computes with.
      loss: (file, function) of functions that compute the loss.
      model_flop: FLOP of a step over all devices, without recomputation; None where it is not known.
      share: Its matmuls as traced, of which each device should make an equal part; None where that is not known.
      precision: `bf16` where matmuls were asked for in 16 bits.
      batch_axes: Mesh axes that split examples.
      whole: Those of them over which gradients are whole by declaration, even of parameters that they split.
      silent: Mesh axes over which this program sends nothing by declaration.
      microbatches: How many a step has.
      updates: How often the weights change in a step.
      schedule: The schedule of its pipeline; None without one.
      cards: How its parameters are cut, and which devices hold the pieces.
      notes: Remarks for the reader of a report.
      own: Whether jaxpar jitted it, without compiler options; a user's `jit` may have some, and its text hides them.
      options: What XLA is told where it compiles it to be run.
    """

    title: str
    lowered: Any = field(repr=False)
    mesh: Mesh
    arguments: tuple[Argument, ...]
    used: Mapping[str, Sequence[int]] = field(default_factory=dict)
    loss: tuple[tuple[str, str], ...] = ()
    model_flop: float | None = None
    share: OwnShare | None = field(default=None, repr=False)
    precision: str = ""
    batch_axes: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    microbatches: int = 1
    updates: int = 1
    schedule: Schedule | None = field(default=None, repr=False)
    cards: tuple[Card, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    own: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def argument(path: str, role: str, leaf: Any, sharding: Any, *, names: Sequence[str | None] = ()) -> Argument:
    """Returns one array as the inspector sees it.

    Args:
      path: What the user calls it.
      role: One of `ROLES`.
      leaf: Anything with shape and dtype.
      sharding: Where it lives.
      names: Names of its dims, where it has them.
    """
    shape, shard = tuple(leaf.shape), tuple(sharding.shard_shape(tuple(leaf.shape)))
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):  # a random key is an array of integers
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        tail = data.shape[len(shape) :]
        shape, shard, dtype = (*shape, *tail), (*shard, *tail), data.dtype
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    sizes = dict(sharding.mesh.shape) if isinstance(sharding, NamedSharding) else {}
    dims, split = [], []
    for dim, size in enumerate(shape):
        entry = spec[dim] if dim < len(spec) else None
        axes = [a for a in ((entry,) if isinstance(entry, str) else entry or ()) if sizes.get(a, 1) > 1]
        split += axes
        name = names[dim] if dim < len(names) and names[dim] else str(size)
        dims.append("/".join([str(name), *axes]))
    return Argument(
        path=path, role=role, dtype=hlo_dtype(dtype), shape=shape, shard=shard,
        placed=f"{hlo_dtype(dtype)}[{', '.join(dims)}]", axes=tuple(split),
        stacked=names[0] == "layers" if names else len(shape) > 2,
        host=getattr(sharding, "memory_kind", None) == "pinned_host",
    )  # fmt: skip


def hlo_dtype(dtype: Any) -> str:
    """Returns a dtype in HLO's words.

    >>> hlo_dtype("bfloat16")
    'bf16'
    """
    name = jnp.dtype(dtype).name
    short = {"bool": "pred", "complex64": "c64", "complex128": "c128"}.get(name)
    short = short or name.replace("bfloat", "bf").replace("float", "f").replace("uint", "u")
    short = f"s{name[3:]}" if name.startswith("int") else short.replace("_", "")
    return short if short in BITS else name


def of_function(function: Any, args: tuple, kwargs: dict, *, roles: Sequence[str], mesh: Mesh | None) -> Subject:
    """Returns any jitted function, with the arguments it is called with, as a subject.

    Raises:
      JaxparError: If it is not jitted, or an argument's mesh is another's.
    """
    if not hasattr(function, "lower"):
        raise refuse(
            f"inspect({getattr(function, '__name__', function)!r:.60}, ...)",
            rule="jp.inspect takes a jitted function, or a step of jp.train_step",
            fix="jax.jit(f), with arguments that have shardings",
        )
    if isinstance(roles, str) or not isinstance(roles, Sequence):
        raise refuse(
            f"roles={roles!r:.60}", rule="roles are a tuple, one for each argument", fix='roles=("parameters",)'
        )
    if mesh is not None and not isinstance(mesh, Mesh):
        raise refuse(f"mesh={mesh!r:.60}", rule="a mesh is a jax.sharding.Mesh", fix="leave it out")
    for role in roles:
        if role not in ROLES:
            raise refuse(
                f"roles={tuple(roles)}", rule=f"a role is one of {', '.join(ROLES)}", fix='roles=("parameters",)'
            )
    if len(roles) > len(args):
        raise refuse(
            f"{len(roles)} roles for {len(args)} arguments", rule="one role for each argument", fix="fewer roles"
        )
    flat = jax.tree_util.tree_leaves_with_path((args, kwargs))
    found: list[Mesh] = [
        leaf.sharding.mesh for _, leaf in flat if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    ]
    if mesh is None and found:
        mesh = found[0]
    if mesh is None:
        mesh = Mesh([jax.devices()[0]], ("device",))
    if any(other.shape != mesh.shape or other.device_ids.tolist() != mesh.device_ids.tolist() for other in found):
        raise refuse(
            f"arguments on meshes {', '.join(sorted({str(dict(other.shape)) for other in [mesh, *found]}))}",
            rule="all arguments are on one mesh",
            fix="shard every argument over the same mesh",
        )
    title = getattr(function, "__name__", "program")
    whole = NamedSharding(mesh, PartitionSpec())
    with users_code(
        title, rule="the arguments are those that the function is called with", fix="the call it is made for"
    ):
        lowered = function.lower(*args, **kwargs)
    arguments = []
    for keys, leaf in flat:
        if not hasattr(leaf, "shape"):
            continue
        number = keys[1].idx if keys[0].idx == 0 else len(roles)
        role = roles[number] if number < len(roles) else "arguments"
        sharding = getattr(leaf, "sharding", None)
        path = "args" + jax.tree_util.keystr(keys[1:]) if keys[0].idx == 0 else jax.tree_util.keystr(keys[1:])
        arguments.append(argument(path, role, leaf, sharding if isinstance(sharding, NamedSharding) else whole))
    batch_axes = {axis for each in arguments if each.role == "batch" for axis in each.axes}
    return Subject(
        title=getattr(function, "__name__", "program"), lowered=lowered, mesh=mesh, arguments=tuple(arguments),
        batch_axes=tuple(axis for axis in mesh.axis_names if axis in batch_axes or axis in ("data", "fsdp")),
    )  # fmt: skip
