"""Asynchronous training on a virtual clock: a table says which gradients each update applies. *Simulated*.

`run` has parameter servers, and `run_elastic` elastic averaging (EASGD), where each worker has its own parameters:

    update ─► its gradients, each at the parameter versions that its worker read ─► weighted mean ─► optimizer ─► next
    gradient at the worker's parameters ─► if it syncs: worker and center move towards each other ─► update

Losses and parameters are those of a real asynchronous run with this table; times come from the table. The gradients of
all workers are computed one after the other on the devices of one worker. A version of a server's parameters stays in
memory until the last gradient that reads it is computed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import refuse
from jaxpar.exchange.base import flatten_by_path
from jaxpar.exchange.clock.base import Push, Update
from jaxpar.exchange.clock.parameter_servers import LocalStep
from jaxpar.optim.eval_params import eval_arrays
from jaxpar.step.init_state import init_state
from jaxpar.step.state import State, fold_in_number
from jaxpar.step.step import Step

Flat = dict[str, jax.Array]
Examples = Callable[[int], Mapping[str, Any]]


def run(
    step: Step, updates: Sequence[Update], examples: Examples, report: Callable[[Update, float], None], *, seed: int = 0
) -> State:
    """Returns the state after all updates. Its `optimizer` is still the initial state: each shard has its own state.

    Args:
      step: A step with one worker's layout, which computes the gradients.
      updates: The updates, ordered by time.
      examples: Returns the batch of a share, given its number.
      report: Called after every update with the mean loss of its gradients.
      seed: Seed of the initial parameters.

    Raises:
      JaxparError: If there are more shards than parameter arrays, or evaluation uses parameters from the optimizer's
        state, as with schedule_free.
    """
    rule = "here each shard has its own optimizer state, and the trained parameters are evaluated"
    state = _first_state(step, seed, rule)
    server = _Server(step.optimizer, flatten_by_path(state.params)[0], updates)
    structure = jax.tree.structure(state.params)
    workers = {push.worker for update in updates for push in update.pushes}
    model_states = dict.fromkeys(workers, state.model_state)
    if len(workers) > 1:
        model_states = {worker: fold_in_number(state.model_state, jnp.uint32(worker)) for worker in workers}
    gradients: dict[int, _Gradient] = {}
    for update in updates:
        for push in update.pushes:
            if push.share not in gradients:
                params = structure.unflatten(server.read(push))
                tree, sums, model_states[push.worker] = step.compute_gradients(
                    params, model_states[push.worker], examples(push.share)
                )
                total, count = sums["loss"]
                gradients[push.share] = _Gradient(flatten_by_path(tree)[0], float(total), float(count), server.shards)
        pushed = [gradients[push.share] for push in update.pushes]
        server.update(update, pushed)
        report(
            update, sum(gradient.loss for gradient in pushed) / max(sum(gradient.count for gradient in pushed), 1e-30)
        )
        for push in update.pushes:
            gradients[push.share].pending_shards -= 1
            if not gradients[push.share].pending_shards:
                del gradients[push.share]
    params = structure.unflatten(server.newest())
    return replace(
        state, params=params, model_state=model_states[min(model_states)] if model_states else state.model_state
    )


def _first_state(step: Step, seed: int, rule: str) -> State:
    state = init_state(step.layout, step.optimizer, seed=seed)
    if eval_arrays(state.optimizer):
        raise refuse(
            "a virtual clock with an optimizer that computes other parameters for evaluation, such as schedule_free",
            rule=rule,
            fix="an optimizer whose trained parameters are evaluated, such as adamw",
        )
    return state


@dataclass
class _Gradient:
    """A computed gradient, the sum and count of its loss, and the number of shards that have not applied it yet."""

    arrays: Flat
    loss: float
    count: float
    pending_shards: int


class _Server:
    """The sharded parameters, an optimizer state per shard, and the older versions that gradients still need."""

    def __init__(self, optimizer: optax.GradientTransformation, params: Flat, updates: Sequence[Update]):
        self.shards = max((update.shard for update in updates), default=0) + 1
        self.order = list(params)
        if self.shards > len(params):
            raise refuse(
                f"{self.shards} shards of a model of {len(params)} parameters",
                rule="each shard of a parameter server has a parameter",
                fix=f"{len(params)} shards or fewer",
            )
        self.paths = split_by_size({path: x.size for path, x in params.items()}, self.shards)
        reads = {push.share: push for update in updates for push in update.pushes}.values()
        self._readers = Counter((shard, version) for push in reads for shard, version in enumerate(push.versions))
        self._held = {(shard, 0): {path: params[path] for path in paths} for shard, paths in enumerate(self.paths)}
        self._newest = [0] * self.shards
        self._optimizer = [optimizer.init(self._held[shard, 0]) for shard in range(self.shards)]

        @jax.jit
        def apply(params: Flat, state: optax.OptState, gradients: Flat) -> tuple[Flat, Any]:
            changes, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, changes), state  # pyright: ignore[reportReturnType]

        self._apply = apply

    def read(self, push: Push) -> list[jax.Array]:
        """Returns the parameters at the versions that a worker read, one version per shard, in the model's order."""
        params: Flat = {}
        for shard, version in enumerate(push.versions):
            params |= self._held[shard, version]
            self._readers[shard, version] -= 1
            self._forget(shard, version)
        return [params[path] for path in self.order]

    def update(self, update: Update, gradients: Sequence[_Gradient]) -> None:
        """Updates one shard with the mean of gradients, weighted by their token counts."""
        shard, paths = update.shard, self.paths[update.shard]
        tokens = sum(gradient.count for gradient in gradients)
        shares = [jnp.float32(gradient.count / tokens if tokens else 0.0) for gradient in gradients]
        mean = _weighted_sum(shares, [{path: gradient.arrays[path] for path in paths} for gradient in gradients])
        version = self._newest[shard]
        params, self._optimizer[shard] = self._apply(self._held[shard, version], self._optimizer[shard], mean)
        self._newest[shard], self._held[shard, version + 1] = version + 1, params
        self._forget(shard, version)

    def newest(self) -> list[jax.Array]:
        """Returns the newest parameters of all shards, in the model's order."""
        params: Flat = {}
        for shard, version in enumerate(self._newest):
            params |= self._held[shard, version]
        return [params[path] for path in self.order]

    def _forget(self, shard: int, version: int) -> None:
        if version < self._newest[shard] and self._readers[shard, version] <= 0:
            self._held.pop((shard, version), None)


def split_by_size(sizes: Mapping[str, int], shards: int) -> list[list[str]]:
    """Returns the paths of each shard: each parameter, largest first, goes to the shard with the fewest elements.

    >>> split_by_size({"a": 5, "b": 3, "c": 2}, 2)
    [['a'], ['b', 'c']]
    """
    paths: list[list[str]] = [[] for _ in range(shards)]
    filled = [0] * shards
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        shard = filled.index(min(filled))
        paths[shard].append(path)
        filled[shard] += sizes[path]
    return paths


@jax.jit
def _scale(share: jax.Array, gradient: Flat) -> Flat:
    return jax.tree.map(lambda x: (share * x).astype(x.dtype), gradient)


@jax.jit
def _add_scaled(share: jax.Array, gradient: Flat, total: Flat) -> Flat:
    return jax.tree.map(lambda x, y: y + (share * x).astype(x.dtype), gradient, total)


def _weighted_sum(shares: Sequence[jax.Array], gradients: Sequence[Flat]) -> Flat:
    """Returns a weighted sum. It adds one gradient at a time, so two compiled programs suffice for any number."""
    total = _scale(shares[0], gradients[0])
    for share, gradient in zip(shares[1:], gradients[1:], strict=True):
        total = _add_scaled(share, gradient, total)
    return total


def run_elastic(
    step: Step,
    table: Sequence[LocalStep],
    alpha: float,
    examples: Callable[[int], Mapping[str, Any]],
    report: Callable[[LocalStep, float], None],
    *,
    seed: int = 0,
) -> State:
    """Returns the state after all steps: the center's parameters, and the rest of the last worker's state.

    Args:
      step: A step with one worker's layout, which computes the gradients.
      table: Local steps in the order in which they begin.
      alpha: Fraction of their difference by which the worker and the center each move at a sync.
      examples: Returns the batch of a share, given its number.
      report: Called after every local step with its mean loss.
      seed: Seed of the initial parameters.

    Raises:
      JaxparError: If evaluation uses parameters from the optimizer's state, as with schedule_free.
    """
    rule = "here each worker has its own optimizer state, and the center's parameters are evaluated"
    state = _first_state(step, seed, rule)
    names = sorted({local_step.worker for local_step in table})
    workers = {
        name: replace(
            state, model_state=fold_in_number(state.model_state, jnp.uint32(name)) if names[1:] else state.model_state
        )
        for name in names
    }
    center = state.params

    @jax.jit
    def synchronize(params: object, center: object) -> tuple[Any, Any]:
        shift = jax.tree.map(lambda x, c: alpha * (x - c), params, center)
        return jax.tree.map(jnp.subtract, params, shift), jax.tree.map(jnp.add, center, shift)

    @jax.jit
    def update(params: Any, optimizer: Any, gradients: Any) -> tuple[Any, Any]:
        changes, optimizer = step.optimizer.update(gradients, optimizer, params)
        return optax.apply_updates(params, changes), optimizer  # pyright: ignore[reportReturnType]

    for local_step in table:
        state = workers[local_step.worker]
        tree, sums, model_state = step.compute_gradients(state.params, state.model_state, examples(local_step.share))
        total, count = sums["loss"]
        params = state.params
        if local_step.meets:
            params, center = synchronize(params, center)
        params, optimizer = update(params, state.optimizer, tree)
        state = replace(state, params=params, optimizer=optimizer, model_state=model_state)
        workers[local_step.worker] = state
        report(local_step, float(total) / max(float(count), 1e-30))
    return replace(state, params=center)
