"""Predictions beside what XLA compiled: static bytes to the byte, and how ranks are compared."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.plan.agreement import rank_correlation, ranks
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.memory import static
from jaxpar.plan.practice import JAXPAR
from jaxpar.plan.shape import Shape
from jaxpar.plan.zero import JAXPAR as BYTES

MODEL = jp.DecoderSettings(vocab=64, seq=16, layers=8, dim=64, heads=8, hidden=128, gated=True)
ROWS = 32
GRID = [
    *({"data": 8}, {"tensor": 8}, {"tensor": 8, "sequence": True}),
    *({"fsdp": 8, "zero": zero} for zero in (1, 2, 3)),
    *({"data": 2, "fsdp": 4, "zero": zero} for zero in (1, 3)),
    *({"data": 2, "fsdp": 2, "tensor": 2, "zero": zero} for zero in (1, 2, 3)),
    {"fsdp": 4, "tensor": 2, "zero": 3, "sequence": True},
    *({"pipe": 2, "data": 4}, {"pipe": 8}, {"pipe": 4, "tensor": 2}),
    *({"pipe": 2, "fsdp": 4, "zero": zero} for zero in (1, 3)),
    {"pipe": 2, "fsdp": 2, "tensor": 2, "zero": 3},
]
COUNTERS = 3 * 4  # the step, Adam's count, the learning rate's: int32


def words(sizes):
    return " ".join(f"{key}{size:d}" for key, size in sizes.items())


def built(sizes):
    """Returns a step of a layout of the grid, and its candidate."""
    candidate = Candidate(**sizes, schedule="1f1b_phased", microbatches=4 if "pipe" in sizes else 1)
    pipeline = jp.Pipeline(schedule="1f1b_phased", microbatches=4) if "pipe" in sizes else jp.Pipeline()
    layout = jp.compose(lambda rngs: jp.Decoder(MODEL, rngs=rngs), jp.Parallel(**sizes, pipeline=pipeline))
    return jp.build(layout, jp.next_token, optax.adamw(optax.constant_schedule(1e-3))), candidate


def predicted(candidate):
    parameters, _, optimizer = static(Shape.of(MODEL), candidate, BYTES, "first", everywhere=JAXPAR.everywhere)
    return float(parameters + optimizer)


@pytest.mark.parametrize("sizes", GRID, ids=words)
def test_static_bytes_are_those_of_the_state(sizes):
    step, candidate = built(sizes)
    leaves = jax.tree.leaves(step.abstract())
    found = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    assert found == predicted(candidate) + COUNTERS


@pytest.mark.slow
@pytest.mark.parametrize("sizes", GRID, ids=words)
def test_static_bytes_are_the_arguments_of_the_compiled_program(sizes):
    step, candidate = built(sizes)
    rows = jax.ShapeDtypeStruct((ROWS, MODEL.seq), jnp.int32)
    compiled = step.lower(step.abstract(), {"inputs": rows, "targets": rows}).compile()
    replicas = candidate.data * candidate.fsdp
    batch = 2 * 4 * ROWS * MODEL.seq // replicas
    assert compiled.memory_analysis().argument_size_in_bytes == predicted(candidate) + COUNTERS + batch


@settings(deadline=None)  # the first example imports scipy
@given(st.lists(st.integers(0, 5), min_size=3, max_size=30))
def test_ranks_are_those_of_scipy(values):
    stats = pytest.importorskip("scipy.stats", reason="scipy comes with scikit-learn")
    assert ranks(values).tolist() == stats.rankdata(values).tolist()
    other = [value * value - 3 * value + i % 3 for i, value in enumerate(values)]
    if len(set(values)) > 1 and len(set(other)) > 1:
        assert rank_correlation(values, other) == pytest.approx(stats.spearmanr(values, other).statistic)


def test_ranks_know_order_alone():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 1e9]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [8, 4, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3], [2, 1, 3]) == pytest.approx(0.5)  # 1 - 6 (1 + 1) / (3 (9 - 1))


@pytest.mark.parametrize(("one", "other"), [([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [1, 2])])
def test_too_little_to_compare_is_refused(one, other):
    with pytest.raises(JaxparError, match="rank correlation"):
        rank_correlation(one, other)
