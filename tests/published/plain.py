"""A training loop of Flax, optax and `jax.jit` alone, on one device: what any layout of an example is compared with."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import optax
from flax import nnx
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict

import jaxpar as jp
from jaxpar.step.stochastic_loss import with_key
from published import EXAMPLES
from published.example import Example

STEPS = 3


class Called:
    """A Linen module with its variables, called as `module.apply` is; `training` and `sown` are what jaxpar adds."""

    training = True

    def __init__(self, example: Example, params: Any, rest: Any):
        streams = ("dropout", *example.streams)
        rngs = {name: jax.random.key(0) for name in ("params", *streams)}
        inputs = example.inputs(example.numbers())
        with nnx.use_eager_sharding(False):  # of NNX modules inside: names of dims are no axes of a mesh
            made = meta.unbox(jax.eval_shape(lambda: example.module.init(rngs, *inputs, **example.options)))
        made.pop("intermediates", None)
        made.pop("params_axes", None)  # names of dims, and no array
        self.apply, self.streams = example.module.apply, streams
        self.held = _filled(made, {"params": params, **rest["collections"]})
        self.key, self.calls, self.sown = rest["key"], 0, {}

    def __call__(self, *args, **kwargs):
        key = jax.random.fold_in(self.key, self.calls)
        self.calls += 1
        rngs = {name: jax.random.fold_in(key, i) for i, name in enumerate(self.streams)}
        lasting = [name for name in self.held if name != "params"]
        with nnx.use_eager_sharding(False):
            out, written = self.apply(self.held, *args, mutable=[*lasting, "intermediates"], rngs=rngs, **kwargs)
        self.sown = {"intermediates": written.pop("intermediates", {})}
        self.held = {**self.held, **written}
        return out

    def after(self):
        rest = {name: tree for name, tree in meta.unbox(self.held).items() if name != "params"}
        return {"collections": _split(rest), "key": jax.random.fold_in(self.key, 0x7FFF)}


def _filled(made, values):
    """Returns a tree like `made`, whose names may have a "/" where jaxpar's tree goes one deeper."""
    values = {"/".join(path): value for path, value in flatten_dict(values).items()}
    return unflatten_dict({path: values["/".join(path)] for path in flatten_dict(made)})


def _split(tree):
    flat = flatten_dict(tree, keep_empty_nodes=True)
    return unflatten_dict({tuple("/".join(path).split("/")): value for path, value in flat.items()})


class Merged:
    """An NNX module with the values of its variables."""

    def __init__(self, example: Example, params: Any, rest: Any):
        with nnx.use_eager_sharding(False):
            self.model = (example.plain or example.module)(rngs=nnx.Rngs(0))
        for path, variable in nnx.to_flat_state(nnx.state(self.model)):
            found = params if isinstance(variable, nnx.Param) else rest
            for word in path:
                found = found[str(word)]
            variable.set_value(found)

    def after(self):
        return _plain(nnx.state(self.model, nnx.Not(nnx.Param)))


def _plain(state):
    return unflatten_dict({tuple(map(str, path)): each.get_value() for path, each in nnx.to_flat_state(state)})


@cache
def plainly(name: str) -> tuple[list[float], Any, Any]:
    """Returns the losses of some steps on one batch, and parameters and other state after them."""
    return in_turns(EXAMPLES[name], ((EXAMPLES[name].loss, EXAMPLES[name].optimizer),))


def in_turns(example: Example, turns: Sequence[tuple[Any, optax.GradientTransformation]]) -> tuple:
    """Returns likewise what several losses make of one model, each with its optimizer and a turn in every step."""
    first = jp.init_state(jp.compose(example.model, jp.Parallel(), jax.devices()[:1]), optax.identity())
    params, rest = first.params, first.model_state
    steps = [_step(example, *turn) for turn in turns]
    kept = [optimizer.init(params) for _, optimizer in turns]
    losses = []
    for number in range(STEPS):
        for turn, step in enumerate(steps):
            value, params, rest, kept[turn] = step(params, rest, kept[turn], number)
            losses.append(float(value))
    return losses, jax.device_get(params), rest


def _step(example: Example, loss: Any, optimizer: optax.GradientTransformation) -> Any:
    batch = example.numbers()

    def mean(params, rest, key):
        made = Called(example, params, rest) if example.linen else Merged(example, params, rest)
        found = with_key(loss, key)(made if example.linen else made.model, batch)
        total, count = found["loss"] if isinstance(found, dict) else found
        return total / count, made.after()

    @jax.jit
    def step(params, rest, kept, number):
        key = jax.random.fold_in(jax.random.key(0), number)
        # the axis of a `pmap` over one device: some models average over it
        over = jax.vmap(jax.value_and_grad(mean, has_aux=True), (None, None, None), axis_size=1, axis_name="batch")
        (value, rest), gradients = jax.tree.map(lambda x: x[0], over(params, rest, key))
        updates, kept = optimizer.update(gradients, kept, params)
        return value, optax.apply_updates(params, updates), rest, kept

    return step
