"""A step in which devices do the same work says so when it is first run, and on the pages that show it."""

import re
import warnings
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import vocabularies
from flax import linen as nn
from flax import nnx
from pairwise import some
from vocabularies import SEQ, Careless, batch, step_of

import jaxpar as jp
from jaxpar.hlo.flop import hardware_flop, parse_matmuls
from jaxpar.hlo.flop_share import FlopShare, find_excess, flop_share
from jaxpar.hlo.text import parse
from jaxpar.job.file.parse import loads
from jaxpar.job.inspect import matmul_summary
from jaxpar.pipeline.draw.notebook import compare
from jaxpar.pipeline.tables.price import OpTimes
from jaxpar.step.model_flop import model_flop

SGD = optax.sgd(0.1)
JOB = """
[mesh]
simulate = 8
[parallel]
data = 8
[model]
dim = 16
heads = 2
layers = 1
seq = 16
vocab = 256
[data]
seq = 16
[train]
global_batch = 16
"""
# the line of the model whose matmuls each of them repeats
WAYS = {
    "by jp.constrain": "self.down(nnx.relu(self.up(x)))",
    "by a spec": "self.down(nnx.relu(self.up(x)))",
    "by Flax's names": "self.down(nnx.relu(self.up(x)))",
    "one-hot": "jax.nn.one_hot(tokens, VOCAB)",
}


def careless(how, model=Careless):
    layout = jp.compose(partial(model, how=how), jp.Parallel(data=8))
    return jp.train_step(layout, jp.next_token_loss, SGD)


def first_step(step):
    tokens = np.zeros((16, SEQ), np.int32)
    return step(jp.init_state(step.layout, SGD), {"inputs": tokens, "targets": tokens})


def lines_of(text):
    """Returns the lines of the test model that a message names, as they are written."""
    source = Path(vocabularies.__file__).read_text().splitlines()
    return [source[int(number) - 1] for number in re.findall(r"vocabularies\.py:(\d+) in __call__", text)]


@pytest.mark.nightly
@pytest.mark.parametrize("how", some(WAYS, ["one-hot"]))
def test_work_that_devices_repeat_is_said_at_the_first_step_with_its_line(how):
    with pytest.warns(UserWarning, match="times its share of") as said:
        first_step(careless(how))
    (text,) = [str(each.message) for each in said]
    assert float(re.search(r"([\d.]+) times its share", text)[1]) > 1.5
    assert any(WAYS[how] in line for line in lines_of(text))


@pytest.mark.nightly
def test_a_program_that_another_file_left_in_the_cache_of_jax_is_said_with_its_own_line(tmp_path):
    """The key of that cache leaves out the lines of source, so that an edit above a model shifts them."""
    older = tmp_path / "older.py"
    older.write_text(f"\n\n\n{Path(vocabularies.__file__).read_text()}")
    names = {"__name__": "older"}
    exec(compile(older.read_text(), older, "exec"), names)
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        with pytest.warns(UserWarning, match=r"older\.py"):
            first_step(careless("by a spec", names["Careless"]))
        with pytest.warns(UserWarning, match="times its share of") as said:
            first_step(careless("by a spec"))
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    assert WAYS["by a spec"] in lines_of(str(said[0].message))[0], said[0].message


def test_an_inspection_flags_it_first():
    first = jp.inspect(careless("by a spec"), batch()).flags[0]
    assert first.kind == "repeated work"
    assert lines_of(first.text)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("batch", "begins"),
    [pytest.param("['data']", "matmuls of each device: ", marks=pytest.mark.full), ("[]", "repeated work: ")],
)
def test_check_explains_what_devices_compute_as_compiled(batch, begins):
    job = loads(JOB, [f"parallel.rules.batch={batch}"])
    assert matmul_summary(job).startswith(begins)


@pytest.mark.nightly
def test_rematerialization_that_was_asked_for_is_no_excess():
    layout = jp.compose(partial(Careless, how="as it comes"), jp.Parallel(data=8))
    step = jp.train_step(layout, jp.next_token_loss, SGD, remat="full", accumulate=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_step(step)


class Depthwise(nnx.Module):
    def __init__(self, *, rngs):
        self.conv = nnx.Conv(32, 32, (4,), feature_group_count=32, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.conv(x)).mean(axis=1))


@pytest.mark.nightly
def test_a_depthwise_convolution_whose_gradient_xla_makes_dense_is_no_excess():
    layout = jp.compose(Depthwise, jp.Parallel(data=8))
    step, state = (jp.train_step(layout, jp.classification_loss, SGD), jp.init_state(layout, SGD))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(state, {"inputs": np.ones((16, 16, 32), np.float32), "labels": np.zeros(16, np.int32)})


GRADIENT_OF_A_KERNEL = """HloModule step
ENTRY %main (x: f32[2,16,32], y: f32[2,16,32]) -> f32[4,1,32] {{
  %x = f32[2,16,32]{{2,1,0}} parameter(0)
  %y = f32[2,16,32]{{2,1,0}} parameter(1)
  ROOT %kernel = f32[32,4,32]{{2,1,0}} {call}, window={{size=16 pad=1_2}}, dim_labels=f0b_i0o->b0f
}}
"""


@pytest.mark.parametrize(
    ("call", "repeated"),
    [
        ("convolution(%x, %y)", False),  # as for processors: dense, with zeros between the groups
        ('custom-call(%x, %y), custom_call_target="__cudnn$convForward"', True),
    ],
)
def test_zeros_are_allowed_for_where_they_are_multiplied(call, repeated):
    text = GRADIENT_OF_A_KERNEL.format(call=call)
    made = hardware_flop(parse(text)).total
    share = FlopShare(devices=8, schedule=None, matmuls=((8 * made / 32, None),), zeros=made * 31 / 32)
    assert bool(find_excess(text, share)) is repeated


@pytest.mark.parametrize("groups", [4, 64])
def test_ragged_matmuls_are_named_where_all_groups_are_multiplied(groups):
    text = GRADIENT_OF_A_KERNEL.format(call="convolution(%x, %y)")
    share = hardware_flop(parse(text)).total / 4
    matmuls = ((8 * share, None),)
    excess = find_excess(text, FlopShare(devices=8, schedule=None, matmuls=matmuls, ragged=(groups - 1) * share))
    assert ("jax.lax.ragged_dot" in str(excess)) is (groups == 4)
    assert [fix.startswith("jp.mixture(") for fix in excess.fixes] == [groups == 4]


class Groups(nn.Module):
    """An unshared convolution is one in groups inside of Flax, that makes patches."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.ConvLocal(8, (3, 3))(x))
        x = nn.relu(nn.Conv(16, (3, 3), feature_group_count=4)(x))
        return nn.Dense(10)(x.mean(axis=(1, 2)))


@cache
def convolved(devices, **sizes):
    """Returns the losses of two steps on images; over data alone, no repeated work is warned of in them."""
    rng = np.random.default_rng(0)
    images = {"inputs": rng.random((16, 8, 8, 3), np.float32), "labels": rng.integers(0, 10, 16).astype(np.int32)}
    layout = jp.compose(jp.from_linen(Groups(), images["inputs"]), jp.Parallel(**sizes), jax.devices()[:devices])
    step, state, losses = jp.train_step(layout, jp.classification_loss, SGD), jp.init_state(layout, SGD), []
    with warnings.catch_warnings():
        if "tensor" in sizes:  # which divides neither three channels nor the patches of an unshared convolution
            warnings.filterwarnings("ignore", message=".*times its share")
        for _ in range(2):
            state, metrics = step(state, images)
            losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.nightly
@pytest.mark.parametrize(
    "sizes",
    [{"data": 8}, pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_each_device_convolves_its_own_examples_whatever_the_groups(sizes):
    """XLA by itself gathers the whole batch for each convolution in groups that is not depthwise."""
    np.testing.assert_allclose(convolved(8, **sizes), convolved(1), rtol=1e-5)


def test_a_loop_that_turns_as_often_as_the_data_says_has_no_share():
    def turns(x, n):
        return jax.lax.while_loop(lambda each: each[1] < n, lambda each: (each[0] @ each[0], each[1] + 1), (x, 0))

    traced = jax.jit(turns).trace(jnp.ones((4, 4)), 3)
    assert flop_share(traced.jaxpr.jaxpr, 8, None) is None


@pytest.mark.nightly
def test_reading_the_matmuls_alone_counts_what_reading_all_counts():
    step = step_of("jaxpar", data=2, fsdp=2, tensor=2)
    text = step.lower(step.abstract(), batch()).compile().as_text()
    assert hardware_flop(parse_matmuls(text)) == hardware_flop(parse(text))


class Deep(nnx.Module):
    """Eight layers and nothing beside them: no head, whose FLOP are of one stage alone."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(8)])

    def __call__(self, x):
        return jp.pipelined([lambda x, layer=layer: x + jnp.tanh(layer(x)) for layer in self.layers], x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpipe", marks=pytest.mark.full),
        pytest.param("interleaved_phased", marks=pytest.mark.full),
        pytest.param("zb_h1", marks=pytest.mark.slow),
    ],
)
def test_what_the_comparison_of_schedules_calls_work_is_what_the_program_computes(name):
    """FLOP of a device, as compiled, over its share of the model's; a mixed table computes in branches alone."""
    (row,) = [each for each in compare(OpTimes(), stages=4, microbatches=8) if each["name"] == name]
    cut = jp.Pipeline(schedule=name, microbatches=8, chunks=row["chunks"], keep="residuals")
    layout = jp.compose(Deep, jp.Parallel(pipe=4, data=2, pipeline=cut))
    squares = lambda model, batch: (jnp.sum(model(batch["x"]) ** 2), batch["x"].size)  # noqa: E731
    step, rows = jp.train_step(layout, squares, SGD), {"x": np.zeros((32, 32), np.float32)}
    program = parse(step.lower(step.abstract(), rows).compile().as_text())
    made = hardware_flop(program, schedule=layout.schedule).total
    assert made / (model_flop(step, rows) / 8) == pytest.approx(row["work"], rel=1e-6)
