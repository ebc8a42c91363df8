"""Models that nobody annotated: their dims are read from use, siblings and words, and cut as an expert would."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import optax
import pytest
import unannotated as models
from flax import linen as nn
from flax import nnx
from pairwise import some

import jaxpar as jp
from jaxpar.mesh.target import missing_plugin
from jaxpar.parallel.compose import as_blueprint
from jaxpar.sharding.infer_names.infer_dims import with_program

gpu_compiler = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
TOKENS = jnp.zeros((1, 16), jnp.int32)
QWEN3_8B = partial(models.Qwen3, 151936, 4096, 12288, 32, 8, 128)
GEMMA_2B = partial(models.Gemma, 256128, 2048, 16384, 8, 1, 256)


@cache
def placed(model, **sizes):
    layout = jp.compose(model, jp.Parallel(**sizes), 8 if 256 not in sizes.values() else 256)
    return {path: layout.describe(path) for path in layout.placements}, layout


def ends(placements, *ends):
    return [next(told for path, told in placements.items() if path.endswith(end)) for end in ends]


def test_a_projection_to_heads_is_no_stack():
    told, _ = placed(QWEN3_8B, fsdp=256)
    assert ends(told, "q_proj/w", "o_proj/w") == [
        "f32[embed/fsdp, heads, head_dim]",
        "f32[heads, head_dim, embed/fsdp]",
    ]


def test_tensor_cuts_heads_of_bare_einsums():
    told, _ = placed(QWEN3_8B, tensor=8)
    assert ends(told, "q_proj/w", "k_proj/w") == ["f32[embed, heads/tensor, head_dim]"] * 2
    assert ends(told, "o_proj/w") == ["f32[heads/tensor, head_dim, embed]"]
    told, _ = placed(GEMMA_2B, tensor=8)
    assert ends(told, "q_einsum/w", "attn_vec_einsum/w", "down_proj/kernel", "input_embedding") == [
        "f32[heads/tensor, embed, head_dim]", "f32[heads/tensor, head_dim, embed]", "f32[mlp/tensor, embed]",
        "f32[vocab/tensor, embed]",
    ]  # fmt: skip


def test_a_stack_is_one_where_its_siblings_are():
    def block(rngs):
        return models.Block(models.QwenAttention(64, 8, 8, 16, rngs=rngs), 64, 128, rngs=rngs)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(block))(rngs)

    told, _ = placed(lambda rngs: Net(rngs), tensor=8)
    assert ends(told, "q_proj/w", "down_proj/kernel") == [
        "f32[layers, embed, heads/tensor, head_dim]", "f32[layers, mlp/tensor, embed]",
    ]  # fmt: skip


def test_a_scanned_stack_is_read_from_its_scan():
    told, layout = placed(jp.from_linen(models.PaLI(2048, 64, 128, 8, 1, 16), TOKENS), tensor=8)
    assert ends(told, "q_einsum/w", "gating_einsum", "mlp/linear") == [
        "f32[layers, heads/tensor, embed, head_dim]", "f32[layers, 2, embed, mlp/tensor]",
        "f32[layers, mlp/tensor, embed]",
    ]  # fmt: skip
    assert "use: mlp are contracted here and made by mlp/gating_einsum" in layout.explain()


def test_dense_layers_are_paired_by_use_whatever_their_names():
    told, layout = placed(jp.from_linen(models.Bert(1024, 64, 256, 8), TOKENS), tensor=8)
    assert ends(told, "attention/output/dense/kernel", "0/output/dense/kernel") == [
        "f32[heads/tensor, embed]", "f32[mlp/tensor, embed]",
    ]  # fmt: skip
    assert ends(told, "self/query/kernel", "query/bias", "intermediate/dense/bias") == [
        "f32[embed, heads/tensor]", "f32[heads/tensor]", "f32[mlp/tensor]",
    ]  # fmt: skip
    assert "made by key/kernel, query/kernel, value/kernel" in layout.explain()


def test_a_fused_and_transposed_kernel_is_cut_along_what_it_makes():
    told, _ = placed(jp.from_linen(models.GPT2(4096, 64, 8), TOKENS), tensor=8)
    assert ends(told, "c_attn/kernel", "attn/c_proj/kernel", "c_fc/kernel", "mlp/c_proj/kernel") == [
        "f32[heads/tensor, embed]", "f32[embed, heads/tensor]", "f32[mlp/tensor, embed]", "f32[embed, mlp/tensor]",
    ]  # fmt: skip


def test_words_mean_nothing_where_use_says_otherwise():
    class Liar(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(256, name="o_proj")(x))
            return nn.LayerNorm()(nn.Dense(64, name="q_proj")(x))

    told, _ = placed(jp.from_linen(Liar(), jnp.zeros((1, 64))), tensor=8)
    assert ends(told, "o_proj/kernel", "q_proj/kernel") == ["f32[embed, mlp/tensor]", "f32[mlp/tensor, embed]"]


def test_heads_of_a_learned_query_are_cut_as_any_others():
    """Not the head_dim that such a query contracts: that would sum the scores of all devices."""

    class Pool(nn.Module):
        @nn.compact
        def __call__(self, x):
            probe = self.param("probe", nn.initializers.normal(), (1, 1, 64))
            return nn.MultiHeadDotProductAttention(8, name="attention")(jnp.tile(probe, [len(x), 1, 1]), x)

    _, layout = placed(jp.from_linen(Pool(), jnp.zeros((1, 16, 64))), tensor=8)
    heads = {"query": (None, "tensor"), "key": (None, "tensor"), "value": (None, "tensor"), "out": ("tensor",)}
    used = {path.split("/")[1]: each.used for path, each in layout.placements.items() if path.endswith("kernel")}
    assert used == {name: jax.sharding.PartitionSpec(*axes) for name, axes in heads.items()}


@pytest.mark.parametrize(("mlp", "used"), [(1024, ()), (256, (None, "tensor"))])
def test_matrices_that_pair_with_no_other_are_cut_only_where_they_are_many(mlp, used):
    """Of all entries of matrices the pooler and the head have 3 % and 12 %."""

    class Pooled(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm()(x + nn.Dense(64, name="down")(nn.relu(nn.Dense(mlp, name="up")(x))))
            x = nn.LayerNorm()(nn.tanh(nn.Dense(64, name="pooler")(x)))
            return nn.Dense(4, name="head")(x)

    _, layout = placed(jp.from_linen(Pooled(), jnp.zeros((1, 64))), tensor=8)
    assert layout.placements["pooler/kernel"].used == jax.sharding.PartitionSpec(*used)
    assert layout.placements["up/kernel"].used == jax.sharding.PartitionSpec(None, "tensor")


def test_a_table_in_a_model_without_pairs_is_cut_along_its_features():
    class Pairs(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            left, right = nn.Embed(512, 64, name="center"), nn.Embed(512, 64, name="outside")
            return jnp.sum(left(tokens) * right(tokens), axis=-1)

    _, layout = placed(jp.from_linen(Pairs(), TOKENS), tensor=8)
    assert [each.used for each in layout.placements.values()] == [jax.sharding.PartitionSpec(None, "tensor")] * 2


def test_a_dim_of_heads_is_cut_between_heads():
    _, layout = placed(jp.from_linen(models.Bert(4096, 768, 3072, 12), TOKENS), tensor=8)
    place = next(each for path, each in layout.placements.items() if path.endswith("query/kernel"))
    assert "12 heads not divisible by tensor=8" in place.why  # though 8 divides 768
    assert place.used == jax.sharding.PartitionSpec()


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "model",
    [
        lambda: jp.from_linen(models.GPT2(50257, 768, 12), TOKENS),
        lambda: jp.from_linen(models.Bert(30522, 768, 3072, 12), TOKENS),
        lambda: partial(models.ViT, 768, 3072, 12),
        pytest.param(
            lambda: jp.from_linen(models.Whisper(51865, 384, 6), jnp.zeros((1, 300, 80)), TOKENS),
            marks=pytest.mark.slow,
        ),
    ],
    ids=("GPT2", "Bert", "ViT", "Whisper"),
)
def test_little_stays_whole_where_tensor_divides_neither_vocabulary_nor_heads(model):
    _, layout = placed(model(), tensor=8)
    whole = sum(each.leaf.bytes for each in layout.placements.values() if not any(each.stored))
    assert whole < 0.03 * sum(each.leaf.bytes for each in layout.placements.values())


def test_a_summary_names_large_parameters_that_stay_whole_and_why():
    model = jp.from_linen(models.GPT2(50257, 756, 12), TOKENS)
    _, layout = placed(model, tensor=8)
    table, total = layout.placements["wte/embedding"].leaf, sum(each.leaf.bytes for each in layout.placements.values())
    share = round(100 * table.bytes / total)
    assert (
        f"; whole on every device: wte/embedding [50257, 756], 144.9 MiB, {share} % of the model "
        "(vocab=50257 not divisible by tensor=8); h_0/attn/c_attn/kernel [2268, 756], 6.541 MiB, 4 % of the model "
        "(36 heads not divisible by tensor=8); h_0/attn/c_proj/kernel [756, 756], 2.18 MiB, 1 % of the model "
        "(12 heads not divisible by tensor=8)"
    ) in layout.summary()
    for sizes in ({"data": 8}, {"fsdp": 4, "data": 2}):  # nothing is asked to split; every matrix is split
        assert "whole" not in placed(model, **sizes)[1].summary()


OWN_WORDS = partial(models.OwnWords, 1024, 256, 512, 8)
CUT = [
    "f32[vocab/tensor, embed]", "f32[heads/tensor, embed]", "f32[embed, mlp/tensor]", "f32[mlp/tensor, embed]",
]  # fmt: skip


def test_an_nnx_model_with_an_example_of_its_inputs_is_read_from_use():
    told, layout = placed(jp.from_nnx(OWN_WORDS, TOKENS), tensor=8)
    assert ends(told, "lexicon", "merge/kernel", "expand/kernel", "contract/kernel") == CUT
    assert "heads are contracted here and made by project/kernel" in layout.explain()


class PixelClassifier(nnx.Module):
    """Convolutions with a GroupNorm of 4 groups, and logits of 5 classes for each pixel."""

    def __init__(self, rngs):
        self.stem = nnx.List([nnx.Conv(3, 64, (3, 3), rngs=rngs)])
        self.norm = nnx.GroupNorm(64, 4, rngs=rngs)
        self.conv = nnx.Conv(64, 64, (3, 3), rngs=rngs)
        self.second = nnx.Conv(64, 64, (3, 3), rngs=rngs)
        self.head = nnx.Conv(64, 5, (1, 1), rngs=rngs)

    def __call__(self, x):
        x = self.conv(nnx.relu(self.norm(self.stem[0](x))))
        return self.head(nnx.relu(self.second(nnx.relu(x))))


def test_explain_names_lists_groups_and_what_no_parameter_contracts():
    _, layout = placed(jp.from_nnx(PixelClassifier, jnp.zeros((1, 8, 8, 3))), tensor=8)
    text = layout.explain()
    assert "channels are made here and contracted by no parameter; channels=5 not divisible by tensor=8" in text
    assert "channels are made by stem/0/kernel; 4 groups of channels not divisible by tensor=8" in text


def lowered(model, batch):
    layout = jp.compose(model, jp.Parallel(data=2, tensor=4))
    step = jp.train_step(layout, models.token_loss, optax.sgd(0.1))
    return step.lower(step.abstract(), batch)


@pytest.mark.slow
def test_the_first_step_says_which_parameters_of_an_nnx_model_it_reads_otherwise():
    told = r"f32\[256, 256/tensor\] \(.*\), but the model's use of it suggests f32\[heads/tensor, embed\]"
    with pytest.warns(UserWarning, match=rf"(?s)OwnWords: mixer/merge/kernel .*{told}.*jp\.from_nnx\(OwnWords, batch"):
        lowered(OWN_WORDS, tokens_of(8))
    lowered(jp.from_nnx(OWN_WORDS, TOKENS), tokens_of(8))  # where a warning is an error


@pytest.mark.nightly
def test_a_kernel_that_is_cut_alike_and_gathered_by_one_reading_alone_is_no_warning():
    """By paths logits are summed; by use the classifier would be gathered, for more bytes (ViT-L: 46 to 52 MiB)."""
    layout = jp.compose(partial(models.ViT, 1024, 4096, 8, size=32, layers=2), jp.Parallel(data=2, tensor=4))
    known = jp.compose(
        jp.from_nnx(partial(models.ViT, 1024, 4096, 8, size=32, layers=2), jnp.zeros((1, 32, 32, 3))), layout.parallel
    )
    kernels = layout.placements["classifier/kernel"], known.placements["classifier/kernel"]
    assert kernels[0].stored == kernels[1].stored
    assert kernels[0].used != kernels[1].used
    step = jp.train_step(layout, models.image_loss, optax.sgd(0.1))
    shape = jax.ShapeDtypeStruct((8, 32, 32, 3), jnp.float32)
    step.lower(
        step.abstract(), {"image": shape, "label": jax.ShapeDtypeStruct((8,), jnp.int32)}
    )  # an error if it warns


def test_a_penalty_on_parameters_does_not_hide_what_the_model_does_with_them():
    def penalized(model):
        return jnp.sum(model(TOKENS)) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))

    told, _ = placed(with_program(as_blueprint(OWN_WORDS), penalized), tensor=8)
    assert ends(told, "lexicon", "merge/kernel", "expand/kernel", "contract/kernel") == CUT


SMALL = {
    "GPT2": lambda: jp.from_linen(models.GPT2(1027, 264, 6), TOKENS),
    "Whisper": lambda: jp.from_linen(models.Whisper(1027, 264, 6), jnp.zeros((1, 32, 80)), TOKENS),
}


def batch_of(name, rows=8):
    keys = jax.random.split(jax.random.key(1), 3)
    found = {
        k: jax.random.randint(key, (rows, 16), 0, 1027) for k, key in zip(("tokens", "targets"), keys, strict=False)
    }
    return found | ({"sound": jax.random.normal(keys[2], (rows, 32, 80))} if name == "Whisper" else {})


@cache
def trained(name, **declared):
    """Returns losses of three steps, and the parameters after them."""
    numerics = {"accumulate": declared.pop("accumulate", 1)}
    parallel = jp.Parallel(**declared)
    devices = jax.devices()[: 1 if not declared else 8]
    loss = models.sound_loss if name == "Whisper" else models.token_loss
    layout = jp.compose(SMALL[name](), parallel, devices)
    state = jp.init_state(layout, optax.sgd(0.5))
    step, losses = jp.train_step(layout, loss, optax.sgd(0.5), **numerics), []
    for _ in range(3):
        state, metrics = step(state, batch_of(name))
        losses.append(float(metrics["loss"]))
    return losses, jax.tree.map(jax.device_get, state.params), layout


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("name", "declared"),
    [
        pytest.param("GPT2", {"tensor": 4, "data": 2}, marks=pytest.mark.slow),
        pytest.param("GPT2", {"data": 2, "fsdp": 2, "tensor": 2, "accumulate": 2}, marks=pytest.mark.full),
        pytest.param("GPT2", {"fsdp": 2, "tensor": 4, "zero": 2}, marks=pytest.mark.full),
        pytest.param("GPT2", {"fsdp": 2, "tensor": 4, "zero": 1, "accumulate": 2}, marks=pytest.mark.full),
        pytest.param("Whisper", {"fsdp": 2, "tensor": 4}, marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:(GPT2|Whisper).* times its share")  # 4 devices share 6 heads
def test_a_vocabulary_that_tensor_does_not_divide_trains_alike(name, declared):
    alone, one, _ = trained(name)
    losses, params, layout = trained(name, **declared)
    assert any(each.used != each.whole for each in layout.placements.values())
    assert losses == pytest.approx(alone, rel=1e-5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(one), strict=True):
        assert abs(a - b).max() < 1e-5


def tokens_of(rows, length=64):
    return {name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name in ("tokens", "targets")}


@cache
def inspected(model, paths=(), **sizes):
    layout = jp.compose(model, jp.Parallel(**sizes, paths=dict(paths)), jp.target_devices("h100:1x8"))
    return jp.inspect(jp.train_step(layout, models.token_loss, optax.sgd(0.1)), tokens_of(8))


@gpu_compiler
@pytest.mark.nightly
def test_a_vocabulary_that_tensor_does_not_divide_is_sent_in_pieces():
    found = inspected(SMALL["GPT2"](), data=2, fsdp=2, tensor=2)
    kinds = {entry.kind for entry in found.ledger if "wte" in entry.cause and "tensor" in entry.axis}
    assert "all-to-all" in kinds
    assert "all-gather" not in kinds  # of all of it, on every device


QWEN3 = partial(models.Qwen3, 4096, 256, 512, 8, 8, 64)
HEAD_DIM_CUT = (("[qkv]_proj/w", (None, None, "heads")), ("o_proj/w", (None, "heads", None)))


@gpu_compiler
@pytest.mark.nightly
def test_scores_that_are_summed_over_tensor_are_a_flag():
    flags = [flag for flag in inspected(QWEN3, HEAD_DIM_CUT, tensor=8).flags if flag.kind == "summed scores"]
    assert flags
    assert all("unannotated.py" in flag.text for flag in flags)
    assert sum(flag.bytes for flag in flags) >= 2 * 7 / 8 * (8 * 8 * 64 * 64 * 4)  # [rows, heads, queries, keys]
    assert not [flag for flag in inspected(QWEN3, tensor=8).flags if flag.kind == "summed scores"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"tensor": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8, "tensor": 8}], ids=str
)
@pytest.mark.parametrize(
    "name", some(models.NAMES, ["Llama"], ["Gemma", "PaLI", "GPT2", "Bert", "ViT", "T5", "Whisper"])
)
@pytest.mark.xdist_group("expert rules")
def test_what_is_chosen_is_what_an_expert_writes(name, sizes):
    """Equal specs are equal programs, so nothing is compiled."""
    import expert_rules  # of 14 models, which take seconds to describe: only in the worker that asks

    assert tuple(expert_rules.SMALL) == models.NAMES
    model = expert_rules.SMALL[name]
    chosen = jp.compose(model, jp.Parallel(**sizes), math.prod(sizes.values()))
    byhand = expert_rules.by_hand(model, expert_rules.RULES[name], sizes, chosen.devices)
    told = {path: (place.used, place.whole) for path, place in chosen.placements.items()}
    assert told == {path: (place.used, place.whole) for path, place in byhand.placements.items()}
