"""`jp.init_state`: the state at step 0, initialized from a seed or from given parameters."""

from collections.abc import Mapping
from contextlib import nullcontext

import jax
import optax

from jaxpar.parallel.layout import Layout
from jaxpar.step.compiler import pause_gc
from jaxpar.step.state import State, abstract, check_seed, initializer, shardings


def init_state(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    *,
    seed: int = 0,
    offload: bool = False,
    params: Mapping[str, object] | None = None,
) -> State:
    """Initializes the state at step 0, each array on the devices that store it.

    The values depend only on the seed and on `params`, never on the layout.

    Args:
      layout: Where arrays go.
      optimizer: Any optax chain.
      seed: Seed of the initial parameters and of dropout.
      offload: Whether to place the optimizer state in host memory.
      params: Parameters to start from, nested or by path (`layers/0/kernel`): arrays, or the result of
        `jp.from_huggingface`, of which each device reads its own shard. None initializes all of them, and None for a
        path that one; adapters are always initialized.

    Raises:
      JaxparError: If the layout has no devices, offload is set on a backend without host memory, or `params` are not
        those of the model; the message has all that are missing, unexpected or of another shape.
    """
    check_seed(seed)
    # the caller may have set another mesh
    meshes = nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(layout.device_mesh)
    abstract_state = abstract(layout, optimizer)
    with pause_gc(), meshes:
        if params is not None:
            from jaxpar.step.initial_params import split_params, start_from_params  # not in a plain start

            given, fresh = split_params(layout, params)
            return start_from_params(layout, optimizer, given, fresh=fresh, seed=seed, offload=offload)
        state_shardings = shardings(layout, abstract_state, offload=offload)
        initialize = jax.jit(
            initializer(layout, optimizer), out_shardings=state_shardings, compiler_options=_fast_options(layout)
        )
        return initialize(jax.random.key(seed))


def _fast_options(layout: Layout) -> dict[str, str] | None:
    """Returns compiler options for a program that runs once: on CPUs, where compiling is slowest, less optimization."""
    if layout.device_mesh.devices.flat[0].platform != "cpu" or jax.config.values["jax_disable_most_optimizations"]:
        return None
    return {"xla_backend_optimization_level": "1"}
