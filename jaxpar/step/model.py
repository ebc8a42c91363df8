"""`jp.model`: the user's own Flax model, with the parameters that a step evaluates, of a state or of a run folder.

    state ─► parameters to evaluate ─► global model of replicas ─► adapters merged ─► the user's module
             EMA, schedule-free        mean, anchor, center        W + alpha / rank A B

`jaxpar sample` reads the same parameters of a restored state: `eval_model`.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, Sharding

from jaxpar.errors import refuse
from jaxpar.exchange.base import NO_MODEL
from jaxpar.exchange.global_model import merge_replicas_of_model
from jaxpar.optim.eval_params import eval_params
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import merge_adapters, without_adapters
from jaxpar.sharding.names import Tree, format_path
from jaxpar.step.checks.input_state import check_matches_layout, check_not_donated
from jaxpar.step.state import State, eval_arrays_on_device


def model(
    layout: Layout | str | Path,
    state: State | None = None,
    *,
    device: Any = None,
    replica: int | None = None,
    parallel: Parallel | None = None,
    at: int | None = None,
    allow_import: bool = False,
) -> Any:
    """Returns the user's model with the parameters of a state, ready to predict.

        jp.model(layout, state)
        jp.model("runs/mine")          a run of `jaxpar train`, from its folder alone, on one device

    The parameters are those that `step.evaluate` uses: averages (`ema_params`, schedule-free optimizers), the global
    model of replicas that differ, and adapters merged into their matrices. The arrays are copies, so that a step may
    donate the state afterwards. The model computes in its own dtypes, not in the `precision` of a step.

    Args:
      layout: The layout of the state: the result of `jp.compose`, or `step.layout`. Or a run folder, or the address of
        one in a bucket: then there is no `state`, and the newest intact checkpoint is read.
      state: A state as a step returns it; `outcome.state` of `jp.fit`.
      device: The `jax.Device` of every array, or its `Sharding`, as in `jax.device_put`. By default each array is
        sharded as the layout stores it, so that no device needs the memory of the whole model; call the model inside
        `nnx.jit` or `jax.jit`, which then split the work.
      replica: The number of one replica, whose own copy is returned, if the replicas have different parameters. By
        default their global model, as in an evaluation: the mean, or the center or anchor of the exchange.

    Returns:
      For an NNX model the module that the function of `rngs` makes, in eval mode (`eval()`): dropout is off, and
      BatchNorm uses the statistics of the state. For a Linen model the module bound to its variables: it is called
      with the arguments of the module, such as `train=False`, and `module, variables = model.unbind()` takes it apart.

    Raises:
      JaxparError: If the state is of another layout or model, or was donated to a step; if its replicas are several
        models (as of the exchanges ensemble and population) and `replica` is None; or if the folder has no checkpoint
        of a run of `jaxpar train`.
    """
    if isinstance(layout, str | Path):
        _check_run_arguments(layout, state, replica)
        # imported by name: a job is of a package above this one
        load_model = import_module("jaxpar.job.run_weights").load_model
        return load_model(layout, parallel=parallel, at=at, device=device, allow_import=allow_import)
    _check_arguments(layout, state, device, for_runs={"parallel": parallel, "at": at, "allow_import": allow_import})
    if state is None:
        raise refuse(
            "jp.model of a layout without a state",
            rule="a model has the parameters of a state",
            fix="jp.model(layout, state), or jp.model('runs/mine') of a run folder",
        )
    check_not_donated(state)
    check_matches_layout(state, layout)
    _check_replica(layout, replica)
    params, model_state = eval_model(layout, state, replica=replica, copy=True)
    if device is not None:
        params, model_state = jax.tree.map(lambda x: _move(x, device), (params, model_state))
    return without_adapters(layout.blueprint).module(params, model_state)


def eval_model(layout: Layout, state: State, *, replica: int | None = None, copy: bool = False) -> tuple[Tree, Tree]:
    """Returns the parameters and the other state of the model to evaluate, sharded as the layout stores them.

    Args:
      layout: The layout of the state.
      state: A state.
      replica: The number of the replica to evaluate; None for the global model.
      copy: Whether no array may share memory with the state.
    """
    blueprint, exchange = layout.blueprint, layout.parallel.exchange
    averages = eval_arrays_on_device(state.optimizer)
    if not (copy or averages or exchange.per_replica or blueprint.base):
        return state.params, state.model_state

    def run(params: Tree, model_state: Tree, averages: Tree, exchange_state: Tree) -> tuple[Tree, Tree]:
        params = eval_params(averages, params)
        if replica is not None:
            params, model_state = jax.tree.map(lambda x: x[replica], (params, model_state))
        elif exchange.per_replica:
            params, model_state = merge_replicas_of_model(exchange, params, model_state, exchange_state)
        params = merge_adapters(blueprint, params) if blueprint.base else params
        return jax.tree.map(jnp.copy, (params, model_state))

    arguments = (state.params, state.model_state, averages, state.exchange)
    shapes = jax.eval_shape(run, *arguments)
    places = ({**layout.placements}, {**layout.other_state})
    shardings = jax.tree_util.tree_map_with_path(
        lambda keys, _: layout.sharding(places[keys[0].idx][format_path(keys[1:])].stored), shapes
    )
    # the caller may have set another mesh
    meshes = nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(layout.device_mesh)
    with meshes:
        return jax.jit(run, out_shardings=shardings)(*arguments)


def _move(x: jax.Array, device: Any) -> jax.Array:
    """Moves an array to a device; with several processes, all of them call this, each for a device of its own."""
    if isinstance(device, jax.Device) and not x.is_fully_addressable:
        replicated = jax.NamedSharding(x.sharding.mesh, PartitionSpec())  # pyright: ignore[reportAttributeAccessIssue]
        x = jax.jit(lambda x: x, out_shardings=replicated)(x).addressable_data(0)
    return jax.device_put(x, device)


def _check_run_arguments(folder: str | Path, state: object, replica: object) -> None:
    for name, value in (("state", state), ("replica", replica)):
        if value is not None:
            raise refuse(
                f"jp.model({str(folder)!r:.100}) with {name}={value!r:.80}",
                rule="a run folder has the state, and its replicas are read as one model",
                fix="jp.model(folder), or jp.model(layout, state) with the layout that the state was made with",
            )


def _check_arguments(layout: object, state: object, device: object, *, for_runs: Mapping[str, object]) -> None:
    if not isinstance(layout, Layout):
        raise refuse(
            f"jp.model with layout={layout!r:.80}",
            rule="a layout is what jp.compose returns, and what a step has",
            fix="jp.model(layout, state), or jp.model(step.layout, state)",
        )
    if given := [f"{name}={value!r:.80}" for name, value in for_runs.items() if value]:
        raise refuse(
            f"jp.model of a layout with {', '.join(given)}",
            rule="a layout and its state say where the arrays are, and of which step",
            fix="jp.model(layout, state), or jp.model('runs/mine', ...) of a run folder",
        )
    if isinstance(getattr(state, "state", None), State):
        raise refuse(
            f"jp.model with state={state!r:.80}",
            rule="the result of a run has its last state",
            fix="jp.model(layout, outcome.state)",
        )
    if device is not None and not isinstance(device, jax.Device | Sharding):
        raise refuse(
            f"jp.model with device={device!r:.80}",
            rule="the arrays go to one device, or are sharded as one sharding says",
            fix="device=jax.devices()[0]; without device= they stay where the layout stores them",
        )


def _check_replica(layout: Layout, replica: object) -> None:
    exchange = layout.parallel.exchange
    count = exchange.count(layout.sizes["data"]) if exchange.replicas_differ else 0
    if replica is None and exchange.replicas_differ and exchange.global_model == NO_MODEL:
        raise refuse(
            f"jp.model for replicas of exchange {exchange.name!r}, which are several models",
            rule="one model is returned",
            fix=f"replica=0, or another number below {count}",
        )
    if replica is None or (type(replica) is int and 0 <= replica < count):
        return
    raise refuse(
        f"jp.model with replica={replica!r:.60}",
        rule=f"replica is a number from 0 to {count - 1}" if count else "replicas here have equal parameters",
        fix="replica=0" if count else "jp.model(layout, state)",
    )
