"""The training state, born sharded: no device and no host buffer ever holds all of it."""

import dataclasses
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse, users_code
from jaxpar.exchange.base import Replicas
from jaxpar.exchange.between import in_pieces
from jaxpar.exchange.part import Part, piece_dim
from jaxpar.exchange.sent import Sent
from jaxpar.optim.eval_params import eval_params, held_for
from jaxpar.optim.injected import naming_static_arguments
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Tree, path_of
from jaxpar.sharding.shard_bytes import shard_shape
from jaxpar.sharding.tracing import uncollected
from jaxpar.step.parameters.frozen import frozen, without

HOST = "pinned_host"  # the memory of offloaded optimizer state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Everything that training changes.

    Attributes:
      step: Steps made so far, one update each but in pipelines without a flush. Shape [], int32.
      params: The parameters, float32 unless the model says otherwise.
      optimizer: The state of the optax chain.
      model_state: BatchNorm statistics, dropout keys and their kin.
      exchange: The state of the exchange between replicas; () where it has none.

    Where replicas step apart, `model_state` has a leading dim `replica`, split over `data`; where they differ,
    `params` and `optimizer` have it too.
    """

    step: jax.Array
    params: Tree
    optimizer: Any
    model_state: Tree
    exchange: Any = ()

    @property
    def eval_params(self) -> Tree:
        """The parameters that a run is evaluated, sampled and exported with: `params`, unless the optimizer says else.

        With `optax.contrib.schedule_free` they are others; see `jaxpar.optim.eval_params`.
        """
        return eval_params(jax.tree.map(_on_device, held_for(self.optimizer)), self.params)


def _on_device(x: jax.Array) -> jax.Array:
    """Returns an array that may be offloaded in the memory of its devices; in a trace it is left where it is."""
    if isinstance(x, Tracer) or x.sharding.memory_kind != HOST:
        return x
    return jax.device_put(x, x.sharding.with_memory_kind("device"))


def init_state(
    layout: Layout, optimizer: optax.GradientTransformation, *, seed: int = 0, offload: bool = False
) -> State:
    """Returns the state at step 0, every array made on the devices that keep it.

    The numbers depend on the seed alone, never on the layout.

    Args:
      layout: Where arrays go.
      optimizer: Any optax chain.
      seed: Of the initial parameters and of dropout.
      offload: Keep the optimizer state in host memory.

    Raises:
      JaxparError: If the layout has no devices, or offload is asked where the backend has no host memory.
    """
    checked_seed(seed)
    # a mesh that the caller has set is not the layout's
    meshes = nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(layout.on)
    with uncollected(), meshes:
        placed = shardings(layout, abstract(layout, optimizer), offload=offload)
        made = jax.jit(initializer(layout, optimizer), out_shardings=placed, compiler_options=_quickly(layout))
        return made(jax.random.key(seed))


def checked_seed(seed: int) -> int:
    """Returns a seed that is one.

    Raises:
      JaxparError: If it is none.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise refuse(f"seed={seed!r}", rule="a seed is a whole number of 32 bits", fix="seed=0")
    return seed


def _quickly(layout: Layout) -> dict[str, str] | None:
    """Returns how to compile what runs once: on a processor, where that takes longer than all the rest of a start."""
    if layout.on.devices.flat[0].platform != "cpu" or jax.config.values["jax_disable_most_optimizations"]:
        return None
    return {"xla_backend_optimization_level": "1"}


def initializer(layout: Layout, optimizer: optax.GradientTransformation):
    """Returns the pure function of a key that makes the state."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise refuse(f"optimizer={optimizer!r:.80}", rule="an optimizer is an optax chain", fix="optax.adamw(3e-4)")

    def init(key) -> State:
        params, model_state = layout.blueprint.init(key)
        return begun(layout, optimizer, params, model_state)

    return init


def begun(layout: Layout, optimizer: optax.GradientTransformation, params: Tree, model_state: Tree) -> State:
    """Returns the state at step 0 with these parameters: all replicas begin with them, each with its own random keys.

    Args:
      layout: Where arrays go.
      optimizer: Any optax chain.
      params: Of one model.
      model_state: Of one model.
    """
    exchange = layout.parallel.exchange
    count = exchange.count(layout.sizes["data"])
    with (
        users_code("the optimizer's init", rule="an optimizer is an optax chain", fix="optax.adamw(3e-4)"),
        naming_static_arguments(),
    ):
        state = State(jnp.zeros((), jnp.int32), params, optimizer.init(params), model_state)
    if not exchange.apart:
        return state
    copied = _copies if exchange.differ else lambda tree, _: tree
    begun = exchange.begin(
        Replicas(
            params=copied(params, count),
            optimizer=copied(state.optimizer, count),
            model_state=of_each(layout, model_state),
            own=exchange.init(without(frozen(layout, optimizer), params), count),
        )
    )
    return State(state.step, begun.params, begun.optimizer, begun.model_state, begun.own)


def of_each(layout: Layout, model_state: Tree) -> Tree:
    """Returns the state of a model as that of each replica, [replica, ...]: their random keys differ.

    Those of replicas that see the same examples do not: each draws what it would draw alone.
    """
    exchange = layout.parallel.exchange
    one = (lambda _: model_state) if exchange.same_examples else (lambda replica: salted(model_state, replica))
    return jax.vmap(one)(jnp.arange(exchange.count(layout.sizes["data"])))


def salted(model_state: Tree, salt: jax.Array) -> Tree:
    """Returns the random keys of a model's state, such as those of dropout, made different by a number."""

    def fold(x):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        flat = jax.vmap(lambda key: jax.random.fold_in(key, salt))(x.reshape(-1))
        return flat.reshape(x.shape)

    return jax.tree.map(fold, model_state)


def _copies(tree: Tree, count: int) -> Tree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)


def abstract(layout: Layout, optimizer: optax.GradientTransformation) -> State:
    """Returns the state as shapes and dtypes.

    Raises:
      JaxparError: If the layout is no layout, or the optimizer no optax chain.
    """
    if not isinstance(layout, Layout):
        raise refuse(
            f"layout={layout!r:.80}",
            rule="a layout is what jp.compose returns",
            fix="jp.compose(model, jp.Parallel(data=8))",
        )
    initializer(layout, optimizer)  # refuses what cannot be hashed
    return _abstract(layout, optimizer)


@lru_cache(maxsize=16)
def _abstract(layout: Layout, optimizer: optax.GradientTransformation) -> State:
    return jax.eval_shape(initializer(layout, optimizer), jax.random.key(0))


def specs(layout: Layout, state: State) -> State:
    """Returns a `PartitionSpec` for every array of a state."""
    exchange = layout.parallel.exchange
    params = layout.stored
    optimizer = layout.optimizer_specs(of_one_replica(state.optimizer) if exchange.differ else state.optimizer)
    model_state = layout.other_specs(state.model_state)
    return State(
        step=PartitionSpec(),  # pyright: ignore[reportArgumentType]
        params=_over_data(params) if exchange.differ else params,
        optimizer=_over_data(optimizer) if exchange.differ else optimizer,
        model_state=_over_data(model_state) if exchange.apart else model_state,
        exchange=_exchange_specs(layout, state.exchange),
    )


def _exchange_specs(layout: Layout, own: Tree) -> Tree:
    """Returns where an exchange's own arrays go: as the optimizer's do, those of each replica over `data` besides."""

    def each(keys, leaf) -> bool:
        if path_of(keys[:1]) == "each":
            return True
        owner = layout.owner(keys)
        return owner is not None and tuple(leaf.shape[1:]) == layout.placements[owner].leaf.shape

    def pieces(keys, leaf, spec: PartitionSpec) -> PartitionSpec:
        owner = layout.owner(keys)
        if path_of(keys[:1]) != "pieces" or owner is None:
            return spec
        dim = piece_dim(layout.parts[owner].shape, layout.sizes["data"])
        return spec if dim is None else in_pieces(spec, dim, leaf.ndim)

    apart = jax.tree_util.tree_map_with_path(each, own)
    one = jax.tree.map(lambda leaf, alone: of_one_replica(leaf) if alone else leaf, own, apart)
    specs = jax.tree.map(lambda alone, spec: _over_data(spec) if alone else spec, apart, layout.optimizer_specs(one))
    return jax.tree_util.tree_map_with_path(pieces, own, specs)


def of_one_replica(tree: Tree) -> Tree:
    """Returns the shapes of one replica, without the dim of replicas."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def sent(layout: Layout, state: State) -> tuple[Sent, ...]:
    """Returns what replicas that differ send each other of their optimizers' states."""
    exchange, replicas = layout.parallel.exchange, layout.sizes["data"]
    if not exchange.differ or replicas == 1:
        return ()
    one = of_one_replica(state.optimizer)
    specs = jax.tree.leaves(layout.optimizer_specs(one), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    held = {
        path_of(keys): Part(shard_shape(leaf.shape, spec, layout.sizes), leaf.dtype, whole=leaf.size)
        for (keys, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(one), specs, strict=True)
    }
    return exchange.sends_held(held, replicas)


def _over_data(specs: Tree) -> Tree:
    """Returns specs with a dim of replicas before the others, split over `data`."""
    return jax.tree.map(
        lambda spec: PartitionSpec("data", *spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )


def shardings(layout: Layout, state: State, *, offload: bool = False) -> State:
    """Returns a sharding for every array of a state; with `offload`, the optimizer's in host memory.

    Raises:
      JaxparError: If the backend has no host memory of its own.
    """
    if not isinstance(offload, bool):
        raise refuse(f"offload={offload!r}", rule="offload is True or False", fix="offload=True")
    placed = jax.tree.map(layout.sharding, specs(layout, state), is_leaf=lambda x: isinstance(x, PartitionSpec))
    if not offload:
        return placed
    device = layout.on.devices.flat[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if HOST not in kinds:
        raise refuse(
            f"offload on {device.device_kind}, whose memories are {', '.join(sorted(kinds))}",
            rule="optimizer state is offloaded to pinned host memory, where the backend has it",
            fix="offload = false; zero=1 or higher shards the optimizer state instead",
        )
    hosted = jax.tree.map(
        lambda leaf, on: on.with_memory_kind(HOST) if leaf.ndim else on, state.optimizer, placed.optimizer
    )
    return dataclasses.replace(placed, optimizer=hosted)
