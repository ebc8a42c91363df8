"""The training state, which is initialized sharded: no device and no host buffer ever holds all of it."""

import dataclasses
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse, user_code_errors
from jaxpar.exchange.base import Replicas
from jaxpar.exchange.replica_mesh import piece_spec
from jaxpar.mesh.collective import ShardShape, Traffic, piece_dim
from jaxpar.optim.eval_params import eval_arrays, eval_params
from jaxpar.optim.step_inputs import check_parameter_tree, explain_static_arguments
from jaxpar.optim.wrappers import check_optimizer_type
from jaxpar.parallel.layout import Layout, trained_shards
from jaxpar.parallel.state_specs import model_state_specs, optimizer_specs, owner_path, stored_specs
from jaxpar.parallel.unsharded_arrays import check_optimizer_arrays
from jaxpar.sharding.names import Tree, format_path, shard_shape
from jaxpar.step.frozen_parameters import drop_paths, frozen_paths
from jaxpar.units import show_count

HOST = "pinned_host"  # the memory of offloaded optimizer state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class State:
    """Everything that training changes.

    Attributes:
      step: Number of steps so far; a step is one update, except in asynchronous pipelines. Shape [], int32.
      params: The parameters, float32 unless the model chooses another dtype.
      optimizer: The state of the optax chain.
      model_state: BatchNorm statistics, dropout keys and similar state.
      exchange: The state of the exchange between replicas; () if it has none.

    If replicas compute separately, dim 0 of `model_state` is `replica`, sharded over `data`; if their parameters
    differ, also that of `params` and `optimizer`.
    """

    step: jax.Array
    params: Tree
    optimizer: Any
    model_state: Tree
    exchange: Any = ()

    def __repr__(self) -> str:
        arrays = jax.tree.leaves(self.params)
        count = f"{show_count(sum(getattr(x, 'size', 0) for x in arrays))} parameters in {len(arrays)} arrays"
        if not isinstance(self.step, jax.Array) or isinstance(self.step, Tracer):
            return f"<state: {count}>"  # of shapes, shardings or specs, or inside of a traced function
        return f"<state: {'donated to a step' if self.step.is_deleted() else f'step {int(self.step)}'}, {count}>"

    @property
    def eval_params(self) -> Tree:
        """The parameters for evaluation, sampling and export: `params`, unless the optimizer's state defines others.

        `optax.contrib.schedule_free` does; see `jaxpar.optim.eval_params`.
        """
        return eval_params(eval_arrays_on_device(self.optimizer), self.params)


def eval_arrays_on_device(optimizer: object) -> dict[str, Any]:
    """Selects the arrays of an optimizer's state that define the parameters to evaluate; moves offloaded ones."""
    return jax.tree.map(_move_to_device, eval_arrays(optimizer))


def _move_to_device(x: jax.Array) -> jax.Array:
    """Moves an offloaded array to device memory; tracers are returned unchanged."""
    if isinstance(x, Tracer) or x.sharding.memory_kind != HOST:
        return x
    return jax.device_put(x, x.sharding.with_memory_kind("device"))


def check_seed(seed: int) -> int:
    """Returns a valid seed unchanged.

    Raises:
      JaxparError: If it is not an integer of 32 bits.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise refuse(f"seed={seed!r}", rule="a seed is a whole number of 32 bits", fix="seed=0")
    return seed


def initializer(layout: Layout, optimizer: optax.GradientTransformation):
    """Returns a pure function that maps a random key to the initial state."""
    check_optimizer_type(optimizer, f"optimizer={optimizer!r:.80}")

    def init(key) -> State:
        params, model_state = layout.blueprint.init(key)
        return state_from_params(layout, optimizer, params, model_state)

    return init


def state_from_params(
    layout: Layout, optimizer: optax.GradientTransformation, params: Tree, model_state: Tree
) -> State:
    """Builds the state at step 0 from parameters; all replicas start from them, with different random keys.

    Args:
      layout: Where arrays go.
      optimizer: Any optax chain.
      params: Parameters of one model.
      model_state: Model state of one model.
    """
    exchange = layout.parallel.exchange
    count = exchange.count(layout.sizes["data"])
    with (
        user_code_errors("the optimizer's init", rule="an optimizer is an optax chain", fix="optax.adamw(3e-4)"),
        explain_static_arguments(),
    ):
        state = State(jnp.zeros((), jnp.int32), params, optimizer.init(params), model_state)
        check_parameter_tree(state.optimizer)
    if not exchange.per_replica:
        return state
    replicate = _replicate if exchange.replicas_differ else lambda tree, _: tree
    replicas = exchange.begin(
        Replicas(
            params=replicate(params, count),
            opt_state=replicate(state.optimizer, count),
            model_state=replicate_model_state(layout, model_state),
            exchange_state=exchange.init(drop_paths(frozen_paths(layout, optimizer), params), count),
        )
    )
    return State(state.step, replicas.params, replicas.opt_state, replicas.model_state, replicas.exchange_state)


def replicate_model_state(layout: Layout, model_state: Tree) -> Tree:
    """Copies the model state for each replica, along a new dim 0, and makes the replicas' random keys differ.

    Replicas that train on the same examples get equal keys, so that each draws the numbers that it would draw alone.
    """
    exchange = layout.parallel.exchange
    salt = (lambda _: model_state) if exchange.same_examples else (lambda replica: fold_in_number(model_state, replica))
    return jax.vmap(salt)(jnp.arange(exchange.count(layout.sizes["data"])))


def fold_in_number(model_state: Tree, salt: jax.Array) -> Tree:
    """Folds a number into the random keys of a model state, such as those of dropout."""

    def fold(x):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        flat = jax.vmap(lambda key: jax.random.fold_in(key, salt))(x.reshape(-1))
        return flat.reshape(x.shape)

    return jax.tree.map(fold, model_state)


def _replicate(tree: Tree, count: int) -> Tree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)


def abstract(layout: Layout, optimizer: optax.GradientTransformation) -> State:
    """Returns the state as shapes and dtypes.

    Raises:
      JaxparError: If `layout` is not a Layout, or `optimizer` not an optax chain.
    """
    if not isinstance(layout, Layout):
        raise refuse(
            f"layout={layout!r:.80}",
            rule="a layout is what jp.compose returns",
            fix="jp.compose(model, jp.Parallel(data=8))",
        )
    initializer(layout, optimizer)  # refuses an unhashable value, before lru_cache hashes it
    return _abstract(layout, optimizer)


@lru_cache(maxsize=16)
def _abstract(layout: Layout, optimizer: optax.GradientTransformation) -> State:
    return jax.eval_shape(initializer(layout, optimizer), jax.random.key(0))


def specs(layout: Layout, state: State) -> State:
    """Returns a `PartitionSpec` for every array of a state.

    Raises:
      JaxparError: If an array above `replicate_above` stays whole where ZeRO should shard it.
    """
    exchange = layout.parallel.exchange
    params = stored_specs(layout)
    optimizer = optimizer_specs(
        layout, replica_shapes(state.optimizer) if exchange.replicas_differ else state.optimizer
    )
    model_state = model_state_specs(layout, state.model_state)
    exchange_specs = _exchange_specs(layout, state.exchange)
    optimizer = _add_data(optimizer) if exchange.replicas_differ else optimizer
    check_optimizer_arrays(layout, state.optimizer, optimizer, "optimizer state")
    check_optimizer_arrays(layout, state.exchange, exchange_specs, "the exchange's state")
    return State(
        step=PartitionSpec(),  # pyright: ignore[reportArgumentType]
        params=_add_data(params) if exchange.replicas_differ else params,
        optimizer=optimizer,
        model_state=_add_data(model_state) if exchange.per_replica else model_state,
        exchange=exchange_specs,
    )


def _exchange_specs(layout: Layout, own: Tree) -> Tree:
    """Returns specs of an exchange's state: those of the optimizer's arrays; `data` also splits per-replica arrays."""

    def is_per_replica(keys, leaf) -> bool:
        if format_path(keys[:1]) == "each":
            return True
        owner = owner_path(layout, keys)
        # a scalar parameter's own shape, (), also has no dims after dim 0
        return owner is not None and bool(leaf.shape) and leaf.shape[1:] == layout.placements[owner].leaf.shape

    def pieces(keys, leaf, spec: PartitionSpec) -> PartitionSpec:
        owner = owner_path(layout, keys)
        if format_path(keys[:1]) != "pieces" or owner is None:
            return spec
        dim = piece_dim(trained_shards(layout)[owner].shape, layout.sizes["data"])
        return spec if dim is None else piece_spec(spec, dim, leaf.ndim)

    flags = jax.tree_util.tree_map_with_path(is_per_replica, own)
    single = jax.tree.map(lambda leaf, flag: replica_shapes(leaf) if flag else leaf, own, flags)
    specs = jax.tree.map(lambda flag, spec: _add_data(spec) if flag else spec, flags, optimizer_specs(layout, single))
    return jax.tree_util.tree_map_with_path(pieces, own, specs)


def replica_shapes(tree: Tree) -> Tree:
    """Returns the shapes without dim 0, the replicas."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def optimizer_traffic(layout: Layout, state: State) -> tuple[Traffic, ...]:
    """Returns the traffic of optimizer states in an exchange between replicas that differ."""
    exchange, replicas = layout.parallel.exchange, layout.sizes["data"]
    if not exchange.replicas_differ or replicas == 1:
        return ()
    one_replica = replica_shapes(state.optimizer)
    specs = jax.tree.leaves(optimizer_specs(layout, one_replica), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    parts = {
        format_path(keys): ShardShape(shard_shape(leaf.shape, spec, layout.sizes), leaf.dtype, total_size=leaf.size)
        for (keys, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(one_replica), specs, strict=True)
    }
    return exchange.optimizer_traffic(parts, replicas)


def _add_data(specs: Tree) -> Tree:
    return jax.tree.map(
        lambda spec: PartitionSpec("data", *spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )


def shardings(layout: Layout, state: State, *, offload: bool = False) -> State:
    """Returns a sharding for every array of a state; with `offload`, the optimizer state is in host memory.

    Raises:
      JaxparError: If the backend has no pinned host memory.
    """
    if not isinstance(offload, bool):
        raise refuse(f"offload={offload!r}", rule="offload is True or False", fix="offload=True")
    result = jax.tree.map(layout.sharding, specs(layout, state), is_leaf=lambda x: isinstance(x, PartitionSpec))
    if not offload:
        return result
    device = layout.device_mesh.devices.flat[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if HOST not in kinds:
        raise refuse(
            f"offload on {device.device_kind}, whose memories are {', '.join(sorted(kinds))}",
            rule="optimizer state is offloaded to pinned host memory, where the backend has it",
            fix="offload = false; zero=1 or higher shards the optimizer state instead",
        )
    hosted = jax.tree.map(
        lambda leaf, place: place.with_memory_kind(HOST) if leaf.ndim else place,
        state.optimizer,
        result.optimizer,
    )
    return dataclasses.replace(result, optimizer=hosted)
