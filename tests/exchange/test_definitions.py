"""Each exchange computes what its definition says: beside a few lines of numpy, each a line that could be wrong."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.checkpoint.saved_replicas import convert
from jaxpar.exchange.base import Replicas
from jaxpar.exchange.clock.base import Constant, WorkerTimes
from jaxpar.exchange.clock.methods import Stale
from jaxpar.exchange.compressed.two_phases import exchange_codes
from jaxpar.exchange.replica_mesh import ReplicaMesh
from jaxpar.parallel.techniques.ring_attention.ring import RingDevices, to_heads, to_tokens
from jaxpar.train import virtual_clock
from jaxpar.train.noise import GradientNoise

RNG = np.random.default_rng(0)


class Linear(nnx.Module):
    """Its loss is a product with the parameters: the gradient of an example is the example."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.zeros(16))

    def __call__(self, x):
        return x @ self.w[...]


def loss(model, batch):
    return jnp.sum(model(batch["x"]) * batch["mask"]), jnp.sum(batch["mask"])


def replicas(count):
    """Returns where replicas of a parameter `w` meet."""
    return ReplicaMesh(
        mesh=jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)), specs={"w": P()}
    )


def test_asynchronous_workers_pay_for_the_way_there_and_back():
    made = Stale(bound=None).updates(1, 3, WorkerTimes(law=Constant(), compute=1.0, travel=0.25))
    assert [each.seconds for each in made] == [1.5, 3.0, 4.5]


def test_a_server_weighs_gradients_by_their_tokens():
    step = jp.train_step(jp.compose(Linear, jp.Parallel(), jax.devices()[:1]), loss, optax.sgd(1.0))
    x, masks = RNG.normal(size=(2, 4, 16)).astype(np.float32), np.float32([[1, 1, 1, 1], [1, 0, 0, 0]])
    share = lambda number: {"x": x[number], "mask": masks[number]}  # noqa: E731
    state = virtual_clock.run(step, Stale(bound=0).updates(2, 1, WorkerTimes(law=Constant())), share, lambda *_: None)
    mean = (x * masks[..., None]).sum((0, 1)) / masks.sum()
    np.testing.assert_allclose(state.params["w"], -mean, rtol=1e-5)


@dataclass(frozen=True)
class Noisy:
    """A code that adds a random number to each element."""

    block: int = 4
    shared_key = False

    def encode(self, rows, key):
        return {"code": rows + jax.random.uniform(key, rows.shape)}

    def encode_mean(self, rows, key, replicas, came):
        return self.encode(rows, key)

    def without_padding(self, code, counts):
        return code

    def decode(self, code):
        return code["code"]


def coded(step, lost=None, pieces=None):
    gradients = {"w": np.zeros((4, 16), np.float32)}
    lost = {"w": np.zeros((4, 16), np.float32)} if lost is None else lost
    pieces = {"w": np.zeros(16, np.float32)} if pieces is None else pieces
    run = jax.jit(lambda step: exchange_codes(Noisy(), gradients, lost, pieces, {"w": 0}, replicas(4), step))
    return jax.device_get(run(jnp.int32(step)))


def test_replicas_and_steps_draw_apart():
    _, missed, _ = coded(0)
    drawn = -missed["w"]
    assert len(np.unique(drawn)) == drawn.size  # of no two replicas the same
    assert not np.isin(-coded(1)[1]["w"], drawn).any()  # of no two steps


def test_what_either_code_loses_is_remembered():
    """Sent and remembered together are what there was: the gradients' mean, and what was remembered before."""
    lost, pieces = RNG.normal(size=(4, 16)).astype(np.float32), RNG.normal(size=16).astype(np.float32)
    found, missed, missing = coded(0, {"w": lost}, {"w": pieces})
    np.testing.assert_allclose(
        found["w"] + missed["w"].mean(0) + missing["w"], lost.mean(0) + pieces, atol=1e-5
    )  # the mean of gradients of zero, and both memories


def test_places_that_all_draw_are_those_of_the_mean_and_lose_nothing_more():
    """Of a share of an eighth the noise is 7 times the square; of places drawn apart, and again, 7 + 56 / replicas."""
    exchange = jp.Exchange("randomk", share=0.125, feedback=False, block=16, smallest=8)
    given = np.stack([RNG.normal(size=64).astype(np.float32)] * 4)
    between = replicas(4)
    run = jax.jit(lambda step: exchange_codes(exchange, {"w": given}, {}, {}, {"w": 0}, between, step)[0]["w"])
    found = np.stack([run(jnp.int32(step)) for step in range(200)])
    kept = found != 0
    assert {*kept.reshape(-1, 16).sum(-1)} == {2}
    np.testing.assert_allclose(found[kept], np.broadcast_to(given[0] * 8, found.shape)[kept], rtol=1e-6)
    assert 6 < ((found - given[0]) ** 2).sum(-1).mean() / (given[0] ** 2).sum() < 8  # 1 / share - 1 = 7


@pytest.mark.nightly
def test_ternary_codes_have_more_noise_than_their_papers_as_the_mean_is_coded_again():
    given = np.stack([RNG.normal(size=2**14).astype(np.float32)] * 8)
    code, between = jp.Exchange("ternary", smallest=8), replicas(8)
    run = jax.jit(lambda step: exchange_codes(code, {"w": given}, {}, {}, {"w": 0}, between, step)[0]["w"])
    noise = lambda found: ((found - given[0]) ** 2).sum() / (given[0] ** 2).sum()  # noqa: E731
    assert np.mean([noise(run(jnp.int32(step))) for step in range(5)]) == pytest.approx(1.8, rel=0.15)
    each = [code.decode(code.encode(jnp.asarray(given[:1]), jax.random.key(i)))[0] for i in range(8)]
    assert noise(np.mean(each, axis=0)) == pytest.approx(0.22, rel=0.15)


def test_noise_of_gradients_weighs_parts_by_their_tokens():
    step = jp.train_step(jp.compose(Linear, jp.Parallel(data=4), jax.devices()[:4]), loss, optax.sgd(0.1))
    x, mask = RNG.normal(size=(16, 16)).astype(np.float32), np.float32([1] * 7 + [0] * 5 + [1] * 3 + [0])
    found = step.part_norm(jp.init_state(step.layout, step.optimizer), {"x": x, "mask": mask})
    parts = (x * mask[:, None]).reshape(4, 4, 16).sum(1)  # of each the gradient of its summed loss
    counts = mask.reshape(4, 4).sum(1)
    np.testing.assert_allclose(found, np.sqrt((parts**2).sum(1).mean()) / counts.mean(), rtol=1e-5)


def test_a_noise_scale_is_nine_tenths_of_what_was_before():
    after = GradientNoise(signal=1.0, trace=10.0).smoothed_with(GradientNoise(signal=2.0, trace=30.0))
    assert (after.signal, after.trace) == pytest.approx((1.9, 28.0))


def met(exchange, params, own=()):
    """Returns replicas' parameters and the exchange's own state after a meeting."""

    def agreed(params, own):
        made = exchange.synchronize(
            Replicas(params=params, opt_state=(), exchange_state=own), replicas(len(params["w"]))
        )
        return made.params, made.exchange_state

    return jax.device_get(jax.jit(agreed)({"w": jnp.asarray(params)}, own))


def test_in_an_exponential_graph_each_hears_those_before_it():
    w = RNG.normal(size=(8, 4)).astype(np.float32)
    found, _ = met(jp.Exchange("gossip", graph="exponential"), w)
    want = [np.mean([w[(each - back) % 8] for back in (0, 1, 2, 4)], axis=0) for each in range(8)]
    np.testing.assert_allclose(found["w"], want, rtol=1e-5)


def test_elastic_averaging_draws_both_to_where_the_other_was():
    """Equations 5 and 6 of arXiv:1412.6651, whose beta is the number of replicas times alpha."""
    w, center, alpha, beta = RNG.normal(size=(4, 4)).astype(np.float32), np.zeros(4, np.float32), 0.2, 0.7
    exchange = jp.Exchange("easgd", alpha=alpha, beta=beta)
    for _ in range(2):
        found, own = met(exchange, w, {"center": {"w": jnp.asarray(center)}})
        w, center = w - alpha * (w - center), (1 - beta) * center + beta * w.mean(0)
        np.testing.assert_allclose(found["w"], w, rtol=1e-5)
        np.testing.assert_allclose(own["center"]["w"], center, rtol=1e-5)


def test_replicas_that_come_of_others_draw_apart():
    mesh = replicas(2).mesh
    want = jax.ShapeDtypeStruct((2,), jax.random.key(0).dtype, sharding=jax.sharding.NamedSharding(mesh, P("data")))
    found = convert({"key": jnp.stack([jax.random.key(3)] * 4)}, {"key": want}, "mean")["key"]
    first, second = jax.random.key_data(found)
    assert (first != second).any()


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "copies", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_heads_come_back_as_the_gradient_of_their_tokens(copies):
    """`to_heads` is the transpose of `to_tokens`: of copies of a head the gradient is the sum."""
    ways = RingDevices(ring=1, ulysses=4)
    mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    x = RNG.normal(size=(2, 8, 4 // copies, 3)).astype(np.float32)
    y = RNG.normal(size=(2, 8, 4, 3)).astype(np.float32)  # all tokens of each device's one head
    tokens, heads = P(None, "context"), P(None, None, "context")
    run = partial(jax.shard_map, mesh=mesh, check_vma=False)
    there = run(lambda x: to_tokens(x, ways, copies), in_specs=tokens, out_specs=heads)(x)
    back = run(lambda y: to_heads(y, ways, copies), in_specs=heads, out_specs=tokens)(y)
    np.testing.assert_allclose(np.vdot(there, y), np.vdot(x, back), rtol=1e-4)
    np.testing.assert_allclose(there, x.repeat(copies, axis=2), rtol=1e-6)
