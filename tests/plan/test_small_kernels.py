"""Steps of small kernels: the plan beside replayed programs, and its trace beside its formulas."""

import jax
import jax.numpy as jnp
import pytest
from bench.traced_decoders import compare, draw
from bench.traced_models import replay_prices

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE, SMALLEST_KERNEL
from jaxpar.plan.machine.software import JAXPAR, MAXTEXT, MEGATRON_2022, TORCHTITAN
from jaxpar.plan.memory import memory
from jaxpar.plan.model.fusion import fuse
from jaxpar.plan.model.liveness import estimate
from jaxpar.plan.model.program import value
from jaxpar.plan.model.program_reader import read_program
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.time import step_time

NARROW = Shape(layers=24, dim=512, heads=8, kv_heads=4, vocab=32768, seq=1024)
WIDE = Shape(layers=4, dim=2048, heads=16, kv_heads=4, hidden=5504, vocab=32768, seq=2048, gated=True)
ALONE, SHARDED = {"data": 1}, {"fsdp": 8, "zero": 1}
# milliseconds of a step of a row per H100, replayed from programs of XLA 0.12, of the sharded one its kernels alone;
# and GiB
COMPILED = [
    (NARROW, ALONE, "none", 11.42, 3.022), (NARROW, ALONE, "dots", 9.03, 1.743),
    (NARROW, ALONE, "all_dots", 9.60, 2.489), (NARROW, SHARDED, "dots", 8.78, 0.598),
    (WIDE, ALONE, "none", 16.86, 7.089), (WIDE, ALONE, "dots", 15.00, 5.366), (WIDE, ALONE, "all_dots", 15.46, 6.271),
    (WIDE, SHARDED, "dots", 12.42, 1.894),
]  # fmt: skip


def test_a_step_takes_as_long_as_its_replayed_program():
    errors = []
    for shape, sizes, remat, milliseconds, _ in COMPILED:
        step = step_time(shape, Candidate(**sizes, microbatch=1, remat=remat), replay_prices(), JAXPAR)
        errors.append(abs(1e3 * float(step.total - step.sharding) / milliseconds - 1))
    assert max(errors) < 0.15
    assert sum(errors) / len(errors) < 0.05


def test_a_step_takes_as_much_memory_as_its_program():
    for shape, sizes, remat, _, size in COMPILED:
        if sizes == ALONE:
            found = memory(shape, Candidate(**sizes, microbatch=1, remat=remat), JAXPAR)
            assert float(found.total) / 2**30 == pytest.approx(size, rel=0.03)


def test_no_kernel_is_shorter_than_the_smallest():
    tiny = Shape(layers=10, dim=64, heads=1, vocab=64, seq=16)
    step = step_time(tiny, Candidate(remat="none"), HARDWARE["h100"], JAXPAR)
    kernels = JAXPAR.block_kernels
    weights, numbers, arrays = (sum(getattr(kernels, name)) for name in ("weights", "numbers", "arrays"))
    count = 6 * weights + numbers + arrays + kernels.stacks
    assert float(step.elementwise) == pytest.approx(10 * count * SMALLEST_KERNEL, rel=0.05)
    fixed = HARDWARE["h100"].gemm.fixed(HARDWARE["h100"].chip.bf16_flops)
    assert float(step.attention) == pytest.approx(10 * sum(kernels.matmuls) * fixed, rel=0.05)


@pytest.mark.parametrize("software", [MAXTEXT, MEGATRON_2022, TORCHTITAN])
def test_constants_fitted_to_published_runs_contain_small_kernels(software):
    assert software.block_kernels is None


@pytest.mark.parametrize(("width", "reductions"), [(128, 0), (32768, 2)])
def test_a_softmax_of_short_rows_is_one_kernel(width, reductions):
    def function(x):
        return jax.nn.softmax(jnp.where(x > 0, x, -1.0))

    program = read_program(lambda rows: jax.make_jaxpr(function)(jnp.zeros((rows, width))).jaxpr, name="softmax")
    kernels = [kernel.op.kind for kernel in fuse(program, 4).kernels]
    assert kernels.count("reduce") == reductions


def test_saved_scores_exist_once_between_the_passes():
    """Their layout is the same in both: `jaxpar.jaxprs.stack_layouts`."""
    layers, seq = 4, 256

    def loss(weights, x):
        def layer(x, weight):
            scores = jax.nn.softmax(jnp.einsum("rshd,rthd->rhst", x * weight, x), axis=-1)
            return x + jnp.einsum("rhst,rthd->rshd", scores, x), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    def trace(rows):
        return jax.make_jaxpr(jax.grad(loss))(jnp.zeros((layers,)), jnp.zeros((rows, seq, 2, 8))).jaxpr

    found = estimate(read_program(trace, name="attention"), 1, params=[0], gradients=[0])
    assert found.peak(2)["activations"] == pytest.approx(2 * found.peak(1)["activations"], rel=0.01)
    stacks = 2 * layers * 2 * seq * seq * 4  # scores and their softmax, of four layers; the arrays of one are live too
    assert stacks < found.peak(1)["activations"] < stacks + 2.5 * stacks / layers


def test_a_ragged_matmul_takes_the_time_of_all_groups():
    def function(x):
        return jax.lax.ragged_dot(x, jnp.zeros((4, 8, 16)), jnp.zeros(4, jnp.int32))

    program = read_program(lambda rows: jax.make_jaxpr(function)(jnp.zeros((rows, 8))).jaxpr, name="ragged")
    (matmul,) = [op.matmul for op in program.ops if op.matmul]
    assert value(matmul.flop, 32) == 4 * 2 * 32 * 8 * 16


@pytest.mark.full  # traces splits too
def test_both_plans_of_a_narrow_decoder_are_close():
    (job, devices), *_ = draw(1, seed=11)
    found = compare(job, devices)
    assert found["mean"]["seconds"] < 0.1
    assert found["mean"]["bytes"] < 0.05
    assert found["first"]["agrees"]
