"""Specs that are found for models without names are those that people found for them, one paper at a time."""

import re
import time
from functools import cache, partial
from pathlib import Path

import jax
import pytest
from flax import linen as nn
from specs import models

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.models.convolutional import VGG, ResNet
from jaxpar.models.settings.reference_models import MODELS
from jaxpar.sharding.source_lines import parse_line
from jaxpar.units import parse_bytes

TENSOR = jp.Parallel(tensor=8)
ResNetConfig, VGGConfig = MODELS["resnet"], MODELS["vgg"]
WIDE = {"vocab": 32000, "dim": 1024, "heads": 16, "hidden": 4096}


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, "int32")


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


RESNET_50 = ResNetConfig(
    channels=3, classes=1000, blocks=(3, 4, 6, 3), width=64, bottleneck=True, stem="large"
)  # fmt: skip
TOKENS = {"x": ints(2, 2048), "y": ints(2, 2048)}
PICTURES = {"x": floats(128, 224, 224, 3), "y": ints(128)}
CASES = {
    "gpt": (partial(models.Gpt, **WIDE, layers=4), models.next_token, TOKENS),
    "gqa": (partial(models.Gpt, **WIDE, layers=2, kv_heads=8), models.next_token, TOKENS),
    "few kv heads": (partial(models.Gpt, **WIDE, layers=2, kv_heads=4), models.next_token, TOKENS),
    "scanned": (partial(models.ScannedGpt, **WIDE, layers=2), models.next_token, TOKENS),
    "mixture": (partial(models.Gpt, **WIDE, layers=2, experts=8, capacity=640), models.next_token, TOKENS),
    "pictures": (models.AlexNet, models.classes, PICTURES),
    "vgg": (lambda rngs: VGG(VGGConfig(channels=3, classes=1000), rngs=rngs), models.classes, PICTURES),
    "resnet": (lambda rngs: ResNet(RESNET_50, rngs=rngs), models.classes, PICTURES),
    "long rows": (
        partial(models.Gpt, vocab=512, dim=1024, heads=4, hidden=1024, layers=2),
        models.next_token,
        {"x": ints(1, 32768), "y": ints(1, 32768)},
    ),
    "clicks": (
        partial(models.Recommender, rows=2_000_000, features=26, hidden=1024),
        models.clicks,
        {"x": ints(8192, 26), "y": floats(8192)},
    ),
}


@cache
def found(case, **options):
    return jp.find_specs(*CASES[case], TENSOR, precision="bf16", **options)


def paths(case, **options):
    return {path.replace(r"\d+/", ""): names for path, names in found(case, **options).specs.paths.items()}


def named(case, end):
    """Returns the names of the activations of the lines of `models` that end so."""
    lines = Path(models.__file__).read_text().splitlines()
    keys = {key: parse_line(key).line for key in found(case).specs.activations}
    return {found(case).specs.activations[key] for key, line in keys.items() if lines[line - 1].endswith(end)}


MEGATRON = {
    "blocks/attention/q/kernel": (None, "heads"),
    "blocks/attention/k/kernel": (None, "heads"),
    "blocks/attention/v/kernel": (None, "heads"),
    "blocks/attention/o/kernel": ("heads", None),
    "blocks/mixer/up/kernel": (None, "mlp"),
    "blocks/mixer/down/kernel": ("mlp", None),
    "out/kernel": (None, "vocab"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["gpt", pytest.param("gqa", marks=pytest.mark.slow)])
def test_columns_rows_and_a_head_over_the_vocabulary_are_found_for_a_gpt(case):
    assert {path: paths(case)[path] for path in MEGATRON} == MEGATRON
    assert found(case).solution.gap <= 1e-3


def test_residuals_of_an_unrolled_gpt_are_split_by_tokens():
    # sequence parallelism (Korthikanti et al. 2022): between matmul pairs, with norms, gathers and scatters in place of
    # all-reduces
    assert named("gpt", "return x + self.mixer(self.after(x))") == {("batch", "tokens", None)}
    traffic = found("gpt").solution.traffic
    assert traffic["reduce-scatter"] > 50 * traffic["all-reduce"]


@pytest.mark.nightly
def test_a_scan_has_the_names_of_its_unrolled_layers():
    stacked = {path: names[1:] if path.startswith("blocks") else names for path, names in paths("scanned").items()}
    matrices = {path: names for path, names in paths("gpt").items() if not path.endswith("scale")}
    assert {path: stacked[path] for path in matrices} == matrices


@pytest.mark.nightly
def test_heads_that_do_not_divide_stay_whole_and_the_attention_is_split_by_tokens():
    assert {paths("few kv heads")[f"blocks/attention/{name}/kernel"] for name in "qkvo"} == {(None, None)}
    assert ("batch", None, None, "tokens", None) in found("few kv heads").specs.activations.values()


@pytest.mark.nightly
def test_experts_are_split_and_their_router_is_whole():
    names = paths("mixture")
    assert names["blocks/mixer/up"] == names["blocks/mixer/down"] == ("experts", None, None)
    assert names["blocks/mixer/route/kernel"] == (None, None)
    assert found("mixture").solution.traffic["all-to-all"] > 0


@pytest.mark.nightly
def test_a_residual_network_is_data_parallel_but_for_its_last_matrices():
    names = found("resnet", examples=True).specs.paths
    whole = [path for path, dims in names.items() if not any(dims)]
    assert all(any(path.startswith(f"blocks/{number}/") for path in whole) for number in range(12))
    assert not [path for path, dims in names.items() if any(dims) and path.split("/")[1] in map(str, range(13))]
    assert {lines[0] for lines in found("resnet", examples=True).specs.activations.values()} <= {"examples", "batch"}


@pytest.mark.slow
def test_vgg_has_examples_for_convolutions_and_columns_or_rows_for_dense_layers():
    names = paths("vgg", examples=True)
    assert names["first/kernel"] == (None, "mlp")
    assert names["second/kernel"] in [("mlp", None), (None, "mlp")]  # an exchange of the same bytes before or after it
    assert all(not any(dims) for path, dims in names.items() if len(dims) == 4)


@pytest.mark.nightly
def test_long_rows_are_split_by_tokens_and_context_is_named():
    specs = found("long rows")
    assert "as context=8 does" in specs.note
    assert {dims[1] for dims in specs.specs.activations.values() if len(dims) == 3} == {"tokens"}


@pytest.mark.nightly
def test_convolutions_are_split_by_examples_and_dense_layers_by_columns_and_rows():
    names = paths("pictures", examples=True)  # "one weird trick": Krizhevsky 2014
    assert {each for path, dims in names.items() if path.startswith("convs") for each in dims} == {None}
    dense = [names[f"dense/{number}/kernel"] for number in range(3)]
    assert all(any(dims) for dims in dense[:2]), dense
    activations = found("pictures", examples=True).specs.activations
    assert any(names[0] == "examples" and len(names) == 4 for names in activations.values())
    assert found("pictures", examples=True).parallel.rules["examples"][-1] == "tensor"
    assert found("pictures", examples=True).solution.cost < 0.9 * found("pictures").solution.cost


def test_the_table_of_a_recommender_is_split():
    assert any(paths("clicks")["table/embedding"])
    assert paths("clicks")["one/kernel"] == (None, "mlp")
    assert paths("clicks")["two/kernel"] == ("mlp", None)


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(32000, 1024)(x)
        for _ in range(2):
            x = x + nn.Dense(1024)(nn.gelu(nn.Dense(8192)(x)))
        return nn.Dense(32000)(x)


def test_a_linen_model_has_columns_rows_and_a_head_over_the_vocabulary():
    model = jp.from_linen(LinenMlp(), ints(2, 2048))
    names = jp.find_specs(model, models.next_token, TOKENS, TENSOR, precision="bf16").specs.paths
    columns, rows = ("Dense_1", "Dense_3"), ("Dense_0", "Dense_2")  # Linen numbers the outer call first
    assert {names[f"{layer}/kernel"] for layer in columns} == {(None, "mlp")}
    assert {names[f"{layer}/bias"] for layer in columns} == {("mlp",)}
    assert {names[f"{layer}/kernel"] for layer in rows} == {("mlp", None)}
    assert names["Dense_4/kernel"] == (None, "vocab")


@pytest.mark.nightly
def test_less_memory_changes_the_choice_until_nothing_fits():
    free = found("gqa")
    tight = found("gqa", memory=0.9 * free.solution.memory)
    assert tight.solution.memory <= 0.9 * free.solution.memory
    assert tight.solution.best >= free.solution.best  # equal if the free choice was the simpler one of a tie
    assert tight.parallel != free.parallel
    with pytest.raises(JaxparError, match="any choice of dims needs at least") as refusal:
        found("gqa", memory=2**20)
    least = re.search(r"memory of ([\d.]+ \w+)", refusal.value.problems[0].fix)[1]  # the fix can be followed
    assert found("gqa", memory=parse_bytes(least)).solution.memory <= parse_bytes(least)


@pytest.mark.nightly
def test_equal_layers_have_equal_names():
    # one pattern for all layers of a matrix is written only if all have the same names
    blocks = [path for path in found("gpt").specs.paths if path.startswith("blocks/")]
    assert len(blocks) == 8
    assert all(path.startswith(r"blocks/\d+/") for path in blocks)


@pytest.mark.full  # alone: beside other tests a processor takes a quarter more seconds for the same work
def test_an_8b_model_takes_less_than_ten_seconds():
    model = partial(models.Gpt, vocab=128256, dim=4096, heads=32, kv_heads=8, hidden=14336, layers=32)
    batch = {"x": ints(1, 8192), "y": ints(1, 8192)}
    wall, start = time.perf_counter(), time.process_time()
    result = jp.find_specs(model, models.next_token, batch, TENSOR, precision="bf16")
    seconds = time.process_time() - start
    print(
        f"\n8B, 32 layers: {seconds:.1f} s of a processor, {time.perf_counter() - wall:.1f} s; {result.solution.size}"
    )
    assert {path: names for path, names in result.specs.paths.items() if "attention/q" in path} == {
        r"blocks/\d+/attention/q/kernel": (None, "heads")
    }
    assert seconds <= 10


def test_the_same_dims_are_found_in_every_stage_of_zero():
    """A plan prices one split for all of them, and a job may change its stage without other names."""
    found = [
        jp.find_specs(
            lambda rngs: models.Gpt(rngs, vocab=4096, layers=1, dim=256, hidden=512),
            models.next_token,
            {"x": ints(32, 128), "y": ints(32, 128)},
            jp.Parallel(tensor=2, **sizes),
            precision="bf16",
        ).parallel
        for sizes in ({"data": 4}, {"fsdp": 4, "zero": 1}, {"fsdp": 4, "zero": 3})
    ]
    assert found[0].paths == found[1].paths == found[2].paths
    assert found[0].activations == found[1].activations == found[2].activations
