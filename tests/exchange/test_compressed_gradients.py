"""Compressed gradients: what codes mean, what travels, and that nothing else does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some
from test_seams_exchange import CHAIN, batch, composed, loss, over_data, saved
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.exchange.compressed.base import pack_bits, unpack_bits
from jaxpar.parallel.layout import replica_messages, trained_shards

WHOLE, EVERY = {"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2}
SMALL = {"smallest": 64, "block": 32}  # of the tiny model here
CODES = {
    "bf16": jp.Exchange("bf16", **SMALL),
    "int8": jp.Exchange("qsgd", **SMALL),
    "int4": jp.Exchange("qsgd", bits=4, **SMALL),
    "ternary": jp.Exchange("ternary", **SMALL),
    "sign": jp.Exchange("sign", **SMALL),
    "topk": jp.Exchange("topk", share=0.1, **SMALL),
    "randomk": jp.Exchange("randomk", share=0.1, **SMALL),
    "sparse": jp.Exchange("sparse", share=0.1, **SMALL),
}
each_code = pytest.mark.parametrize("name", CODES)


def rows(seed=0, shape=(4, 256)):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# codes


@pytest.mark.parametrize(
    "bits", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow), 8]
)
def test_what_is_packed_is_unpacked(bits):
    values = np.random.default_rng(bits).integers(0, 2**bits, (3, 64)).astype(np.uint8)
    found = pack_bits(jnp.asarray(values), bits)
    assert (found.shape, found.dtype) == ((3, 8 * bits), jnp.uint8)
    np.testing.assert_array_equal(unpack_bits(found, bits), values)


@each_code
def test_a_code_has_the_bytes_that_are_said(name):
    code = CODES[name].encode(rows(), jax.random.key(0))
    said = CODES[name].code_arrays(256)
    assert sorted(x.nbytes // 4 for x in code.values()) == sorted(each.elements * each.size for each in said)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [pytest.param("int8", marks=pytest.mark.slow), "int4", pytest.param("ternary", marks=pytest.mark.slow)]
)
def test_codes_that_are_drawn_are_right_on_average(name):
    code, draws, given = CODES[name], 100_000, rows(shape=(1, 64))
    one = lambda key: code.decode(code.encode(given, key))  # noqa: E731
    found = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), draws)), np.float64)
    error = found.std(0) / np.sqrt(draws)
    assert (np.abs(found.mean(0) - given) <= 4 * error + 1e-6).all()
    assert found.std(0).max() > 0


def test_ternary_codes_are_three_values():
    code = CODES["ternary"]
    found = code.decode(code.encode(rows(), jax.random.key(0))).reshape(4, -1, 32)
    scale = np.abs(rows().reshape(4, -1, 32)).max(-1, keepdims=True)
    assert {*np.unique(np.round(found / scale, 5))} == {-1.0, 0.0, 1.0}


def test_signs_lose_less_than_there_was():
    """Contraction, as error feedback needs it: the square of what is lost is below the square of what was given."""
    code, given = CODES["sign"], rows()
    lost = given - code.decode(code.encode(given, jax.random.key(0)))
    blocks = np.asarray(given).reshape(-1, 32)
    mean = np.abs(blocks).sum(-1) ** 2 / 32
    np.testing.assert_allclose(np.sum(np.asarray(lost) ** 2), np.sum(blocks**2) - mean.sum(), rtol=1e-5)


def test_the_largest_elements_travel_as_they_are():
    code, given = CODES["topk"], rows()
    found = np.asarray(code.decode(code.encode(given, jax.random.key(0)))).reshape(-1, 32)
    blocks = np.asarray(given).reshape(-1, 32)
    kept = found != 0
    assert {*kept.sum(-1)} == {3}
    np.testing.assert_array_equal(found[kept], blocks[kept])
    assert (np.where(kept, np.abs(blocks), np.inf).min(-1) >= np.where(kept, 0, np.abs(blocks)).max(-1)).all()


def test_elements_that_are_drawn_are_scaled_where_nothing_is_remembered():
    code, draws = jp.Exchange("randomk", share=0.25, feedback=False, **SMALL), 2_000
    given = rows(shape=(1, 64))
    one = lambda key: code.decode(code.encode(given, key))  # noqa: E731
    found = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), draws)), np.float64)
    assert {*(found[:, 0] != 0).sum(-1)} == {16}
    assert (np.abs(found.mean(0) - given) <= 4.5 * found.std(0) / np.sqrt(draws) + 1e-6).all()


@pytest.mark.parametrize(("share", "dense"), [(0.1, False), (0.25, True)])
def test_a_sparse_sum_is_the_sum_of_what_travelled(share, dense):
    """Of four replicas: with places, and whole where that is smaller."""
    code = jp.Exchange("sparse", share=share, **SMALL)
    sent = [code.decode(code.encode(rows(seed)[:1], jax.random.key(0))) for seed in range(4)]
    found = code.encode_mean(sum(sent), jax.random.key(0), 4)
    assert ("all" in found) == dense
    np.testing.assert_array_equal(code.decode(found), sum(sent))


# steps


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_a_scale_is_the_mean_magnitude_of_its_elements_where_they_fill_no_block(replicas):
    """Of a 64 x 64 matrix on 8 replicas a piece has 512 elements, and a block 1,024."""
    rng = np.random.default_rng(0)
    x, y = (np.repeat(rng.normal(size=(1, 64)).astype(np.float32), replicas, 0) for _ in range(2))
    made, sign = partial(nnx.Linear, 64, 64, use_bias=False), jp.Exchange("sign")
    devices = jax.devices()[:replicas]
    layout = jp.compose(lambda rngs: made(rngs=rngs), jp.Parallel(data=replicas, exchange=sign), devices)
    kept = optax.chain(optax.identity(), optax.trace(decay=0.0), optax.scale(0.0))  # keeps a gradient, moves nothing

    def product(model, batch):
        return jnp.sum(model(batch["x"]) * batch["y"]), batch["x"].shape[0]

    state, _ = jp.train_step(layout, product, kept)(jp.init_state(layout, kept), {"x": x, "y": y})
    wanted, found = x[:1].T @ y[:1], np.asarray(state.optimizer[1].trace["kernel"])
    np.testing.assert_allclose(np.abs(found).mean(), np.abs(wanted).mean(), rtol=1e-5)


def trained(exchange, steps=4, sizes=WHOLE, optimizer=CHAIN, state=None, first=0):
    layout = composed(sizes, exchange)
    state = jp.init_state(layout, optimizer) if state is None else state
    step, losses = jp.train_step(layout, loss, optimizer), []
    for i in range(first, first + steps):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [WHOLE, pytest.param(EVERY, marks=pytest.mark.slow)], ids=str)
def test_a_code_that_loses_little_trains_as_none(sizes):
    _, expected = trained(jp.Exchange("all_reduce"), sizes=sizes)
    _, losses = trained(CODES["bf16"], sizes=sizes)
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert losses != expected


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 4, "fsdp": 2, "zero": 0}, {"data": 2, "tensor": 4}], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("int8", marks=pytest.mark.slow),
        pytest.param("randomk", marks=pytest.mark.slow),
        pytest.param("sign", marks=pytest.mark.slow),
    ],
)
def test_devices_that_hold_the_same_decode_the_same(name, sizes):
    """With blocks that would reach over two parameters: `tensor` splits one of them, and holds the other whole."""
    kind = type(CODES[name])
    state, _ = trained(kind(smallest=16, whole=(), block=48), 3, sizes=sizes)
    for array in jax.tree.leaves(state.params):
        held = {}
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, held.setdefault(str(shard.index), shard.data))


# moves nothing, and counts the gradients that it is given
COUNTING = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, held, params: (jax.tree.map(jnp.zeros_like, grads), jax.tree.map(jnp.add, held, grads)),
)


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [WHOLE, {"data": 4, "fsdp": 2, "zero": 1}, EVERY], ids=str)
def test_all_that_was_sent_and_all_that_is_remembered_is_all_there_was(sizes):
    """Error feedback telescopes: the sums of decoded gradients and what is remembered are the true sum."""
    true, _ = trained(jp.Exchange("all_reduce"), 5, sizes=sizes, optimizer=COUNTING)
    sent, _ = trained(CODES["sign"], 5, sizes=sizes, optimizer=COUNTING)
    for path in ("up", "down"):
        lost, piece = (np.asarray(sent.exchange[key][f"{path}/kernel"], np.float64) for key in ("lost", "pieces"))
        got, want = (np.asarray(state.optimizer[path]["kernel"], np.float64) for state in (sent, true))
        assert np.abs(got - want).max() > 0.01 * np.abs(want).max()
        np.testing.assert_allclose(got + lost.mean(0) + piece, want, atol=1e-6 * np.abs(want).max())


@pytest.mark.nightly
def test_a_run_with_errors_that_are_remembered_is_resumed_to_the_bit(tmp_path):
    state, _ = trained(CODES["sign"], 3)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(state.exchange))
    assert state.exchange["pieces"]["up/kernel"].addressable_shards[0].data.size == 16 * 32 // 8
    with saved(tmp_path, state, 3) as store:
        restored, _ = store.restore(jp.train_step(composed(WHOLE, CODES["sign"]), loss, CHAIN).abstract())
        assert_same_arrays(restored, state, 0)
        assert trained(CODES["sign"], 2, state=restored, first=3)[1] == trained(CODES["sign"], 5)[1][3:]


# what travels


def inspected(exchange, sizes=WHOLE):
    layout = composed(sizes, exchange, jp.target_devices("h100:1x8"))
    shapes = {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in batch(0).items()}
    return layout, over_data(jp.inspect(jp.train_step(layout, loss, CHAIN), shapes))


def by_kind(found):
    sizes = {}
    for each in found:
        if each.kind != "all-reduce":
            key = each.kind, each.dtype
            sizes[key] = sizes.get(key, 0) + each.step_payload
    return sizes


@pytest.mark.spread(2)
@pytest.mark.nightly
@pytest.mark.parametrize("sizes", some([WHOLE, EVERY], [WHOLE], []), ids=str)
@each_code
def test_codes_travel_as_said_and_gradients_do_not(name, sizes):
    layout, found = inspected(CODES[name], sizes)
    assert by_kind(found) == by_kind([each.collective for each in replica_messages(layout)])
    assert_no_gradient_in_float32(found)


def assert_no_gradient_in_float32(found):
    summed = sum(each.step_payload for each in found if each.kind == "all-reduce")
    assert summed <= 4 * (16 + 32) + 64, f"{summed} bytes are summed, of biases and scalars 192"


@pytest.mark.nightly
def test_a_code_that_is_decoded_before_it_is_sent_is_found():
    """A planted fault: quantised, and then summed in float32."""

    class Fake(type(CODES["int8"])):
        def gradients(self, local, own, between):
            there = jax.tree.map(lambda x: jnp.round(x * 127) / 127, local)
            return between.mean(there), own

    _, found = inspected(Fake(**SMALL))
    with pytest.raises(AssertionError, match="bytes are summed"):
        assert_no_gradient_in_float32(found)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *{"bf16": 1 / 2, "int8": 1 / 3.9, "int4": 1 / 7.9, "ternary": 1 / 15, "sign": 1 / 30}.items(),
        *{"topk": 0.016, "randomk": 0.011, "sparse": 0.067}.items(),
    ],
)
def test_a_model_of_usual_size_sends_a_share_of_its_gradients(name, most):
    settings = jp.DecoderConfig(vocab=8192, seq=64, layers=2, dim=256, heads=4)
    kind = type(CODES[name])
    exchange = kind(bits=4) if name == "int4" else kind()
    layout = jp.compose(partial(jp.Decoder, settings), jp.Parallel(data=8, exchange=exchange), 8)
    plain = jp.compose(partial(jp.Decoder, settings), jp.Parallel(data=8), 8)
    whole, coded = (sum(each.collective.step_wire for each in replica_messages(one)) for one in (plain, layout))
    small = sum(e.collective.step_wire for e in replica_messages(layout) if e.collective.kind == "all-reduce")
    assert (coded - small) / whole <= most
    assert "norm" in layout.explain().split("whole: ")[1].splitlines()[0]
    assert small < 0.01 * whole


def between_nodes(exchange, meeting=0):
    """What a decoder's step sends over data, as compiled for two nodes of H100s, and elements that a device holds."""
    settings = jp.DecoderConfig(vocab=1024, seq=32, layers=2, dim=256, heads=4, hidden=1024)
    parallel = jp.Parallel(data=8, fsdp=2, exchange=exchange)
    layout = jp.compose(partial(jp.Decoder, settings), parallel, jp.target_devices("h100:2x8"))
    ids = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    step = jp.train_step(layout, jp.next_token_loss, CHAIN)
    found = over_data(jp.inspect(step, {"inputs": ids, "targets": ids}, sync_round=meeting))
    return found, [part.size for part in trained_shards(layout).values() if part.total_size >= 4096]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("exchange", "sent"),
    [
        (jp.Exchange("sign"), {"u8": 1 / 8, "f32": 4 / 1024}),
        pytest.param(jp.Exchange("qsgd"), {"u8": 1, "f32": 4 / 1024}, marks=pytest.mark.full),
        pytest.param(jp.Exchange("qsgd", bits=4), {"u8": 1 / 2, "f32": 4 / 1024}, marks=pytest.mark.full),
        pytest.param(
            jp.Exchange("topk", share=0.01), {"f32": 4 * 10 / 1024, "u16": 2 * 10 / 1024}, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_bytes_between_nodes_are_the_closed_form_by_dtype(exchange, sent):
    """Bytes of an element, in each of two phases, beside 4 of float32; norms are summed whole."""
    found, elements = between_nodes(exchange)
    bytes_of = {}
    for each in found:
        if each.kind in ("all-to-all", "all-gather"):
            bytes_of[each.dtype] = bytes_of.get(each.dtype, 0) + each.step_payload
    assert bytes_of == pytest.approx({dtype: 2 * size * sum(elements) for dtype, size in sent.items()}, rel=0.01)
    share = sum(bytes_of.values()) / (2 * 4 * sum(elements))
    assert share <= {"sign": 1 / 30, "topk": 0.0147}.get(exchange.name, 1.01 * sum(sent.values()) / 4)
    whole = sum(each.step_payload for each in found if each.kind == "all-reduce")
    assert whole < 0.01 * 4 * sum(elements)


@pytest.mark.full
def test_diloco_sends_all_at_once_and_streaming_a_fragment_at_a_time():
    """As compiled for two nodes: float32 of all parameters every 20 steps, or of a quarter every 5."""
    found, elements = between_nodes(jp.Exchange("diloco", every=20), 1)
    whole = sum(each.step_payload for each in found)
    assert {each.dtype for each in found} == {"f32"}
    assert whole == pytest.approx(4 * sum(elements), rel=0.01)
    streaming = jp.Exchange("streaming", every=20, fragments=2)
    each = [sum(e.step_payload for e in between_nodes(streaming, at)[0]) for at in (10, 20)]
    assert sum(each) == pytest.approx(whole, rel=0.01)
    assert max(each) == pytest.approx(whole / 2, rel=0.05)
    assert between_nodes(jp.Exchange("local", every=20))[0] == []


# what is refused


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("sign", {"block": 12}, "block = 12"),
        ("sign", {"block": 0}, "block = 0"),
        ("qsgd", {"bits": 3}, "bits = 3"),
        ("ternary", {"smallest": 0}, "smallest = 0"),
        ("bf16", {"bits": 8}, "BFloat16(bits=8)"),
        ("topk", {"share": 1.5}, "share = 1.5"),
        ("topk", {"share": float("nan")}, "share = nan"),
        ("randomk", {"block": 2**17}, "block = 131072"),
        ("sparse", {"k": 3}, "Sparse(k=3)"),
    ],
)
def test_settings_that_are_none_are_refused(name, settings, said):
    with pytest.raises(JaxparError) as caught:
        jp.Exchange(name, **settings)
    assert said in str(caught.value)


class Turned(nnx.Module):
    """A complex matrix after a real one."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.turn = nnx.Param(0.3 * jax.random.normal(rngs.params(), (8, 8), jnp.complex64))

    def __call__(self, x):
        return jnp.abs(self.first(x) @ self.turn[...])


def turned(exchange):
    """Returns the complex parameter after a step."""
    layout = jp.compose(Turned, jp.Parallel(data=4, exchange=exchange), jax.devices()[:4])
    squared = lambda model, batch: (((model(batch["x"]) - 1) ** 2).sum(), batch["x"].size)  # noqa: E731
    optimizer = optax.sgd(0.1)
    step = jp.train_step(layout, squared, optimizer)
    rows = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    return step(jp.init_state(layout, optimizer), {"x": rows})[0].params["turn"]


@pytest.mark.parametrize("name", ["sign", "topk", "powersgd"])
def test_complex_gradients_are_not_compressed(name):
    np.testing.assert_allclose(turned(jp.Exchange(name, smallest=1)), turned(jp.Exchange("all_reduce")), atol=1e-6)


def test_compression_with_nothing_to_compress_is_refused():
    with pytest.raises(JaxparError, match="exchange sign compresses nothing"):
        composed(WHOLE, jp.Exchange("sign"))
