"""Context parallelism as compiled for absent H100s: what each form sends, how much it computes, what it keeps."""

import math
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.mesh.target import find_plugin
from jaxpar.models.blocks.pairs import BLOCK
from jaxpar.parallel.techniques.exchanged.attention import exchange
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.techniques.context_forms import Rows, crossover, exchanged, seconds, work

gpu_compiler = pytest.mark.skipif(find_plugin() is not None, reason=f"compiling for absent GPUs: {find_plugin()}")
HEADS, KV_HEADS, HEAD_DIM, SEQ = 8, 2, 128, 32768


@cache
def compiled(ulysses=1, seq=SEQ, causal=True, groups=KV_HEADS):
    """One layer's attention on 8 H100s, forward and backward, in bf16."""
    mesh = Mesh(np.array(jp.target_devices("h100:1x8")), ("context",), axis_types=(AxisType.Auto,))
    cut = NamedSharding(mesh, P(None, "context"))
    shapes = [jax.ShapeDtypeStruct((1, seq, n, HEAD_DIM), jnp.bfloat16, sharding=cut) for n in (HEADS, groups, groups)]
    weight = shapes[0]

    def run(q, k, v, weight):
        out, back = jax.vjp(lambda *x: exchange(*x, causal=causal, ulysses=ulysses), q, k, v)
        return out, *back(weight)

    with jax.set_mesh(mesh):
        return jp.inspect(jax.jit(run, out_shardings=cut), *shapes, weight, mesh=mesh)


def row(ulysses=1, **changed):
    given = {"seq": SEQ, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "context": 8}
    return Rows(**given | changed, ulysses=ulysses)


def wire(entries):
    found = Counter()
    for each in entries:
        found[each.kind, each.dtype] += each.step_wire
    return found


@gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("ulysses", [1, 8, pytest.param(2, marks=pytest.mark.full)])
def test_what_travels_is_what_theory_says_and_nothing_is_gathered(ulysses):
    found, theory = wire(compiled(ulysses).ledger), wire(exchanged(row(ulysses)))
    if ulysses < 8:  # forward and backward in one program: XLA sends keys on for the first time once for both
        theory["collective-permute", "bf16"] -= 2 * 2 * row(ulysses).entries(row(ulysses).exchanged)
    assert found.keys() == theory.keys()
    for key, size in theory.items():
        assert found[key] == pytest.approx(size, rel=0.002), key
    alltoalls = sum(each.times * each.count for each in compiled(ulysses).ledger if each.kind == "all-to-all")
    assert alltoalls == (8 if ulysses > 1 else 0)


@gpu_compiler
@pytest.mark.slow
def test_a_ring_computes_half_of_the_square():
    square = 2 * 7 * SEQ**2 / 8 * HEADS * HEAD_DIM  # q k and shares v, and backward five matmuls more
    share = compiled().flop.total / square
    assert share <= work(row()) * 1.01
    assert share >= 0.5


@gpu_compiler
@pytest.mark.slow
def test_memory_doubles_with_tokens_but_for_the_scores_of_one_pair_of_blocks():
    """Four float32 arrays at most, as large at any length: scores, shares, slopes, and their 16-bit copies."""
    pair = 4 * 4 * HEADS * BLOCK**2
    held = [temporary(tokens) - pair for tokens in (SEQ, 2 * SEQ)]
    assert held[0] > 0
    assert held[1] / held[0] == pytest.approx(2, rel=0.03)


def temporary(seq):
    given = 2 * 2 * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM * seq // 8  # q, k, v and a gradient come, and as many go
    return compiled(seq=seq).total - given


def test_a_ring_pays_from_a_crossover_on():
    h100 = HARDWARE["h100"]
    at = crossover(row(), h100)
    assert 0 < at < 131072
    ratio = [math.log(seconds(row(seq=n), "ring", h100) / seconds(row(seq=n), "gather", h100)) for n in (at // 2, at)]
    assert ratio[0] >= 0 > ratio[1]
    assert seconds(row(seq=2**20), "ring", h100) / seconds(row(seq=2**20), "gather", h100) < 0.6
