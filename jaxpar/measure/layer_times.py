"""The layers of a model, measured one by one on one device, as a profile that `jaxpar partition` reads.

input ──► embedding ──► block 0, 1, ... ──► head and loss
                        the model marks its blocks with `jp.pipelined(layers, x)`; one of these equal blocks is measured

`Pieces` are these parts, each of which can run alone; `step/pipelined/split_model.py` splits the model likewise for the
stages of a mesh. Bytes are exact: those of a layer's output, and of the parameters that it reads; a tied embedding
table counts in both layers that read it. Times are measured: forward is the median of several runs of the compiled
layer, backward is the median of forward and backward together, less forward. Work and depth are counted in the jaxpr of
a forward pass: see `jaxpar.plan.model.work_depth`.
The format has one number for a layer's output and its residuals, so a plan's memory is that of remat = full.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.jaxprs.dataflow import Traced
from jaxpar.measure.record import where
from jaxpar.mesh.devices import is_simulated, visible_devices
from jaxpar.models.remat import remat
from jaxpar.models.stack import call_at_layers, intercept_layers
from jaxpar.parallel.compose import as_blueprint
from jaxpar.partition.chain import Node, Profile
from jaxpar.plan.model.work_depth import WorkDepth, work_depth
from jaxpar.sharding.names import Blueprint, Compute, Tree, nest
from jaxpar.sharding.nnx_hooks import step_hooks
from jaxpar.sharding.rules import name_stacks
from jaxpar.step.losses import as_sums
from jaxpar.step.numerics import Numerics
from jaxpar.step.stochastic_loss import traceable_loss
from jaxpar.units import show_bytes, show_count, show_seconds

LEAST, LONGEST = 5, 0.5  # runs of a piece; seconds that more of them may take


@dataclass(frozen=True, eq=False)
class Pieces:
    """A model and its loss in three parts; `inputs` is (model state other than parameters, batch).

    Attributes:
      blueprint: The model.
      loss: Maps (model, batch) to (sum, count), or to a dict of such pairs with the entry `loss`.
      compute: Dtype and remat of the model.
      count: Number of layers in its stack.
      stacked: Paths of the parameters with a leading dim of layers.
    """

    blueprint: Blueprint
    loss: Callable
    compute: Compute
    count: int
    stacked: frozenset[str]

    @staticmethod
    def from_model(model: object, loss: Callable, numerics: Numerics) -> "Pieces":
        """Splits a model, which has any form that `compose` takes.

        Raises:
          JaxparError: If it has no stack of equal layers, or several.
        """
        blueprint = as_blueprint(model)
        leaves = name_stacks(blueprint.leaves)
        stacked = {path: leaf for path, leaf in leaves.items() if leaf.names and leaf.names[0] == "layers"}
        counts = {leaf.shape[0] for leaf in stacked.values()}
        if len(counts) != 1:
            raise refuse(
                f"{blueprint.name} has {len(counts)} stacks of layers",
                rule="a model whose layers are measured has one stack of equal layers, between an embedding and a head",
                fix="parameters stacked along a dim 0 named layers, as Decoder and ViT have them",
            )
        compute = Compute(train=True, dtype=numerics.dtype, remat=numerics.remat)
        return Pieces(blueprint, traceable_loss(loss), compute, counts.pop(), frozenset(stacked))

    def arrays(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns the parameters outside of the stack, and those of one layer, all filled with 0.02."""
        values = {path: jnp.full(self._shape(path), 0.02, leaf.dtype) for path, leaf in self.blueprint.leaves.items()}
        shared = {path: value for path, value in values.items() if path not in self.stacked}
        return shared, {path: values[path] for path in self.stacked}

    def _shape(self, path: str) -> tuple[int, ...]:
        shape = self.blueprint.leaves[path].shape
        return (1, *shape[1:]) if path in self.stacked else shape

    def _called(self, params: Mapping[str, object], inputs: tuple[Tree, Mapping[str, object]]) -> Callable[[], Any]:
        model_state, batch = inputs
        leaves = {
            path: params[path] if path in params else jnp.zeros(self._shape(path), leaf.dtype)
            for path, leaf in self.blueprint.leaves.items()
        }
        dtype = self.compute.dtype

        def use(_: str, value: jax.Array) -> jax.Array:
            return value if dtype is None or not jnp.issubdtype(value.dtype, jnp.floating) else value.astype(dtype)

        tree = nest({tuple(path.split("/")): value for path, value in leaves.items()})
        model = self.blueprint.bind(tree, model_state, use, self.compute)
        return lambda: self.loss(model, batch)

    @step_hooks()
    def embed(self, shared: Mapping[str, object], inputs: tuple[Tree, Mapping[str, object]]) -> tuple[Any, tuple]:
        """Returns the input of the first layer, and the inputs that differ by layer."""
        result = call_at_layers(self._called(shared, inputs), lambda layers, x, per_layer: (x, per_layer))
        if result is None:
            raise refuse(
                f"{self.blueprint.name} never says where its layers are",
                rule="a model whose layers are measured calls jp.pipelined(layers, x) once",
                fix="x = jp.pipelined(layers, x) around the stack of equal layers; Decoder and ViT have it",
            )
        return result

    @step_hooks()
    def block(
        self,
        layer_params: Mapping[str, object],
        inputs: tuple[Tree, Mapping[str, object]],
        layer_inputs: tuple,
        x: object,
    ) -> Any:
        """Applies one layer to x."""

        def run(layer_params, x):
            return call_at_layers(self._called(layer_params, inputs), lambda layers, _, __: layers(x, *layer_inputs))

        return run(layer_params, x) if self.blueprint.takes_remat else remat(run, self.compute.remat)(layer_params, x)

    @step_hooks()
    def head(self, shared: Mapping[str, object], inputs: tuple[Tree, Mapping[str, object]], y: object) -> jax.Array:
        """Returns the loss for the output of the last layer."""
        with intercept_layers(lambda layers, x, per_layer: y):
            return as_sums(self._called(shared, inputs)(), accumulate=1)["loss"][0]


def layers(model: object, loss: Callable, batch: Mapping[str, Any], numerics: Numerics) -> dict[str, Any]:
    """Measures a model, prints its layers, and returns them with the devices and versions of the measurement.

    Args:
      model: As `compose` takes it.
      loss: Maps (model, batch) to (sum, count), or to a dict of such pairs with the entry `loss`.
      batch: Shapes of the minibatch of one device.
      numerics: Precision and remat of the model.

    Raises:
      JaxparError: If the devices are simulated, or the model does not mark its layers.
    """
    devices = visible_devices()
    if len(devices) > 1 and is_simulated(devices):
        raise refuse(
            f"{len(devices)} simulated devices",
            rule="times are measured on a device that is there; simulated ones share a processor",
            fix="a process with one device: without XLA_FLAGS=--xla_force_host_platform_device_count",
        )
    origin = where()
    rows = next(iter(batch.values())).shape[0]
    note = f"{rows} rows, {numerics.matmuls.compute}, remat {numerics.remat}; measured on one {devices[0].device_kind}"
    note += f" ({origin['machine']}), jax {jax.__version__}{', commit ' * bool(origin['commit'])}{origin['commit']}"
    profile = measure(model, loss, batch, numerics, note=note)
    print(f"Input: {note}; times measured, bytes exact")
    print("layer             forward  backward   activations    parameters       storage        work     depth")
    work = count_work(model, loss, batch, numerics)
    for node, layer_work in zip(profile.nodes[1:], work, strict=True):
        times = "".join(f"{show_seconds(ms / 1e3):>10}" for ms in (node.forward, node.backward))
        sizes = "".join(f"{show_bytes(size):>14}" for size in (node.activations, node.parameters, node.storage))
        print(f"{node.layer:<16}{times}{sizes}{show_count(layer_work.work):>12}{show_count(layer_work.depth):>10}")
    total = reduce(WorkDepth.then, work)
    print("Storage is w + f + grad w + grad o: parameters, activations, and a gradient of each")
    print(
        f"A forward pass: {'at least ' * total.unknown}{show_count(total.work)} operations, {show_count(total.depth)} "
        f"one after the other: an average parallelism of {show_count(round(total.parallelism))}"
    )
    if devices[0].platform == "cpu":
        print("These times are of this processor and say nothing about a GPU; the bytes hold on any.")
    return {"profile": profile, "work": work, "where": origin}


def measure(model: object, loss: Callable, batch: Mapping[str, Any], numerics: Numerics, *, note: str = "") -> Profile:
    """Measures a model and returns its profile; `note` is a note on the line of the input.

    Raises:
      JaxparError: If the model has no stack of equal layers, or does not mark it with `jp.pipelined`.
    """
    pieces = Pieces.from_model(model, loss, numerics)
    zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in batch.items()}
    inputs = (jax.jit(lambda key: pieces.blueprint.init(key)[1])(jax.random.key(0)), zeros)
    shared, layer_params = pieces.arrays()
    x, per_layer = jax.jit(pieces.embed)(shared, inputs)
    layer_inputs = jax.tree.map(lambda leaf: leaf[:1], per_layer)
    embed, block, head = _functions(pieces)
    nodes = [Node("node0", f"Input{': ' * bool(note)}{note}", 0.0, 0.0, _size(zeros), 0.0)]
    nodes.append(Node("node1", "Embedding", *_times(embed, 1, shared, inputs), _size(x), _read(embed, shared, inputs)))
    times, parameters = (
        _times(block, 2, layer_params, x, inputs, layer_inputs),
        _read(block, layer_params, x, inputs, layer_inputs),
    )
    for layer in range(pieces.count):
        nodes.append(Node(f"node{layer + 2}", f"Block {layer}", *times, _size(x), parameters))
    times, parameters = _times(head, 2, shared, x, inputs), _read(head, shared, x, inputs)
    size = _size(jax.eval_shape(head, shared, x, inputs))
    nodes.append(Node(f"node{pieces.count + 2}", "Head and loss", *times, size, parameters))
    names = [node.name for node in nodes]
    return Profile(tuple(nodes), tuple(pairwise(names)))


def count_work(model: object, loss: Callable, batch: Mapping[str, object], numerics: Numerics) -> list[WorkDepth]:
    """Returns the work and depth of each layer in a forward pass, in the order of `measure`; nothing is run."""
    pieces = Pieces.from_model(model, loss, numerics)
    embed, block, head = _functions(pieces)
    inputs = (jax.eval_shape(lambda key: pieces.blueprint.init(key)[1], jax.random.key(0)), dict(batch))
    shared, layer_params = jax.eval_shape(pieces.arrays)
    x, per_layer = jax.eval_shape(pieces.embed, shared, inputs)
    layer_inputs = jax.eval_shape(lambda per_layer: jax.tree.map(lambda leaf: leaf[:1], per_layer), per_layer)
    layer_work = work_depth(block, layer_params, x, inputs, layer_inputs)
    return [work_depth(embed, shared, inputs), *[layer_work] * pieces.count, work_depth(head, shared, x, inputs)]


def _functions(pieces: Pieces) -> tuple[Callable, Callable, Callable]:
    """Returns the functions embedding, block and head; the arguments to differentiate come first."""
    return (
        lambda shared, inputs: pieces.embed(shared, inputs)[0],
        lambda layer_params, x, inputs, layer_inputs: pieces.block(layer_params, inputs, layer_inputs, x),
        lambda shared, y, inputs: pieces.head(shared, inputs, y),
    )


def _times(function: Callable, count: int, *args: Any) -> tuple[float, float]:
    """Times a function in milliseconds: forward, and backward with gradients of the first `count` arguments."""

    def forward_and_backward(*args):
        y, pull = jax.vjp(lambda *inputs: function(*inputs, *args[count:]), *args[:count])
        return y, pull(jax.tree.map(jnp.ones_like, y))

    forward, total = (_milliseconds(jax.jit(run), args) for run in (function, forward_and_backward))
    return forward, max(0.0, total - forward)


def _milliseconds(run: Callable, args: tuple) -> float:
    jax.block_until_ready(run(*args))
    seconds: list[float] = []
    while len(seconds) < LEAST or (sum(seconds) < LONGEST and len(seconds) < 100):
        begin = time.perf_counter()
        jax.block_until_ready(run(*args))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) * 1e3


def _read(function: Callable, params: dict[str, jax.Array], *args: Any) -> float:
    """Returns the bytes of the parameters (the first argument) that a function reads."""
    reads = Traced(function, params, *args).reads()[0]
    return float(sum(leaf.nbytes for path, leaf in params.items() if reads[path]))


def _size(tree: Tree) -> float:
    return float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)))
