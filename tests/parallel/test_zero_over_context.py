"""ZeRO over the devices of `context`: the numbers of one device, a share of its state, and the bytes of FSDP."""

from functools import cache, partial

import jax
import numpy as np
import optax
import pytest
from pairwise import some
from tiny import assert_same_arrays, train

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.mesh.target import missing_plugin

OVER = {"zero_over": "fsdp x context"}
SETTINGS = jp.DecoderConfig(vocab=32, seq=16, layers=2, dim=16, heads=4, kv_heads=2, hidden=32)
LAYOUTS = {
    "context 8": {"context": 8, "context_by": "ring"},
    "context 4, fsdp 2": {"context": 4, "fsdp": 2, "context_by": "ulysses"},
    "context 2, fsdp 2, tensor 2": {"context": 2, "fsdp": 2, "tensor": 2, "sequence": True},
    "context 4, data 2": {"context": 4, "data": 2, "context_by": "ring", "ulysses": 2},
}
CASES = [(layout, zero) for layout in LAYOUTS for zero in (1, 2, 3)]


def texts(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        tokens = rng.integers(0, 32, (8, 17)).astype(np.int32)
        yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def run(parallel, devices=None):
    return train(partial(jp.Decoder, SETTINGS), parallel, devices, loss=jp.next_token_loss, data=texts)


@cache
def alone():
    losses, state, _ = run(jp.Parallel(), jax.devices()[:1])
    return losses, state.params


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("layout", "zero"),
    some(CASES, [], [("context 4, fsdp 2", 1)]),
)
def test_it_trains_as_one_device_does_and_keeps_a_share_of_the_state(layout, zero):
    want, params = alone()
    sizes = LAYOUTS[layout]
    got, state, step = run(jp.Parallel(**sizes, **OVER, zero=zero))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays(state.params, params)
    ways = sizes["context"] * sizes.get("fsdp", 1)
    large = [x for x in jax.tree.leaves((state.params, state.optimizer)) if x.size >= 32 * 16]
    assert large
    for x in large:
        assert x.addressable_shards[0].data.size <= x.size // ways
    assert f"ZeRO-{zero} over fsdp x context" in step.layout.summary()
    assert "context on the largest dim" in step.layout.explain()


BAD = {
    "another axis": ({"context": 8, "zero_over": "tensor"}, "zero_over='tensor'.*\n.*fsdp, fsdp x context"),
    "one device": ({"fsdp": 8, **OVER}, "zero_over='fsdp x context' with context=1 does nothing"),
    "a pipeline": ({"context": 4, "pipe": 2, **OVER}, "with pipe=2"),
    "replicas that differ": (
        {"context": 4, "data": 2, "exchange": jp.Exchange("diloco"), **OVER},
        "with exchange diloco",
    ),
    "a stage without it": ({"context": 8, "zero": 3}, "zero=3 with fsdp=1 shards nothing.*\n.*\n.*fsdp x context"),
}


@pytest.mark.parametrize(("declared", "said"), BAD.values(), ids=BAD)
def test_what_it_cannot_do_is_refused(declared, said):
    with pytest.raises(JaxparError, match=said):
        jp.compose(partial(jp.Decoder, SETTINGS), jp.Parallel(**declared))


@pytest.mark.nightly
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_layers_are_gathered_twice_and_gradients_scattered_once_in_16_bits():
    settings = jp.DecoderConfig(vocab=512, seq=1024, layers=4, dim=256, heads=8, kv_heads=4, hidden=768)
    parallel = jp.Parallel(context=8, context_by="ring", **OVER)
    layout = jp.compose(partial(jp.Decoder, settings), parallel, jp.target_devices("h100:1x8"))
    step = jp.train_step(layout, jp.next_token_loss, optax.adamw(1e-3), precision="bf16", remat="full")
    ids = jax.ShapeDtypeStruct((1, 1024), np.int32)
    sent = {"all-gather": 0.0, "reduce-scatter": 0.0}
    for each in jp.inspect(step, {"inputs": ids, "targets": ids}).ledger:
        if each.kind in sent and each.dtype == "bf16":
            sent[each.kind] += each.step_payload
        assert each.kind != "all-reduce" or each.step_payload < 2**20
    weights = 2 * 4 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 768)  # of all layers, in bf16
    ends = 2 * 512 * 256
    assert sent["all-gather"] == pytest.approx(2 * weights + 2 * ends, rel=0.05)
    assert sent["reduce-scatter"] == pytest.approx(weights + ends, rel=0.3)
