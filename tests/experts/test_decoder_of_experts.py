"""`jp.Decoder` with experts: losses, parameters, bias and counts of one device; what is sent, as compiled."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.models.layers import BlockConfig
from jaxpar.models.mixture import MixtureLayer
from jaxpar.models.settings.experts import ExpertsConfig

SEQ, ROWS = 16, 16
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.3, momentum=0.9))
MIXTRAL = {"count": 8, "per_token": 2, "capacity": 1.25}
QWEN = {"count": 8, "per_token": 3, "hidden": 16, "capacity": 1.0, "overflow": "spill", "router_z": 1e-3}
DEEPSEEK = {
    "count": 8, "per_token": 2, "hidden": 16, "shared": 1, "scores": "sigmoid", "groups": 4, "group_limit": 2,
    "scale": 2.5, "capacity": 1.0, "balance": 0.0, "balance_rate": 0.01,
}  # fmt: skip


def decoder(experts, **settings):
    shape = {"vocab": 32, "seq": SEQ, "layers": 2, "dim": 16, "heads": 2, "hidden": 32}
    return partial(jp.Decoder, jp.DecoderConfig(**shape | settings, experts=ExpertsConfig(**experts)))


def batch_of(rows=ROWS):
    numbers = np.random.default_rng(0)
    words = (numbers.zipf(1.3, (rows, SEQ + 1)) % 32).astype(np.int32)
    return {
        "inputs": words[:, :-1],
        "targets": words[:, 1:],
        "mask": (numbers.random((rows, SEQ)) < 0.8).astype(np.float32),
    }


def trained(experts, parallel, devices=None, steps=3, **options):
    layout = jp.compose(decoder(experts), parallel, devices)
    step = jp.train_step(layout, jp.next_token_loss, OPTIMIZER, **options)
    state, rows, batch = jp.init_state(layout, OPTIMIZER, seed=0), [], batch_of()
    for _ in range(steps):
        state, metrics = step(state, batch)
        rows.append({name: float(value) for name, value in metrics.items()})
    return rows, state, step


def case(experts, *marks, **sizes):
    name = {id(MIXTRAL): "mixtral", id(QWEN): "qwen", id(DEEPSEEK): "deepseek"}[id(experts)]
    return pytest.param(experts, sizes, id=f"{name}, {', '.join(f'{k} {v}' for k, v in sizes.items())}", marks=marks)


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("experts", "sizes"),
    [
        case(QWEN, pipe=2, expert=2, fsdp=2),
        case(DEEPSEEK, expert=2, tensor=2, fsdp=2),
        case(QWEN, pytest.mark.slow, expert=2, context=2, fsdp=2),
        case(DEEPSEEK, pytest.mark.slow, expert=8),
        case(MIXTRAL, pytest.mark.slow, pipe=2, expert=2, data=2, zero=1),
        case(MIXTRAL, pytest.mark.full, expert=2, fsdp=4, zero=2),
        case(MIXTRAL, pytest.mark.full, expert=4, data=2, zero=0),
        case(QWEN, pytest.mark.full, pipe=2, expert=2, tensor=2),
        case(QWEN, pytest.mark.full, pipe=2, expert=2, fsdp=2, zero=2),
        case(DEEPSEEK, pytest.mark.full, expert=2, data=2, fsdp=2),
    ],
)
def test_a_decoder_of_experts_trains_as_on_one_device(experts, sizes):
    expected = assert_same_training(experts, sizes)
    assert ("router_bias" in str(expected.model_state)) == bool(experts.get("balance_rate"))


def assert_same_training(experts, sizes):
    """Compares metrics, parameters and bias; returns the state of one device."""
    rows, state, _ = trained(experts, jp.Parallel(**sizes))
    alone, expected, _ = trained(experts, jp.Parallel(), jax.devices()[:1])
    if "pipe" in sizes:
        alone = [{name: value for name, value in row.items() if name != "load_max"} for row in alone]
    for row, other in zip(rows, alone, strict=True):
        assert row == pytest.approx(other, rel=1e-5)
    for tree, theirs in ((state.params, expected.params), (state.model_state, expected.model_state)):
        for (path, value), other in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(np.asarray(value), np.asarray(other), atol=2e-5, err_msg=str(path))
    return expected


@pytest.mark.slow
def test_stages_send_each_device_its_share_of_a_microbatch():
    """What passes between stages stays split over `expert`, which XLA partitions inside of the table."""
    layout = jp.compose(decoder(MIXTRAL), jp.Parallel(pipe=2, expert=2, data=2))
    ledger = jp.inspect(jp.train_step(layout, jp.next_token_loss, OPTIMIZER), batch_of()).ledger
    share = ROWS // layout.schedule.microbatches // 4 * SEQ * 16 * 4  # examples of a device, tokens, dim, bytes
    passed = [entry for entry in ledger if entry.kind == "collective-permute" and "pipe" in entry.axes]
    assert share in {entry.payload for entry in passed}
    assert (
        max(entry.payload for entry in passed) <= share * layout.schedule.microbatches
    )  # or a device's share of a batch
    gathered = [entry for entry in ledger if entry.kind == "all-gather" and not entry.parameters]
    assert not [entry for entry in gathered if entry.axis == "expert" and entry.payload >= 2 * share], gathered


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [{"pipe": 2, "expert": 2, "fsdp": 2, "zero": 1}, {"expert": 8}, {"data": 8}], ids=str)
def test_a_checkpoint_goes_on_under_another_layout(sizes, tmp_path):
    _, state, step = trained(QWEN, jp.Parallel(expert=4, data=2), steps=2)
    jp.save(tmp_path / "state", state)
    layout = jp.compose(decoder(QWEN), jp.Parallel(**sizes))
    other = jp.train_step(layout, jp.next_token_loss, OPTIMIZER)
    restored = jp.restore(tmp_path / "state", other)
    losses = [float(run(of, batch_of())[1]["loss"]) for run, of in ((step, state), (other, restored))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def eager(config, experts):
    """A layer outside of a step."""
    with nnx.use_eager_sharding(False):
        return MixtureLayer(config, experts, rngs=nnx.Rngs(0))


@pytest.mark.nightly
def test_without_overflow_experts_of_one_kind_are_one_dense_layer():
    """All experts equal and normalized weights: the router chooses, and nothing changes."""
    layer = eager(
        BlockConfig(dim=16, heads=2, kv_heads=2, hidden=32, norm="rms", gated=True, activation="silu", biases=(),
                    causal=True, dropout=0.0, out_scale=1.0),
        ExpertsConfig(count=4, per_token=2, capacity=0),
    )  # fmt: skip
    for weight in (layer.up, layer.gate, layer.down):
        weight[...] = jnp.broadcast_to(weight[...][:1], weight[...].shape)
    x = jax.random.normal(jax.random.key(0), (2, 8, 16))
    dense = (nnx.silu(x @ layer.gate[...][0]) * (x @ layer.up[...][0])) @ layer.down[...][0]
    y, sums = layer(x)
    np.testing.assert_allclose(y, dense, rtol=1e-5, atol=1e-6)
    assert float(sums.lost.sum()) == 0
    assert float(sums.sent.sum()) == 2 * 8 * 2


def test_the_router_scores_in_float32():
    """In bfloat16 scores fall together, and other experts win."""
    config = BlockConfig(dim=16, heads=2, kv_heads=2, hidden=8, norm="rms", gated=True, activation="silu", biases=(),
                         causal=True, dropout=0.0, out_scale=1.0)  # fmt: skip
    layer = eager(config, ExpertsConfig(count=64, per_token=1, capacity=0))
    graph, state = nnx.split(layer)
    layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state))
    x = jax.random.normal(jax.random.key(1), (4, 1024, 16)).astype(jnp.bfloat16)
    _, sums = layer(x)
    logits = np.asarray(x, np.float64) @ np.asarray(layer.router[...], np.float64)
    np.testing.assert_array_equal(sums.sent[:, 0], [np.bincount(row.argmax(-1), minlength=64) for row in logits])


def test_the_losses_of_a_router_are_those_of_each_row_alone():
    """Not of means over a shard or a batch: the balance is a product, whose mean over parts is another number."""
    config = BlockConfig(dim=16, heads=2, kv_heads=2, hidden=8, norm="rms", gated=True, activation="silu", biases=(),
                         causal=True, dropout=0.0, out_scale=1.0)  # fmt: skip
    layer = eager(config, ExpertsConfig(count=4, per_token=2))
    x = 3 * np.random.default_rng(0).normal(size=(5, 12, 16))
    logits = x @ np.asarray(layer.router[...], np.float64)
    _, sums = layer(jnp.asarray(x, jnp.float32))
    for row, losses in zip(logits, np.asarray(sums.losses), strict=True):
        chances = np.exp(row) / np.exp(row).sum(-1, keepdims=True)
        share = np.bincount(np.argsort(-row, axis=-1)[:, :2].ravel(), minlength=4) / 24
        expected = 4 * (share * chances.mean(0)).sum(), (np.log(np.exp(row).sum(-1)) ** 2).mean()
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.nightly
def test_microbatches_change_no_loss_of_a_router():
    experts = QWEN | {"balance": 1.0}
    rows, accumulated = (
        trained(experts, jp.Parallel(), jax.devices()[:1], steps=2, accumulate=count)[0] for count in (1, 4)
    )
    for row, other in zip(rows, accumulated, strict=True):
        assert row.pop("load_max") <= other.pop("load_max") * 1.00001
        assert row == pytest.approx(other, rel=1e-5)


@pytest.mark.nightly
def test_the_bias_moves_by_its_rate_towards_experts_with_few_choices():
    _, state, _ = trained(DEEPSEEK, jp.Parallel(), jax.devices()[:1], steps=1)
    (bias,) = [np.asarray(leaf) for leaf in jax.tree.leaves(state.model_state) if leaf.shape == (2, 8)]
    assert set(np.unique(np.round(np.abs(bias) / 0.01, 5))) <= {0.0, 1.0}
    assert (bias > 0).any()
    assert (bias < 0).any()


@pytest.mark.nightly
def test_evaluation_leaves_the_bias_and_counts_alike():
    _, state, step = trained(DEEPSEEK, jp.Parallel(expert=4, data=2), steps=1)
    sums = step.evaluate(state, batch_of())
    assert float(sums["dropped"][1]) == ROWS * SEQ * 2 * 2  # rows x tokens x choices x layers
    assert {"balance", "router_z", "spilled", "dropped", "load_max"} <= sums.keys()


def inspected(settings, parallel, target, rows):
    """The report of a step of two layers, as compiled for absent GPUs."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for absent GPUs: jax-cuda13-pjrt")
    make = decoder(settings, dim=64, seq=256, vocab=256, hidden=192)
    step = jp.train_step(
        jp.compose(make, parallel, jp.target_devices(target)), jp.next_token_loss, OPTIMIZER, precision="bf16"
    )
    tokens = jax.ShapeDtypeStruct((rows, 256), jnp.int32)
    return jp.inspect(step, {"inputs": tokens, "targets": tokens})


def assert_tokens_travel_over_expert_alone(report, of_layer, ways):
    """Compares the all-to-alls with 4 for each layer, of `of_layer` bytes, and lists what else travels."""
    moved = [entry for entry in report.ledger if entry.kind == "all-to-all"]
    assert {entry.axes for entry in moved} == {("expert",)}
    tokens = [entry for entry in moved if entry.dtype == "bf16"]
    assert sum(entry.times for entry in tokens) == 4 * 2  # two each way, in each of two layers
    assert {entry.payload for entry in tokens} == {of_layer}
    sent = sum(entry.step_wire for entry in tokens)
    assert sent == pytest.approx(4 * 2 * of_layer * (ways - 1) / ways, rel=2e-3)
    of_experts = [
        e for e in report.ledger if any("blocks/mlp/" in path and "router" not in path for path in e.parameters)
    ]
    experts = [entry for entry in of_experts if entry not in moved]
    assert {entry.axes for entry in experts} == {("data",)}
    others = [e for e in report.ledger if e not in moved and not e.parameters]
    assert sum(entry.step_payload for entry in others) < 0.02 * of_layer, others  # no other tokens travel
    return [entry for entry in moved if entry not in tokens]


@pytest.mark.nightly
def test_tokens_travel_twice_each_way_and_gradients_of_experts_stay_with_their_replicas():
    experts = {"count": 8, "per_token": 2, "capacity": 1.0, "hidden": 96}
    report = inspected(experts, jp.Parallel(expert=4, data=2), "h100:1x8", 32)
    of_layer = 32 * 256 / 8 * 2 * 64 * 2  # tokens of a device x choices x dim x 2 bytes
    assert not assert_tokens_travel_over_expert_alone(report, of_layer, 4)
    # per token, two experts of width 96 have the matmuls of a dense layer of width 192; the router has its own
    dense = inspected({}, jp.Parallel(data=8), "h100:1x8", 32)
    router = 2 * 3 * 2 * (32 * 256 / 8) * 64 * 8  # layers x (forward and twice backward) x 2 x tokens x dim x experts
    assert report.flop.total == pytest.approx(dense.flop.total + router, rel=0.01)


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ways", "settings"),
    [
        pytest.param(8, {"count": 16, "capacity": 1.25}, id="a node"),
        pytest.param(16, {"count": 16, "capacity": 1.25}, id="two nodes", marks=pytest.mark.full),
        pytest.param(
            8, {"count": 32, "dispatch": "dropless", "imbalance": 1.25, "overflow": "spill"}, id="dropless, a node"
        ),
    ],
)
def test_on_64_gpus_tokens_travel_over_expert_alone(ways, settings):
    experts = settings | {"per_token": 2, "hidden": 96}
    report = inspected(experts, jp.Parallel(expert=ways, data=64 // ways), "h100:8x8", 256)
    slots = 256 * 256 / 64 * 2 * 1.25  # tokens of a device x choices x capacity
    numbers = assert_tokens_travel_over_expert_alone(report, slots * 64 * 2, ways)
    # of a dropless dispatch, the number of each slot's expert too, in the forward pass of each layer
    assert [sum(e.times for e in numbers), {e.payload for e in numbers}] == (
        [2, {slots * 4}] if "dispatch" in settings else [0, set()]
    )


@pytest.mark.parametrize(
    ("got", "sizes", "experts"),
    [
        ("has 6 entries, expert is 4", {"expert": 4, "data": 2}, {"count": 6}),
        ("expert=4, but Decoder has no experts", {"expert": 4, "data": 2}, {}),
        ("expert=2 with exchange", {"expert": 2, "data": 4, "exchange": jp.Exchange("local", every=2)}, {"count": 4}),
    ],
)
def test_a_mesh_that_does_not_fit_experts_is_refused(got, sizes, experts):
    with pytest.raises(jp.JaxparError, match=got) as caught:
        jp.compose(decoder(experts), jp.Parallel(**sizes))
    assert len(caught.value.problems) == 1


def test_experts_of_any_size_are_sharded_by_their_axis_alone():
    layout = jp.compose(decoder(MIXTRAL), jp.Parallel(expert=8, replicate_above=0))
    place = layout.placements["blocks/mlp/up"]
    assert place.stored == place.used == jax.sharding.PartitionSpec(None, "expert")


def test_the_router_saves_what_it_reads_in_16_bits_alone():
    config = BlockConfig(dim=48, heads=2, kv_heads=2, hidden=8, norm="rms", gated=True, activation="silu", biases=(),
                         causal=True, dropout=0.0, out_scale=1.0)  # fmt: skip
    graph, state = nnx.split(eager(config, ExpertsConfig(count=4, per_token=2, hidden=40)))
    state = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)
    x = jax.ShapeDtypeStruct((2, 16, 48), jnp.bfloat16)
    gradient = jax.eval_shape(lambda *args: jax.vjp(lambda state, x: nnx.merge(graph, state)(x)[0], *args)[1], state, x)
    assert {x.dtype.name for x in jax.tree.leaves(gradient) if x.shape == (2, 16, 48)} == {"bfloat16"}


@pytest.mark.parametrize(
    ("got", "experts"),
    [
        ("experts.per_token = 5 of experts.count = 4", {"count": 4, "per_token": 5}),
        ("experts.count = 8, groups = 3", {"count": 8, "groups": 3}),
        ("experts.group_limit = 5 of groups = 4", {"count": 8, "groups": 4, "group_limit": 5}),
        (
            "experts.group_limit = 1 of groups = 4, per_token = 3",
            {"count": 8, "per_token": 3, "groups": 4, "group_limit": 1},
        ),
        ("experts.group_limit = 2 of groups = 0", {"count": 8, "group_limit": 2}),
    ],
)
def test_settings_that_contradict_each_other_are_refused(got, experts):
    with pytest.raises(jp.JaxparError, match=got):
        ExpertsConfig(**experts)


def test_biases_that_experts_would_lack_are_refused():
    with pytest.raises(jp.JaxparError, match=r"use_bias = True with experts\.count = 8"):
        jp.DecoderConfig(use_bias=True, experts=MIXTRAL)


def test_settings_of_experts_may_be_a_dict():
    assert jp.DecoderConfig(experts=MIXTRAL).experts == ExpertsConfig(**MIXTRAL)
    with pytest.raises(jp.JaxparError, match="cuont"):
        jp.DecoderConfig(experts={"cuont": 8})


@pytest.mark.nightly
def test_the_loss_is_the_cross_entropy_and_the_weighted_losses_of_the_routers():
    rows, _, _ = trained(QWEN | {"balance": 0.02}, jp.Parallel(), jax.devices()[:1], steps=1)
    (row,) = rows
    assert row["loss"] > row["cross_entropy"] + 0.02
    plain, _, _ = trained(QWEN | {"balance": 0.0, "router_z": 0.0}, jp.Parallel(), jax.devices()[:1], steps=1)
    assert plain[0]["loss"] == pytest.approx(row["cross_entropy"], rel=1e-6)


def test_less_than_a_token_for_an_expert_is_refused():
    with pytest.raises(jp.JaxparError, match=r"capacity=0\.1 of 8 experts: 0\.4 tokens of a row for each"):
        trained(MIXTRAL | {"capacity": 0.1}, jp.Parallel(), jax.devices()[:1])
