"""Dense layers before and between those with experts: `experts.dense_layers` and `experts.every`.

    dense_layers = 1, every = 3      0 1 2 | 3 4 5 | 6 7       (layer 2 has experts, and 5)
    dense_layers = 3, every = 3      0 1 2 | 3 4 5 | 6 7       (layer 5 has experts)
                                     first   groups  rest

Layers before the first group are a list, which runs before the stack: in a pipeline on the first stage. A group has
every - 1 dense layers and one with experts. Experts' layers are one stack, the dense ones of groups and rest another,
and a loop over groups takes from both.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.errors import refuse
from jaxpar.models.cache import KVCache
from jaxpar.models.layer_stack import cached_layer, check_stage, run_stack, stack
from jaxpar.models.layers import Block, BlockConfig, LayerKind
from jaxpar.models.mixture import LayerInputs
from jaxpar.models.remat import remat
from jaxpar.models.stack import is_intercepted, pipelined

Run = Callable[[Any, Any], Any]  # (carry, values of one layer) to the carry


@dataclass(frozen=True)
class LayerOrder:
    """The layers of a decoder in their order.

    Attributes:
      layers: Number of layers.
      first: Dense layers before the first group.
      every: Layers of a group, of which the last has experts.
      groups: Number of groups.
    """

    layers: int
    first: int
    every: int
    groups: int

    @classmethod
    def from_numbers(cls, with_experts: range, layers: int) -> "LayerOrder":
        """The order in which the layers of these numbers have experts."""
        first = with_experts[0] + 1 - with_experts.step
        return cls(layers, first, with_experts.step, len(with_experts))

    @property
    def dense(self) -> list[int]:
        """Numbers of the dense layers after the first."""
        return [i for i in range(self.first, self.layers) if not self._has_experts(i - self.first)]

    @property
    def experts(self) -> range:
        """Numbers of the layers with experts."""
        return range(self.first + self.every - 1, self.first + self.groups * self.every, self.every)

    def _has_experts(self, place: int) -> bool:
        return place % self.every == self.every - 1

    def period(self, kinds: Sequence[object]) -> int:
        """Layers until both the kind of attention and the place in a group repeat."""
        return math.lcm(self.every, len(kinds))

    def alternate(
        self, dense: Callable[[Any], Run], experts: Callable[[Any], Run], kinds: Sequence[object]
    ) -> list[Run]:
        """Returns the functions of the layers of one period, from the first group on."""
        return [
            (experts if self._has_experts(i) else dense)(kinds[(self.first + i) % len(kinds)])
            for i in range(self.period(kinds))
        ]


@dataclass(frozen=True)
class DenseAndExpertLayers:
    """Dense layers, and layers with experts.

    Attributes:
      order: Their order.
      first: The dense layers before the first group.
      dense: Stack of the other dense layers, or None.
      experts: Stack of the layers with experts.
      kinds: Kinds of attention of all layers, repeated.
    """

    order: LayerOrder
    first: Sequence[Block]
    dense: nnx.Module | None
    experts: nnx.Module
    kinds: Sequence[LayerKind]

    def run(self, stream: dict, keys: jax.Array | None, inputs: LayerInputs, *, policy: str, scan: bool) -> dict:
        """Applies all layers to a stream, as `run_stack` does.

        Args:
          stream: The stream of `MixtureBlock`.
          keys: Dropout keys of all layers, or None.
          inputs: Inputs of the layers with experts.
          policy: Remat policy.
          scan: Compile one group for all groups.

        Raises:
          JaxparError: If stages of a pipeline would differ.
        """
        order, kinds = self.order, self.kinds
        for i, block in enumerate(self.first):
            graph, params = nnx.split(block)
            run = remat(partial(_dense_layer, graph, kinds[i % len(kinds)]), policy)
            stream = run(stream, (params, None if keys is None else keys[i]))
        if self.dense is None:
            stack_kinds = [kinds[(order.first + i) % len(kinds)] for i in range(len(kinds))]
            return run_stack(self.experts, stream, inputs, policy=policy, scan=scan, kinds=stack_kinds)
        graphs, params = zip(nnx.split(self.dense), nnx.split(self.experts), strict=True)
        dense_keys = None if keys is None else keys[jnp.array(order.dense)]

        def layers(stream, dense_keys, inputs):
            parts = (params[0], dense_keys), (params[1], inputs)
            _check_stage(parts, order, kinds)
            loops = _count_loops(parts[1], order.every, order.period(kinds)) if scan else 0
            prevent_cse = loops * order.period(kinds) < _count_layers(parts)
            runs = order.alternate(
                lambda kind: remat(partial(_dense_layer, graphs[0], kind), policy, prevent_cse=prevent_cse),
                lambda kind: remat(partial(_expert_layer, graphs[1], kind), policy, prevent_cse=prevent_cse),
                kinds,
            )
            return _run_groups(runs, stream, parts, order.every, loops)

        return pipelined(layers, stream, dense_keys, inputs)

    def run_cached(self, x: jax.Array, cache: KVCache, positions: jax.Array) -> tuple[jax.Array, KVCache]:
        """Applies all layers with a KV cache, as `jaxpar.models.layer_stack.run_cached` does."""
        order, kinds = self.order, self.kinds
        carry = (x, cache.keys, cache.values)
        for i, block in enumerate(self.first):
            graph, params = nnx.split(block)
            carry = cached_layer(graph, positions, kinds[i % len(kinds)], carry, (params, jnp.array(i)))
        graph, params = nnx.split(self.experts)
        experts = params, jnp.array(order.experts)
        dense_graph, dense_params = (None, None) if self.dense is None else nnx.split(self.dense)
        dense = dense_params, jnp.array(order.dense, int)
        runs = order.alternate(
            lambda kind: partial(cached_layer, dense_graph, positions, kind),
            lambda kind: partial(cached_layer, graph, positions, kind),
            kinds,
        )
        loops = _count_loops(experts, order.every, len(runs))
        x, keys, values = _run_groups(runs, carry, (dense, experts), order.every, loops)
        return x, KVCache(keys, values, cache.length)


def make_dense_layers(
    shape: BlockConfig, with_experts: range, layers: int, *, rngs: nnx.Rngs
) -> tuple[nnx.List | None, nnx.Module | None]:
    """Makes the dense layers of a decoder: a list of those before the first group, and a stack of the others."""
    order = LayerOrder.from_numbers(with_experts, layers)
    first = nnx.List([Block(shape, rngs=rngs) for _ in range(order.first)]) if order.first else None
    count = len(order.dense)
    return first, stack(lambda rngs: Block(shape, rngs=rngs), count, rngs) if count else None


def _dense_layer(graph: Any, kind: LayerKind, stream: dict, params_and_key: tuple[Any, jax.Array | None]) -> dict:
    params, key = params_and_key
    block: Any = nnx.merge(graph, params)
    arrays = {name: value for name, value in stream.items() if name != "router"}
    return block.run_stream(arrays, key, kind) | {"router": stream["router"]}


def _expert_layer(graph: Any, kind: LayerKind, stream: dict, params_and_inputs: tuple[Any, LayerInputs]) -> dict:
    params, inputs = params_and_inputs
    block: Any = nnx.merge(graph, params)
    return block.run_stream(stream, inputs, kind)


def _run_groups(runs: Sequence[Run], carry: object, parts: tuple[Any, Any], every: int, loops: int) -> Any:
    """Runs layers in order: `loops` periods in a loop, and those that are left over.

    Args:
      runs: The functions of the layers of a period.
      carry: The input of the first layer.
      parts: Values of dense layers, and of layers with experts. Leading dims: their numbers.
      every: Layers of a group.
      loops: Periods in the loop.
    """
    period = len(runs)
    groups = period // every

    def body(carry, parts):
        return _run_layers(runs, carry, parts, every, range(period)), None

    if loops:
        sizes = period - groups, groups
        looped = [jax.tree.map(partial(_fold_leaf, loops, size), part) for size, part in zip(sizes, parts, strict=True)]
        carry, _ = jax.lax.scan(body, carry, tuple(looped))
    return _run_layers(runs, carry, parts, every, range(loops * period, _count_layers(parts)))


def _fold_leaf(loops: int, size: int, leaf: jax.Array) -> jax.Array:
    looped = leaf if loops * size == leaf.shape[0] else leaf[: loops * size]
    return looped.reshape(loops, size, *leaf.shape[1:])


def _run_layers(runs: Sequence[Run], carry: object, parts: tuple[Any, Any], every: int, numbers: range) -> Any:
    for i in numbers:
        group, place = divmod(i, every)
        row = group if place == every - 1 else i - group
        part = parts[place == every - 1]
        carry = runs[i % len(runs)](carry, jax.tree.map(lambda leaf, row=row: leaf[row], part))
    return carry


def _count(part: object) -> int:
    leaves = jax.tree.leaves(part)
    return leaves[0].shape[0] if leaves else 0


def _count_layers(parts: tuple[Any, Any]) -> int:
    return _count(parts[0]) + _count(parts[1])


def _count_loops(experts: object, every: int, period: int) -> int:
    return _count(experts) * every // period


def _check_stage(parts: tuple[Any, Any], order: LayerOrder, kinds: Sequence[LayerKind]) -> None:
    dense, groups = map(_count, parts)
    if is_intercepted() and dense != groups * (order.every - 1):
        raise refuse(
            f"a pipeline of {groups} layers with experts and {dense} dense ones, experts.every = {order.every}",
            rule="every stage of a pipeline has whole groups of layers: every - 1 dense ones, then one with experts",
            fix=f"layers = {order.first + order.groups * order.every}, or pipe=1",
        )
    check_stage(_count_layers(parts), order.period(kinds))
