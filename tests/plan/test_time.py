"""The planner's seconds: closed forms, properties, published runs."""

import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from bench.planner import BOUNDS, predict, published, read
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import some

from jaxpar.errors import JaxparError
from jaxpar.mesh.chips import Link
from jaxpar.pipeline.tables.library import LIBRARY, schedule
from jaxpar.pipeline.tables.price import OpTimes, price
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE, TOGETHER, Gemm, cap
from jaxpar.plan.machine.software import JAXPAR, MAXTEXT, MEGATRON_2022, TORCHTITAN
from jaxpar.plan.model import layer_time
from jaxpar.plan.model.shape import Shape, attention_flop, count_parameters, layer_flop, step_flop
from jaxpar.plan.techniques import context, sharding, span, tensor
from jaxpar.plan.techniques.base import exposed_seconds
from jaxpar.plan.time import step_time

A100, H100 = HARDWARE["a100"], HARDWARE["h100"]
GPT3 = Shape(layers=96, dim=12288, heads=96, vocab=51200, seq=2048, learned=True, biases=True, tied=True)
LLAMA_8B = Shape(
    layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, gated=True, vocab=128256, seq=8192
)  # fmt: skip
LLAMA_8B_4K = replace(LLAMA_8B, seq=4096)
LLAMA_70B = replace(LLAMA_8B, layers=80, dim=8192, heads=64, hidden=28672)
TINY = Shape(layers=2, dim=8, heads=2, hidden=20, vocab=50, seq=16)
FINITE = {"allow_nan": False, "allow_infinity": False}


def test_a_layer_counted_by_hand():
    # q 8x8, k 8x8, v 8x8, out 8x8, up 8x20, down 20x8; two norms of 8
    assert TINY.matrices == ((8, 24), (8, 8), (8, 20), (20, 8))
    assert count_parameters(TINY).layer == 4 * 64 + 2 * 160 + 2 * 8
    assert layer_flop(TINY) == 2 * (4 * 64 + 2 * 160)
    assert attention_flop(TINY) == 2 * (16 * 8) * 2
    assert TINY.parameters == 2 * 592 + 50 * 8 + 8 + 50 * 8


def test_parameters_of_known_models():
    assert LLAMA_8B.parameters == 8_030_261_248
    assert LLAMA_70B.parameters == 70_553_706_496


def test_parameters_and_flop_are_those_of_narayanan_2021():
    l, h, s, v, rows = 96, 12288, 2048, 51200, 3  # noqa: E741
    assert GPT3.parameters - 2 * h == pytest.approx(12 * l * h * h * (1 + 13 / (12 * h) + (v + s) / (12 * l * h)))
    published = 96 * rows * s * l * h * h * (1 + s / (6 * h) + v / (16 * l * h))
    again = rows * s * l * (layer_flop(GPT3) + attention_flop(GPT3))  # full recomputation, which the head is spared
    assert step_flop(GPT3, rows) + again == pytest.approx(published)


@pytest.mark.parametrize("shape", [GPT3, LLAMA_8B, LLAMA_70B], ids=["175B", "8B", "70B"])
def test_flop_are_6_per_parameter_and_token_with_attention_beside(shape):
    tokens = 4 * shape.seq
    attention = 3 * tokens * shape.layers * attention_flop(shape)
    embedding = 0 if shape.tied else 6 * tokens * count_parameters(shape).embedding  # a lookup
    assert step_flop(shape, 4) - attention + embedding == pytest.approx(6 * shape.parameters * tokens, rel=2e-3)


def test_half_of_the_top_share_is_reached_at_half():
    curve = Gemm(top=0.8, half=4e9, source="")
    assert curve.share(4e9) == pytest.approx(0.4)
    assert curve.share(np.array([4e11, 4e12])) == pytest.approx([0.8 / 1.01, 0.8 / 1.001])


def test_products_divide_by_tensor_and_double_backward():
    one = layer_time.block(GPT3, Candidate(), replace(A100, gemm=Gemm(top=1.0, half=0.0, source="")), MEGATRON_2022)
    cut = layer_time.block(
        GPT3, Candidate(tensor=8), replace(A100, gemm=Gemm(top=1.0, half=0.0, source="")), MEGATRON_2022
    )
    assert one[0].matmuls == pytest.approx(2048 * 24 * 12288**2 / 312e12)
    assert one[1].matmuls == pytest.approx(2 * one[0].matmuls)
    assert cut[0].matmuls == pytest.approx(one[0].matmuls / 8)


def test_an_all_gather_by_hand():
    hardware = replace(
        A100,
        inside=Link(latency=1e-6, bandwidth=200e9),
        between=Link(latency=5e-6, bandwidth=20e9),
        launch=0.0,
    )
    assert hardware.gather(8e9, 1, 1) == 0
    assert hardware.gather(8e9, 8, 1) == pytest.approx(7e-6 + 7e9 / 200e9)
    assert hardware.gather(8e9, 4, 8) == pytest.approx(15e-6 + 6e9 / 20e9)  # one in each node: one NIC
    # over both levels every link carries 127 of 128 parts, and a share of the faster level's time is not hidden
    bytes_, besides = 8e9 * 127 / 128, TOGETHER * 8e9 * 127 / 128 / 200e9
    all_nics = bytes_ / (8 * 20e9) + besides
    assert hardware.gather(8e9, 128, 1) == pytest.approx(16 * 7e-6 + 15 * 5e-6 + all_nics)
    two_nics = bytes_ / (2 * 20e9) + besides
    assert hardware.gather(8e9, 128, 4) == pytest.approx(64 * 1e-6 + 63 * 5e-6 + two_nics)
    assert hardware.gather(8e9, 8, 1, pieces=5) == pytest.approx(5 * 7e-6 + 7e9 / 200e9)  # each has its own hops


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 8, 12, 16])
@pytest.mark.parametrize("stride", [1, 2, 3, 6, 8])
def test_of_a_group_that_straddles_two_nodes_the_smaller_part_counts(group, stride):
    """All groups of a machine are looked at, one after the other: how many of each are in a node that has some."""
    parts = [
        count
        for start in range(0, np.lcm(group * stride, A100.per_node), group * stride)
        for first in range(start, start + stride)
        for count in Counter((first + stride * i) // A100.per_node for i in range(group)).values()
    ]
    assert A100.members(group, stride) == min(parts)


def test_a_machine_that_is_smaller_than_a_node_has_no_group_that_straddles():
    assert A100.for_devices(6).members(3, 1) == 3
    assert A100.for_devices(64) is A100


def sent(technique, shape, candidate, hardware, software):
    return exposed_seconds(technique.block(shape, candidate, software), candidate, hardware)


def test_tensor_traffic_is_two_all_reduces_each_way():
    size = 2 * 2048 * 12288
    once = 2 * A100.gather(size, 8, 1)
    hidden = replace(MEGATRON_2022, tensor_overlap=0.0, regather=False)
    for sequence in (False, True):
        assert sent(tensor, GPT3, Candidate(tensor=8, sequence=sequence), A100, hidden) == (
            pytest.approx(2 * once),
            pytest.approx(2 * once),
        )
    best = replace(MEGATRON_2022, tensor_overlap=1.0)
    assert sent(tensor, GPT3, Candidate(tensor=8), A100, best)[1] == 0
    assert sent(tensor, GPT3, Candidate(tensor=8, sequence=True), A100, best)[1] == pytest.approx(once)


def test_context_gathers_keys_and_values_and_scatters_their_gradients():
    """As many bytes each way; gathered again where attention is computed again."""
    hidden = replace(JAXPAR, context_overlap=0.0)
    one = 2 * 2 * 4096 * 1024  # bytes of the keys of two rows, in bfloat16; of the values as many
    for remat, again in (("none", 0), ("full", 1)):
        ahead, back = sent(context, LLAMA_8B_4K, Candidate(context=4, microbatch=2, remat=remat), H100, hidden)
        assert ahead == pytest.approx(H100.gather(2 * one, 4, 1))
        assert back == pytest.approx((1 + again) * ahead)
    many = Candidate(context=np.array([1, 2, 4, 8]), microbatch=8)
    assert layer_time.tokens(LLAMA_8B_4K, many).tolist() == [8 * 4096 / ways for ways in (1, 2, 4, 8)]
    assert sent(context, LLAMA_8B_4K, many, H100, hidden)[0][0] == 0
    assert sent(context, LLAMA_8B_4K, replace(many, context=4), H100, replace(JAXPAR, context_overlap=1.0)) == (0, 0)


def test_gradients_over_data_and_context_are_one_all_reduce():
    """Of a whole gradient, and with ZeRO of a shard; a node holds as many of the group as are near.

    Over data a table's gradients are reduced as they were summed, in float32: tests/pipeline/test_compiled.py.
    """
    each, once = sharding.data_seconds(1e9, Candidate(data=4, context=8), H100, JAXPAR, layers=0)
    assert (each, once) == (0, pytest.approx(2 * H100.gather(2e9, 32, 1)))
    _, once = sharding.data_seconds(1e9, Candidate(data=2, fsdp=8, context=4, zero=3), H100, JAXPAR, layers=0)
    assert once == pytest.approx(2 * H100.gather(0.25e9, 8, 1, members=4))  # four neighbours; the other four far away
    each, once = sharding.data_seconds(
        1e9, Candidate(pipe=2, data=2, context=4, microbatches=4), H100, JAXPAR, layers=0
    )
    assert (each, once) == (pytest.approx(2 * H100.gather(2e9, 4, 1)), pytest.approx(2 * H100.gather(4e9, 2, 4)))


def test_zero_3_gathers_twice_more_than_it_scatters():
    even = replace(MAXTEXT, wire=(2.0, 2.0))
    each = {z: sharding.fsdp_seconds(1e9, Candidate(fsdp=8, zero=z), H100, even, layers=0) for z in range(4)}
    gather = H100.gather(2e9, 8, 1)
    assert each == {
        0: (0, pytest.approx(2 * gather)),
        1: (0, pytest.approx(2 * gather)),
        2: (pytest.approx(gather), pytest.approx(gather)),
        3: (pytest.approx(3 * gather), 0),
    }


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_bubble_is_that_of_narayanan_2021(chunks):
    name = "interleaved" if chunks > 1 else "1f1b"
    found = span.counts(name, 8, 64, chunks)
    part = np.array([1.0, 1.5, 0.5, 0.0, 0.0, 0.0]) / chunks
    ideal = 64 * 3.0
    assert span.span(found, tuple(part)) == pytest.approx(ideal * (1 + 7 / (chunks * 64)))


@pytest.mark.spread(1)
@pytest.mark.parametrize("run", ["asynchronous", "barrier"])
@pytest.mark.parametrize("name", some(LIBRARY, ["1f1b"]))
def test_the_span_from_small_tables_is_the_price_of_the_whole_table(name, run):
    random = np.random.default_rng(7)
    kind, loose = LIBRARY[name], {"asynchronous": 0.01, "barrier": 0.06}[run]
    exact = name in ("gpipe", "1f1b", "1f1b_phased", "interleaved", "interleaved_phased", "looped_bfs")
    chunks = 2 if 2 in kind.chunks else 1
    for stages, turns in ((1, 5), (3, 7), (4, 9), (14, 6)):
        table = schedule(name, stages=stages, microbatches=turns * stages, chunks=chunks)
        for _ in range(3):
            forward, head, send = 1.0, random.choice([0, 0.05, 0.3, 2.0]), random.choice([0, 0.01, 0.2])
            times = forward, random.uniform(0.9, 2.2), random.uniform(0.8, 1.0), head, 2 * head, send
            full = getattr(price(table, _times(table.parts, times)), run)
            found = span.span(span.counts(name, stages, turns * stages, chunks, run=run), times)
            assert full * (1 - (1e-9 if exact else loose)) <= found <= full * (1 + 1e-9)


def _times(parts, times):
    forward, backward, weights, head_f, head_b, send = times
    last = lambda time, more: (*(time,) * (parts - 1), time + more)  # noqa: E731
    return OpTimes(
        forward=last(forward, head_f), backward=last(backward, head_b), weights=(weights,) * parts, send=send
    )


def test_microbatches_that_do_not_divide_by_stages():
    for name in ("gpipe", "1f1b", "zb_h1", "looped_bfs"):
        chunks = 2 if name == "looped_bfs" else 1
        table = schedule(name, stages=5, microbatches=33, chunks=chunks)
        times = 1.0, 1.2, 0.9, 0.1, 0.2, 0.01
        full = price(table, _times(table.parts, times)).asynchronous
        assert span.span(span.counts(name, 5, 33, chunks), times) == pytest.approx(full)


def test_causes_add_up_and_recompute_is_a_forward():
    candidate = Candidate(tensor=8, microbatch=4, remat="full")
    spent = step_time(GPT3, candidate, A100, MEGATRON_2022)
    forward, _, _ = layer_time.block(GPT3, candidate, A100, MEGATRON_2022)
    assert spent.recompute == pytest.approx(96 * forward.total)
    assert spent.bubble == pytest.approx(0)
    assert spent.sharding == 0
    assert spent.total == pytest.approx(sum(spent.values()))


def test_arrays_give_what_their_entries_give():
    random = np.random.default_rng(3)
    many = _layouts(random, 40)
    both = step_time(LLAMA_8B, many, H100, JAXPAR).total
    for i in range(40):
        one = many.map_fields(lambda value, i=i: value[i])
        assert both[i] == pytest.approx(float(step_time(LLAMA_8B, one, H100, JAXPAR).total))


def _layouts(random, count):
    pipe = 2 ** random.integers(0, 5, count)
    name = random.choice(["1f1b", "interleaved_phased", "gpipe", "zb_h1"], count)
    return Candidate(
        pipe=pipe, data=2 ** random.integers(0, 4, count), fsdp=2 ** random.integers(0, 5, count),
        context=2 ** random.integers(0, 4, count), tensor=2 ** random.integers(0, 4, count),
        context_by=random.choice(["gather", "ring"], count), ulysses=np.ones(count, int),
        zero_context=random.random(count) < 0.5,
        zero=random.integers(0, 4, count),
        sequence=random.random(count) < 0.5, schedule=name, chunks=np.where(name == "interleaved_phased", 2, 1),
        microbatch=2 ** random.integers(0, 3, count), microbatches=pipe * 2 ** random.integers(1, 5, count),
        remat=random.choice(["none", "dots", "selective", "full"], count), head=np.full(count, "last"),
    )  # fmt: skip


def test_planning_needs_no_jax():
    modules = "candidate enumeration machine.hardware machine.software memory model.shape techniques.table time".split()
    code = f"import sys, {', '.join(f'jaxpar.plan.{name}' for name in modules)}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.nightly
def test_a_hundred_thousand_layouts_take_seconds():
    many = _layouts(np.random.default_rng(4), 100_000)
    start = time.process_time()
    assert np.isfinite(step_time(LLAMA_70B, many, H100, JAXPAR).total).all()
    assert time.process_time() - start < 4


@pytest.mark.nightly
@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    faster=st.floats(1.0, 50.0, **FINITE),
    part=st.sampled_from(["peak", "memory", "inside", "between", "streaming", "launch", "gemm"]),
    software=st.sampled_from([MEGATRON_2022, TORCHTITAN, JAXPAR]),
)
def test_better_hardware_is_never_slower(seed, faster, part, software):
    link = lambda old: Link(latency=old.latency / faster, bandwidth=old.bandwidth * faster)  # noqa: E731
    chip = H100.chip
    better = {
        "peak": lambda: cap(H100, peak=chip.bf16_flops * faster, bandwidth=chip.bandwidth, source=""),
        "memory": lambda: cap(H100, peak=chip.bf16_flops, bandwidth=chip.bandwidth * faster, source=""),
        "inside": lambda: replace(H100, inside=link(H100.inside)),
        "between": lambda: replace(H100, between=link(H100.between)),
        "streaming": lambda: replace(H100, streaming=min(1.0, H100.streaming * faster)),
        "launch": lambda: replace(H100, launch=H100.launch / faster),
        "gemm": lambda: replace(H100, gemm=replace(H100.gemm, half=H100.gemm.half / faster)),
    }[part]()
    many = _layouts(np.random.default_rng(seed), 50)
    before, after = (step_time(LLAMA_8B, many, hardware, software).total for hardware in (H100, better))
    assert (after <= before * (1 + 1e-12)).all()


@pytest.mark.nightly
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_more_work_is_never_faster(seed):
    many = _layouts(np.random.default_rng(seed), 50)
    stay = replace(
        JAXPAR, stacking_traffic=0.0
    )  # else what is kept is moved, which can take longer than to compute it again
    before = step_time(LLAMA_8B, many, H100, stay).total
    for more in (
        replace(many, microbatch=2 * many.microbatch),
        replace(many, microbatches=2 * many.microbatches),
        replace(many, remat="full"),
    ):
        assert (step_time(LLAMA_8B, more, H100, stay).total >= before * (1 - 1e-12)).all()
    # where traffic sets the pace both are equal but for rounding, here too
    assert (step_time(LLAMA_8B, many, H100, JAXPAR).total >= before * (1 - 1e-12)).all()


def test_published_runs():
    runs = [predict(run) for run in published()]
    megatron = [abs(run["error"]) for run in runs if run["system"] == "Megatron-LM"]
    assert len(megatron) == 8
    assert sum(megatron) / 8 <= BOUNDS["Megatron-LM mean"] == 0.04
    assert max(megatron) <= BOUNDS["Megatron-LM max"] == 0.09
    h100 = [abs(run["error"]) for run in runs if run["gpu"].startswith("H100")]
    assert len(h100) == 5
    assert max(h100) <= BOUNDS["H100 max"] == 0.15


def test_published_runs_fill_the_machines_they_name():
    for run in published():
        shape, candidate, _, _, seconds = read(run)
        assert candidate.devices == int(run["gpus"])
        assert candidate.microbatch * candidate.microbatches * candidate.replicas == int(run["global_batch"])
        assert seconds > 0
        named, unit = re.search(r"(\d+)([BT])$", run["model"]).groups()
        assert shape.parameters == pytest.approx(float(named) * {"B": 1e9, "T": 1e12}[unit], rel=0.02)


def test_without_overlap_sharding_is_all_exposed():
    candidate = Candidate(fsdp=128, zero=3, microbatch=2, remat="full")
    none, most = (
        step_time(LLAMA_70B, candidate, H100, replace(MAXTEXT, overlap=overlap, exposed_edge_gathers=False)).sharding
        for overlap in (0.0, 1.0)
    )
    assert none > 1.0
    assert most == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Link(latency=1e-6, bandwidth=0.0), "bandwidth"),
        (lambda: Link(latency=float("nan"), bandwidth=1e9), "latency"),
        (lambda: replace(A100, per_node=0), "per_node"),
        (lambda: replace(A100, streaming=0.0), "streaming"),
        (lambda: replace(A100, launch=-1.0), "launch"),
        (lambda: cap(A100, peak=0.0, bandwidth=1e12, source=""), "bf16_flops"),
        (lambda: cap(A100, peak=1e12, bandwidth=float("nan"), source=""), "bandwidth"),
        (lambda: Gemm(top=1.2, half=0.0, source=""), "top"),
        (lambda: Gemm(top=0.8, half=-1.0, source=""), "half"),
        (lambda: replace(MAXTEXT, overlap=1.5), "overlap"),
        (lambda: replace(MAXTEXT, core=(0.0, 0.5)), "core"),
        (lambda: Candidate(tensor=0), "tensor"),
        (lambda: Candidate(microbatch=1.5), "microbatch"),
        (lambda: Candidate(zero=4), "zero"),
        (lambda: Candidate(remat=np.array(["full", "ful"])), "did you mean 'full'"),
        (lambda: Candidate(schedule="1f1"), "did you mean '1f1b'"),
        (lambda: replace(TINY, heads=3), "heads divide dim"),
        (lambda: replace(TINY, vocab=0), "vocab"),
    ],
)
def test_wrong_numbers_are_refused(make, words):
    with pytest.raises(JaxparError, match=words):
        make()


def test_a_schedule_that_does_not_take_the_numbers_is_refused():
    with pytest.raises(JaxparError, match="multiple"):
        step_time(TINY, Candidate(pipe=4, schedule="interleaved", chunks=2, microbatches=6), A100, JAXPAR)
