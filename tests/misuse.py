"""Models, losses and data as careless users write them: each is wrong in one way, and named for it."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jaxpar as jp
from jaxpar.models.layer_stack import stack

X = np.random.default_rng(0).random((16, 64), np.float32)
Y = (np.arange(16) % 10).astype(np.int32)
BATCH = {"inputs": X, "labels": Y}
number = 5


class Pair(NamedTuple):
    inputs: np.ndarray
    labels: np.ndarray


@dataclass
class Example:
    inputs: np.ndarray
    labels: np.ndarray


class Net(nnx.Module):
    def __init__(self, width=16, *, rngs):
        self.a = nnx.Linear(64, width, rngs=rngs)
        self.b = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


class Lin(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(self.width)(x)))


class NeedsSize(nnx.Module):
    def __init__(self, size, *, rngs):
        self.a = nnx.Linear(size, 10, rngs=rngs)


class RaisesWhenMade(nnx.Module):
    def __init__(self, *, rngs):
        raise RuntimeError("no such weights")


class RaisesWhenCalled(Net):
    def __call__(self, x):
        raise NotImplementedError("to do")


class WrongWidth(Net):
    def __call__(self, x):
        return self.b(x)


class Dropped(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x):
        return self.dropout(super().__call__(x))


class WrongSpec(Net):
    def __call__(self, x):
        return super().__call__(jax.lax.with_sharding_constraint(x, jax.P("dta")))


class KeepsItsInputs(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.last = nnx.Variable(jnp.zeros((64,)))

    def __call__(self, x):
        self.last.set_value(x)
        return super().__call__(x)


class Averaging(Net):
    def __call__(self, x):
        return jax.lax.pmean(super().__call__(x), "batch")


class InNumpy(Net):
    def __call__(self, x):
        return super().__call__(np.asarray(x))


class NoParameters(nnx.Module):
    def __init__(self, *, rngs):
        pass

    def __call__(self, x):
        return x[:, :10]


class IntegerParameter(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.steps = nnx.Param(jnp.zeros((8,), jnp.int32))


class EmptyParameter(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.empty = nnx.Param(jnp.zeros((0, 4)))


class OverAnnotated(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.w = nnx.Param(jnp.ones((64, 10)), out_sharding=("embed", "mlp", "heads"))


class OptimizerSplit(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.w = nnx.Param(jnp.ones((64, 10)), out_sharding=("embed", "mlp"), optimizer_sharding=("mlp", "embed"))


class GroupedNorm(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.norm = nnx.BatchNorm(64, axis_name="batch", axis_index_groups=[[0, 1]], rngs=rngs)

    def __call__(self, x):
        return super().__call__(self.norm(x))


class ArrayAttribute(Net):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.table = (jnp.arange(10.0),)

    def __call__(self, x):
        return super().__call__(x) * self.table[0]


class WrongConstrain(Net):
    def __call__(self, x):
        return super().__call__(jp.constrain(x, "batch", "seq", "embed"))


class Piped(nnx.Module):
    """The right one of those that a pipeline cannot cut."""

    def __init__(self, layers=4, *, rngs):
        self.a = nnx.Linear(64, 16, rngs=rngs)
        self.blocks = stack(lambda rngs: self.block(rngs), layers, rngs)
        self.b = nnx.Linear(16, 10, rngs=rngs)

    def block(self, rngs):
        return Block(rngs=rngs)

    def layers(self, x):
        graph, params = nnx.split(self.blocks)
        return jax.lax.scan(lambda x, one: (nnx.merge(graph, one)(x), None), x, params)[0]

    def __call__(self, x):
        return self.b(jp.pipelined(self.layers, self.a(x)))


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (16, 16)), out_sharding=("embed", None))

    def __call__(self, x):
        return x + nnx.relu(x @ self.w[...])


class Uncut(Piped):
    def __call__(self, x):
        return self.b(self.layers(self.a(x)))


class CutTwice(Piped):
    def __call__(self, x):
        x = jp.pipelined(self.layers, self.a(x))
        return self.b(jp.pipelined(self.layers, x))


class ReadsOutside(Piped):
    def layers(self, x):
        return super().layers(x) + self.a.bias[...]


class ReadsItsLayersAfter(Piped):
    def __call__(self, x):
        return super().__call__(x) + self.blocks.w[...].sum()


class NarrowsInside(Piped):
    def layers(self, x):
        return super().layers(x)[:, :8]

    def __call__(self, x):
        x = jp.pipelined(self.layers, self.a(x))
        return self.b(jnp.pad(x, ((0, 0), (0, 16 - x.shape[1]))))


class ScalesByState(Piped):
    def layers(self, x):
        return super().layers(x) * self.scale

    def __call__(self, x):
        x = self.a(x)
        self.scale = x.mean()
        return self.b(jp.pipelined(self.layers, x))


class Normed(Piped):
    def __init__(self, layers=4, *, rngs):
        super().__init__(layers, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x):
        return self.b(jp.pipelined(self.layers, self.norm(self.a(x))))


class NormedInside(Piped):
    def block(self, rngs):
        return NormedBlock(rngs=rngs)

    def layers(self, x):
        graph, params, model_state = nnx.split(self.blocks, nnx.Param, ...)

        def one(x, each):
            block = nnx.merge(graph, *each)
            return block(x), nnx.state(block, nnx.BatchStat)

        x, stats = jax.lax.scan(one, x, (params, model_state))
        nnx.update(self.blocks, stats)
        return x


class NormedBlock(Block):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x):
        return super().__call__(self.norm(x))


def returns_none(rngs):
    return None


def losses(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["labels"])


def mean(model, batch):
    return losses(model, batch).mean()


def vector(model, batch):
    return losses(model, batch)


def without_loss(model, batch):
    return {"lss": (losses(model, batch).sum(), 16)}


def mean_and_aux(model, batch):
    return losses(model, batch).mean(), {"accuracy": 1.0}


def mean_and_metrics(model, batch):
    loss, hits = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["labels"]).mean(), 0.5
    return loss, {"accuracy": jnp.float32(hits)}


def chain(update):
    return optax.GradientTransformation(
        lambda params: (), lambda gradients, state, params=None: update(gradients, state)
    )


def mean_and_logits(model, batch):
    return losses(model, batch).mean(), model(batch["inputs"])


def not_called(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(jnp.exp(model), batch["labels"])


def without_model(model, batch):
    return batch["inputs"].sum(), 16


def swapped(batch, model):
    return losses(model, batch)


def applied(model, batch):
    return model.apply({"params": model.params}, batch["inputs"]).mean()


def of_four(model, batch, key, step):
    return losses(model, batch).mean()


def wrong_key(model, batch):
    return batch["label"]


def averaged(model, batch):
    return jax.lax.pmean(jnp.sum(losses(model, batch)), "batch"), 1


def raises(model, batch):
    raise RuntimeError("no luck")


def python_if(model, batch):
    total = losses(model, batch).sum()
    return total if total > 0 else -total


def whole_number(model, batch):
    return losses(model, batch).sum().astype(jnp.int32), 16


def takes_names(model, batch):
    return {"loss": (losses(model, batch).sum(), 16), "tokens": (jnp.ones(()), 1)}


def sums(model, batch):
    return losses(model, batch).sum(), 16


def batches():
    while True:
        yield BATCH


once = batches()
few = [BATCH]


def not_dicts():
    while True:
        yield X, Y


def strings():
    while True:
        yield {"inputs": X, "labels": np.array(["a"] * 16)}


def ragged():
    while True:
        yield {"inputs": [[1.0], [1.0, 2.0]] * 8, "labels": Y}


def half_a_batch():
    while True:
        yield {"inputs": X[:8], "labels": Y[:8]}


def breaks():
    raise OSError("the disk is gone")
    yield


def needs_path(path):
    yield path


class Source:
    fingerprint = "x"

    def batch(self, step):
        return BATCH


source = Source()
