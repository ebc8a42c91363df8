"""The training state, born sharded: no device and no host buffer ever holds all of it."""

import dataclasses
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse, users_code
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Tree
from jaxpar.sharding.tracing import uncollected


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Everything that training changes.

    Attributes:
      step: Steps made so far, one update each but in pipelines without a flush. Shape [], int32.
      params: The parameters, float32 unless the model says otherwise.
      optimizer: The state of the optax chain.
      model_state: BatchNorm statistics, dropout keys and their kin.
    """

    step: jax.Array
    params: Tree
    optimizer: Any
    model_state: Tree


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
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise refuse(f"seed={seed!r}", rule="a seed is a whole number of 32 bits", fix="seed=0")
    with uncollected():
        placed = shardings(layout, abstract(layout, optimizer), offload=offload)
        made = jax.jit(initializer(layout, optimizer), out_shardings=placed, compiler_options=_quickly(layout))
        return made(jax.random.key(seed))


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
        with users_code("the optimizer's init", rule="an optimizer is an optax chain", fix="optax.adamw(3e-4)"):
            return State(jnp.zeros((), jnp.int32), params, optimizer.init(params), model_state)

    return init


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
    return State(
        step=PartitionSpec(),  # pyright: ignore[reportArgumentType]
        params=layout.stored,
        optimizer=layout.optimizer_specs(state.optimizer),
        model_state=jax.tree.map(lambda _: PartitionSpec(), state.model_state),
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
    if "pinned_host" not in kinds:
        raise refuse(
            f"offload on {device.device_kind}, whose memories are {', '.join(sorted(kinds))}",
            rule="optimizer state is offloaded to pinned host memory, where the backend has it",
            fix="offload = false; zero=1 or higher shards the optimizer state instead",
        )
    hosted = jax.tree.map(
        lambda leaf, on: on.with_memory_kind("pinned_host") if leaf.ndim else on, state.optimizer, placed.optimizer
    )
    return dataclasses.replace(placed, optimizer=hosted)
