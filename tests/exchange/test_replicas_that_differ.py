"""Replicas that differ: identities between the ways in which they meet, and what travels when they do."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util
from test_seams_exchange import CHAIN, alone, batch, born, composed, loss, over_data, rows_of, sums_of
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.exchange.averaging import gossip, streaming
from jaxpar.exchange.averaging.fragments import fragments
from jaxpar.exchange.replica_mesh import ReplicaMesh
from jaxpar.mesh.collective import ShardShape
from jaxpar.parallel.layout import replica_messages, trained_shards

WHOLE = {"data": 4, "fsdp": 2}
SGD = optax.sgd(0.1)


def every_token(step):
    """A batch of which each replica counts as many examples."""
    return batch(step) | {"mask": np.ones(16, np.float32)}


def trained(exchange, steps=6, *, sizes=WHOLE, optimizer=CHAIN, rows=batch):
    layout = composed(sizes, exchange)
    state, step, losses = jp.init_state(layout, optimizer), jp.train_step(layout, loss, optimizer), []
    for i in range(steps):
        state, metrics = step(state, rows(i))
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_equal_bits(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


# identities


class Scaled(nnx.Module):
    """A complex matrix, and a scalar."""

    def __init__(self, rngs):
        self.turn = nnx.Param(0.3 * jax.random.normal(rngs.params(), (8, 8), jnp.complex64))
        self.scale = nnx.Param(jnp.array(1.0))

    def __call__(self, x):
        return self.scale[...] * jnp.abs(x @ self.turn[...])


def squares(model, batch):
    errors = jnp.square(model(batch["x"]) - 1)
    return errors.sum(), errors.size


def scaled(exchange):
    numbers = np.random.default_rng(0)
    layout = jp.compose(Scaled, jp.Parallel(data=8, exchange=exchange))
    state, step = jp.init_state(layout, SGD), jp.train_step(layout, squares, SGD)
    for _ in range(2):
        state, _ = step(state, {"x": numbers.normal(size=(16, 8)).astype(np.float32)})
    return layout, state


SYNCHRONIZED = {
    "local": jp.Exchange("local", every=1),
    "diloco": jp.Exchange("diloco", every=1, lr=1.0, momentum=0.0),
    "streaming": jp.Exchange("streaming", every=1, lr=1.0, momentum=0.0, fragments=1),
}


@pytest.mark.parametrize("name", SYNCHRONIZED)
def test_complex_and_scalar_parameters_synchronize(name):
    _, state = scaled(SYNCHRONIZED[name])
    _, expected = scaled(jp.Exchange("all_reduce"))
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(ours, np.broadcast_to(theirs, ours.shape), atol=1e-6)


def test_a_model_of_replicas_has_the_mean_of_complex_parameters():
    layout, state = scaled(jp.Exchange("gossip"))
    model = jp.model(layout, state)
    np.testing.assert_allclose(model.turn[...], np.mean(state.params["turn"], axis=0), atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [WHOLE, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_the_mean_after_every_step_of_sgd_is_a_synchronous_step(sizes):
    state, losses = trained(jp.Exchange("local", every=1), optimizer=SGD, rows=every_token, sizes=sizes)
    same, expected = trained(jp.Exchange("all_reduce"), optimizer=SGD, rows=every_token, sizes=sizes)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert_same_arrays([x[0] for x in jax.tree.leaves(state.params)], jax.tree.leaves(same.params), 1e-6)


@pytest.mark.nightly
def test_diloco_that_goes_all_the_way_is_local():
    local = trained(jp.Exchange("local", every=3))
    diloco = trained(jp.Exchange("diloco", every=3, lr=1.0, momentum=0.0))
    assert diloco[1] == local[1]
    assert_equal_bits(diloco[0].params, local[0].params)


@pytest.mark.nightly
def test_an_elastic_center_that_draws_nobody_is_an_ensemble():
    elastic, ensemble = trained(jp.Exchange("easgd", every=2, alpha=0.0)), trained(jp.Exchange("ensemble"))
    assert elastic[1] == ensemble[1]
    assert_equal_bits(elastic[0].params, ensemble[0].params)


@pytest.mark.nightly
def test_gossip_of_all_with_all_is_local():
    matrix = np.full((4, 4), 1 / 4)
    gossip, losses = trained(jp.Exchange("gossip", every=2, graph=matrix))
    local, expected = trained(jp.Exchange("local", every=2))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert_same_arrays(gossip.params, local.params, 1e-6)


class Weighed(nnx.Module):
    """Its loss is linear, so that the gradient of an example is the example."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.zeros(8))

    def __call__(self, x):
        return x @ self.w[...]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("exchange", "same"),
    [
        (jp.Exchange("local", every=1), jp.Exchange("all_reduce")),
        (jp.Exchange("gossip", every=2, graph=np.full((4, 4), 1 / 4)), jp.Exchange("local", every=2)),
    ],
    ids=["local every step is sync", "gossip of all is local"],
)
def test_where_nothing_is_rounded_identities_hold_to_the_bit(exchange, same):
    """Of whole numbers, and powers of two that divide them: float32 adds these exactly, in any order."""
    found = []
    for each in (exchange, same):
        layout = jp.compose(Weighed, jp.Parallel(data=4, exchange=each), jax.devices()[:4])
        sgd = optax.sgd(2**-3)
        step = jp.train_step(layout, lambda model, batch: (jnp.sum(model(batch["x"])), len(batch["x"])), sgd)
        state = jp.init_state(layout, sgd)
        for i in range(4):
            x = np.random.default_rng(i).integers(-64, 64, (16, 8)).astype(np.float32)
            state, _ = step(state, {"x": x})
        (w,) = jax.tree.leaves(jax.device_get(state.params))
        found.append(np.broadcast_to(w, (4, 8)))
    assert np.abs(found[0]).max() > 1
    np.testing.assert_array_equal(*found)


# each beside its equations in plain JAX, replica by replica


def by_hand(meet, steps=6, replicas=4, every=2):
    """Replicas one after the other on one device; `meet` takes and returns (their parameters, own state)."""
    each, kept, own, losses = [born()] * replicas, [CHAIN.init(born())] * replicas, None, []
    for i in range(steps):
        made = [alone(each[r], kept[r], rows_of(i, r, replicas)) for r in range(replicas)]
        each, kept, sums = ([*column] for column in zip(*made, strict=True))
        losses.append(float(sum(total for total, _ in sums) / sum(count for _, count in sums)))
        if (i + 1) % every == 0:
            each, own = meet(each, own)
    return jax.tree.map(lambda *x: jnp.stack(x), *each), losses


def mean(each):
    return jax.tree.map(lambda *x: sum(x) / len(x), *each)


def nesterov(each, own):
    anchor, trace = own or (born(), jax.tree.map(jnp.zeros_like, born()))
    way = jax.tree.map(jnp.subtract, anchor, mean(each))
    trace = jax.tree.map(lambda g, t: g + 0.9 * t, way, trace)
    anchor = jax.tree.map(lambda a, g, t: a - 0.7 * (g + 0.9 * t), anchor, way, trace)
    return [anchor] * len(each), (anchor, trace)


def elastic(each, own):
    center = own or born()
    drawn = [jax.tree.map(lambda w, c: w - 0.25 * (w - c), one, center) for one in each]
    return drawn, jax.tree.map(lambda c, m: 0.5 * c + 0.5 * m, center, mean(each))


def heard(each, own):
    count = len(each)
    return [mean([each[i - 1], each[i], each[(i + 1) % count]]) for i in range(count)], own


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("exchange", "meet"),
    [
        pytest.param(jp.Exchange("diloco", every=2), nesterov, id="diloco", marks=pytest.mark.slow),
        pytest.param(
            jp.Exchange("diloco", every=2, outer=optax.sgd(0.7, 0.9, nesterov=True)),
            nesterov,
            marks=pytest.mark.slow,
            id="diloco of a chain",
        ),
        pytest.param(jp.Exchange("easgd", every=2, alpha=0.25, beta=0.5), elastic, marks=pytest.mark.slow, id="easgd"),
        pytest.param(jp.Exchange("gossip", every=2, graph="ring"), heard, id="gossip"),
    ],
)
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(WHOLE, id="fsdp"), pytest.param({"data": 4, "tensor": 2}, id="tensor", marks=pytest.mark.slow)],
)
def test_replicas_meet_as_the_equations_say(exchange, meet, sizes):
    want, expected = by_hand(meet)
    state, losses = trained(exchange, sizes=sizes)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_arrays(jax.tree.leaves(state.params), jax.tree.leaves(want))


@pytest.mark.nightly
def test_momentum_is_averaged_where_it_is_asked_for():
    for said, equal in (("averaged", True), ("kept", False)):
        state, _ = trained(jp.Exchange("local", every=2, optimizer=said), steps=4)
        moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim > 1]
        assert all((np.asarray(x) == np.asarray(x)[:1]).all() for x in moments) == equal


# fragments


@pytest.mark.nightly
def test_one_fragment_without_delay_is_diloco():
    one = trained(jp.Exchange("streaming", every=3, fragments=1))
    diloco = trained(jp.Exchange("diloco", every=3))
    assert one[1] == diloco[1]
    assert_equal_bits(one[0].params, diloco[0].params)


def flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


@pytest.mark.nightly
def test_fragments_are_sent_in_turn_and_applied_later():
    """Beside its equations: two fragments of a period of four, applied three steps after they were sent."""
    one, other = {"down/kernel", "up/bias"}, {"up/kernel", "down/bias"}
    assert [{*each} for each in fragments(trained_shards(composed(WHOLE)), 2, "strided")] == [one, other]
    sends, applies = {2: one, 4: other, 6: one, 8: other}, {5: one, 7: other, 9: one}
    each, kept, losses = [born()] * 4, [CHAIN.init(born())] * 4, []
    anchor = flat(born())
    trace, sent = {path: 0 * x for path, x in anchor.items()}, {}
    for i in range(9):
        made = [alone(each[r], kept[r], rows_of(i, r, 4)) for r in range(4)]
        each, kept, sums = ([*column] for column in zip(*made, strict=True))
        losses.append(float(sum(total for total, _ in sums) / sum(count for _, count in sums)))
        sent |= {path: flat(mean(each))[path] for path in sends.get(i + 1, ())}
        for path in applies.get(i + 1, ()):
            way = anchor[path] - sent[path]
            trace[path] = way + 0.9 * trace[path]
            anchor[path] = anchor[path] - 0.7 * (way + 0.9 * trace[path])
            mixed = [flat(model) | {path: 0.25 * flat(model)[path] + 0.75 * anchor[path]} for model in each]
            each = [traverse_util.unflatten_dict(model, sep="/") for model in mixed]
    state, found = trained(jp.Exchange("streaming", every=4, fragments=2, delay=3, blend=0.25), 9)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert_same_arrays(jax.tree.leaves(state.params), jax.tree.leaves(jax.tree.map(lambda *x: jnp.stack(x), *each)))


@pytest.mark.parametrize("order", ["depth", "strided"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_fragments_have_every_parameter_once(order, count):
    parts = {f"blocks/{i}/{name}": ShardShape((4, 4), "float32") for i in range(6) for name in ("in", "out")}
    parts |= {"stack/kernel": ShardShape((6, 4, 4), "float32", layers=True), "embed": ShardShape((64, 4), "float32")}
    found = fragments(parts, count, order)
    for path, part in parts.items():
        rows = [row for each in found if path in each for row in np.arange(part.shape[0])[each[path]]]
        assert sorted(rows) == list(range(part.shape[0])), path
    if count == 3:
        wanted = {"depth": ([0, 1], [2, 3], [4, 5]), "strided": ([0, 3], [1, 4], [2, 5])}[order]
        assert [list(np.arange(6)[each["stack/kernel"]]) for each in found] == [*wanted]
        assert [[i for i in range(6) if f"blocks/{i}/in" in each] for each in found] == [*wanted]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("wire", "step"),
    [
        pytest.param("bf16", 2**-9, marks=pytest.mark.full),
        pytest.param("int8", 1 / 127, marks=pytest.mark.slow),
        pytest.param("int4", 1 / 7, marks=pytest.mark.full),
    ],
)
def test_a_way_that_travels_as_a_code_is_nearly_the_way(wire, step, monkeypatch):
    """After one meeting at a rate of 1 replicas are at their mean, but for a step of the code on each way, twice."""
    monkeypatch.setitem(streaming.CODES, wire, dataclasses.replace(streaming.CODES[wire], smallest=1, whole=()))
    whole = dict(every=3, fragments=1, lr=1.0, momentum=0.0)
    apart, _ = trained(jp.Exchange("ensemble"), 3)  # what replicas are before they meet
    exact, coded = (trained(jp.Exchange("streaming", **whole, wire=each), 3) for each in ("fp32", wire))
    assert coded[1] == exact[1]  # losses of before the meeting
    trees = (born(), apart.params, exact[0].params, coded[0].params)
    for start, own, one, other in zip(*map(jax.tree.leaves, trees), strict=True):
        longest, missed = np.abs(own - start[None]).max(), np.abs(np.asarray(one) - np.asarray(other)).max()
        assert 0 < missed < 2 * step * longest
        assert (np.asarray(other) == np.asarray(other)[:1]).all()  # all replicas decode the same


@pytest.mark.full
@pytest.mark.parametrize(
    ("wire", "share"),
    [
        pytest.param("fp32", 1, marks=pytest.mark.full),
        ("int4", 1 / 8),
        pytest.param("bf16", 1 / 2, marks=pytest.mark.full),
        pytest.param("int8", 1 / 4, marks=pytest.mark.full),
    ],
)
def test_layers_of_a_stack_meet_by_fragments(wire, share):
    """A decoder that scans its layers: each fragment's collectives have its layers alone, as compiled for GPUs."""
    exchange = jp.Exchange("streaming", every=4, fragments=2, order="depth", wire=wire)
    settings = jp.DecoderConfig(vocab=1024, seq=16, layers=4, dim=64, heads=2)
    layout = jp.compose(
        partial(jp.Decoder, settings), jp.Parallel(**WHOLE, exchange=exchange), jp.target_devices("h100:1x8")
    )
    ids = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    step = jp.train_step(layout, jp.next_token_loss, CHAIN)
    both = [over_data(jp.inspect(step, {"inputs": ids, "targets": ids}, sync_round=at)) for at in (2, 4)]
    sizes = [sum(each.step_payload for each in found) for found in both]
    wanted = [sum(s.collective.step_payload for s in replica_messages(layout) if s.sync_round == at) for at in (1, 2)]
    assert sizes == wanted
    whole = sum(part.size * 4 for part in trained_shards(layout).values())
    # codes go twice, to those who sum them and back, where an all-reduce is counted once
    assert sum(sizes) == pytest.approx(whole * (1 if wire == "fp32" else 2 * share), rel=0 if wire == "fp32" else 0.03)
    assert max(sizes) < 0.6 * sum(sizes)
    assert {each.dtype for found in both for each in found} == {
        "fp32": {"f32"}, "bf16": {"bf16", "f32"}, "int8": {"u8", "f32"}, "int4": {"u8", "f32"},
    }[wire]  # fmt: skip


# gossip


@pytest.mark.parametrize("graph", gossip.GRAPHS)
@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 12])
def test_a_graph_is_doubly_stochastic(graph, count):
    found = gossip.mixing_matrix(graph, count)
    gossip.check_graph(tuple(map(tuple, found)))
    if graph == "ring" and count > 2:
        assert gossip.contraction(found) == pytest.approx(
            max(abs(1 + 2 * np.cos(2 * np.pi * k / count)) / 3 for k in range(1, count))
        )


@pytest.mark.parametrize("graph", [*gossip.GRAPHS, "skewed"])
def test_gossip_keeps_the_mean_and_forgets_differences_as_its_spectrum_says(graph):
    count = 8
    matrix = (
        gossip.mixing_matrix(graph, count) if graph != "skewed" else 0.9 * np.roll(np.eye(count), 3, 0) + 0.1 / count
    )
    mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    between = ReplicaMesh(mesh=mesh, specs={"w": jax.P()})
    met = jax.jit(lambda tree: between.mix(tree, matrix))
    slowest = np.linalg.svd(matrix - 1 / count)[2][0]  # the difference that is forgotten most slowly
    tree = {
        "w": jax.device_put(jnp.asarray(3.0 + slowest[:, None], jnp.float32), jax.NamedSharding(mesh, jax.P("data")))
    }
    after = met(tree)["w"]
    np.testing.assert_allclose(np.mean(after), np.mean(tree["w"]), rtol=1e-6)
    shrunk = np.var(after) / np.var(tree["w"])
    assert shrunk == pytest.approx(gossip.contraction(matrix) ** 2, rel=0.01)


# ensembles


@pytest.mark.slow
def test_an_ensemble_is_evaluated_by_its_mean_prediction():
    for sizes in (WHOLE, {"data": 2, "fsdp": 2, "tensor": 2}):
        state, _ = trained(jp.Exchange("ensemble"), 3, sizes=sizes)
        step = jp.train_step(composed(sizes, jp.Exchange("ensemble")), loss, CHAIN)
        total, count = step.evaluate(state, batch(9))["loss"]
        models = [jax.tree.map(lambda x, r=r: x[r], jax.device_get(state.params)) for r in range(sizes["data"])]
        rows = batch(9)
        predicted = np.mean([prediction(model, rows["x"]) for model in models], axis=0)
        want = np.sum(np.mean((predicted - rows["y"]) ** 2, axis=-1) * rows["mask"])
        np.testing.assert_allclose(total, want, rtol=1e-5)
        assert count == rows["mask"].sum()
        apart = sum(float(sums_of(model, rows)[0]) for model in models) / len(models)
        assert total < 0.999 * apart  # Jensen's inequality, strictly, for models that differ


def prediction(params, x):
    up, down = params["up"], params["down"]
    return np.tanh(x @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]


def test_a_loss_past_the_models_call_has_no_mean_prediction():
    layout = composed(WHOLE, jp.Exchange("ensemble"))

    def past(model, batch):
        error = jnp.mean((model.down(model.up(batch["x"])) - batch["y"]) ** 2, axis=-1)
        return jnp.sum(error), error.size

    with pytest.raises(JaxparError, match="a loss that does not call Net"):
        jp.train_step(layout, past, CHAIN).evaluate(jp.init_state(layout, CHAIN), batch(0))


# what travels


def compiled(exchange, meeting, sizes=WHOLE):
    layout = composed(sizes, exchange, jp.target_devices("h100:1x8"))
    shapes = {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in batch(0).items()}
    return layout, over_data(jp.inspect(jp.train_step(layout, loss, CHAIN), shapes, sync_round=meeting))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "exchange",
    [
        pytest.param(jp.Exchange("diloco"), marks=pytest.mark.full),
        pytest.param(jp.Exchange("easgd"), marks=pytest.mark.slow),
        pytest.param(jp.Exchange("gossip", every=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_meeting_sends_what_is_said_and_other_steps_nothing(exchange):
    layout, found = compiled(exchange, 1)
    sent = [each.collective for each in replica_messages(layout)]
    assert {each.kind for each in found} == {each.kind for each in sent}
    assert sum(each.step_wire for each in found) == sum(each.step_wire for each in sent)
    assert {each.every for each in replica_messages(layout)} == {exchange.every}
    assert compiled(exchange, 0)[1] == []


@pytest.mark.slow
def test_what_is_averaged_of_an_optimizer_is_counted():
    """Adam's two averages of each parameter beside the parameters, as compiled for two nodes of GPUs."""
    exchange = jp.Exchange("local", every=5, optimizer="averaged")
    layout = composed({"data": 8, "fsdp": 2}, exchange, jp.target_devices("h100:2x8"))
    step = jp.train_step(layout, loss, CHAIN)
    shapes = {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in batch(0).items()}
    sent = replica_messages(step.layout)
    assert {each.every for each in sent} == {5}
    said = sum(each.collective.step_payload for each in sent)
    assert said == 3 * sum(each.collective.step_payload for each in replica_messages(layout))
    assert sum(each.step_payload for each in over_data(jp.inspect(step, shapes, sync_round=1))) == pytest.approx(
        said, rel=0.01
    )
    assert "optimizer's averages on top" in layout.explain()  # of an optimizer that a layout does not know
    assert "on top" not in step.layout.explain()


@pytest.mark.nightly
def test_an_ensemble_sends_nothing():
    layout, found = compiled(jp.Exchange("ensemble"), 0)
    assert replica_messages(layout) == ()
    assert found == []


# what is refused


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("dilco", {}, "exchange 'dilco'"),
        ("local", {"evry": 2}, "Local(evry=2)"),
        ("local", {"every": 0}, "every = 0"),
        ("local", {"algorithm": "rign"}, "algorithm='rign'"),
        ("diloco", {"every": -1}, "every = -1"),
        ("diloco", {"lr": float("nan")}, "lr = nan"),
        ("diloco", {"momentum": 1.0}, "momentum = 1.0"),
        ("diloco", {"outer": "sgd"}, "outer='sgd'"),
        ("streaming", {"every": 10, "fragments": 4}, "fragments = 4 with every = 10"),
        ("streaming", {"every": 4, "delay": 4}, "delay = 4 with every = 4"),
        ("streaming", {"blend": 1.0}, "blend = 1.0"),
        ("streaming", {"wire": "int2"}, "wire = 'int2'"),
        ("easgd", {"alpha": 2.0}, "alpha = 2.0"),
        ("easgd", {"beta": -0.5}, "beta = -0.5"),
        ("gossip", {"graph": "rign"}, "graph = 'rign'"),
        ("gossip", {"graph": [[0.5, 0.5], [0.9, 0.1]]}, "graph = [[0.5, 0.5], [0.9, 0.1]]"),
        ("gossip", {"graph": [[1.5, -0.5], [-0.5, 1.5]]}, "graph = [[1.5, -0.5], [-0.5, 1.5]]"),
        ("gossip", {"graph": [[1.0], [0.0, 1.0]]}, "graph = [[1.0], [0.0, 1.0]]"),
    ],
)
def test_settings_that_are_none_are_refused(name, settings, said):
    with pytest.raises(JaxparError) as caught:
        jp.Exchange(name, **settings)
    assert said in str(caught.value)


def test_a_graph_of_another_number_of_replicas_is_refused():
    with pytest.raises(JaxparError, match="a graph of 2 rows with data=4"):
        composed(WHOLE, jp.Exchange("gossip", graph=[[0.5, 0.5], [0.5, 0.5]]))


def test_an_exchange_is_a_value():
    diloco = jp.Exchange("diloco", every=7)
    assert diloco == dataclasses.replace(jp.Exchange("diloco"), every=7)
    assert hash(diloco) == hash(jp.Exchange(name="diloco", every=7))
    assert str(diloco) == "diloco every 7 steps"
    assert jp.Parallel(data=2, exchange=None) == jp.Parallel(data=2)


class Constant(nnx.Module):
    """Four layers whose gradient is one everywhere."""

    def __init__(self, rngs):
        self.blocks = nnx.Param(jnp.ones((4, 8, 8)), out_sharding=("layers", None, None))

    def __call__(self, x):
        return jnp.sum(self.blocks[...]) + 0 * jnp.sum(x)


def test_each_fragment_has_a_count_of_its_own_of_an_outer_optimizer_that_counts():
    """Adam's first step is its rate, for the fragment that meets last too."""
    exchange = jp.Exchange("streaming", every=4, fragments=4, order="depth", outer=optax.adam(0.1))
    layout = jp.compose(lambda rngs: Constant(rngs), jp.Parallel(data=2, exchange=exchange), jax.devices()[:2])
    chain = optax.sgd(1e-3)
    state, step = jp.init_state(layout, chain), jp.train_step(layout, lambda m, b: (m(b["x"]), jnp.float32(1)), chain)
    for _ in range(4):
        state, _ = step(state, {"x": np.ones((2, 3), np.float32)})
    moved = 1 - np.asarray(state.exchange["anchor"]["blocks"]).mean((1, 2))
    np.testing.assert_allclose(moved, 0.1, rtol=1e-4)
