"""Context parallelism as compiled for absent H100s: what each form sends, how much it computes, what it keeps.

With cuDNN's kernel its calls are compiled as they are; nothing of cuDNN is there, and its FLOP and workspace unknown.
"""

import re
from collections import Counter
from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pairwise import some

import jaxpar as jp
from jaxpar.hlo.bytes_accessed import bytes_accessed
from jaxpar.hlo.text import parse
from jaxpar.hlo.trip_counts import walk
from jaxpar.inspector import timeline
from jaxpar.inspector.compiled import compile_program
from jaxpar.mesh.chips import find_chip
from jaxpar.mesh.target import missing_plugin
from jaxpar.models.blocks.fused import BACKWARD, FORWARD
from jaxpar.parallel.techniques.ring_attention.attention import distributed_attention
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import JAXPAR_FUSED
from jaxpar.plan.model import ring_attention as planned
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.context import LayerAttention, ring_collectives, work_share
from jaxpar.sharding.constrain import activation_names

gpu_compiler = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
HEADS, KV_HEADS, HEAD_DIM, SEQ = 8, 2, 128, 32768
RING = "{0,1},{1,2},{2,3}"  # each sends to the next


def attention(ulysses=1, seq=SEQ, context=8, backward=True, kernel="auto"):
    """One layer's attention, lowered for H100s in bf16, and its mesh."""
    devices = np.array(jp.target_devices(f"h100:{context // 8}x8"))
    mesh = Mesh(devices, ("context",), axis_types=(AxisType.Auto,))
    cut = NamedSharding(mesh, P(None, "context"))
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    given = [jax.ShapeDtypeStruct((1, seq, n, HEAD_DIM), jnp.bfloat16, sharding=cut) for n in heads]
    exchanged = partial(distributed_attention, causal=True, ulysses=ulysses, kernel=kernel)

    def run(q, k, v, weight):
        out, back = jax.vjp(exchanged, q, k, v)
        return (out, *back(weight)) if backward else out

    return jax.jit(run, out_shardings=cut), given, mesh


@cache
def compiled(**how):
    run, given, mesh = attention(**how)
    with jax.set_mesh(mesh):
        return jp.inspect(run, *given, mesh=mesh)


@cache
def program(seq, kernel="auto"):
    """As a step with a ring compiles it: with the options of that layout."""
    run, given, mesh = attention(seq=seq, kernel=kernel)
    devices = list(mesh.devices.flat)
    layout = jp.compose(partial(jp.Decoder, jp.DecoderConfig()), jp.Parallel(context=8, context_by="ring"), devices)
    options = jp.train_step(layout, jp.next_token_loss, optax.sgd(0.1)).compiler.options
    with jax.set_mesh(mesh):
        return compile_program(run.lower(*given), devices, compiler_options=options)


def row(ulysses=1, context=8):
    return LayerAttention(seq=SEQ, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, context=context, ulysses=ulysses)


def wire(entries):
    found = Counter()
    for each in entries:
        found[each.kind, each.dtype] += each.step_wire
    return found


CASES = [(8, 1), (8, 8), (8, 2), (64, 1), (64, 8)]  # devices, those that exchange heads
RUN = [(*case, kernel) for case in CASES for kernel in ("auto", "cudnn")]


@gpu_compiler
@pytest.mark.parametrize(("context", "ulysses", "kernel"), some(RUN, [], [(64, 8, "cudnn")]))
def test_what_travels_is_what_theory_says_and_nothing_is_gathered(context, ulysses, kernel):
    report, of = compiled(context=context, ulysses=ulysses, kernel=kernel), row(ulysses, context)
    found, theory = wire(report.ledger), wire(ring_collectives(of))
    if of.ring > 1:  # forward and backward in one program: XLA sends keys on for the first time once for both
        theory["collective-permute", "bf16"] -= 2 * 2 * of.entries(of.sent_kv_heads)
    assert found.keys() == theory.keys()
    for key, size in theory.items():
        assert found[key] == pytest.approx(size, rel=0.002), key
    alltoalls = sum(each.times * each.count for each in report.ledger if each.kind == "all-to-all")
    assert alltoalls == (8 if ulysses > 1 else 0)


@pytest.mark.spread(1)
@gpu_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("kernel", ["auto", "cudnn"])
def test_heads_that_tensor_cuts_are_exchanged_as_they_are_and_examples_stay(kernel):
    """Of a mesh with all three, nothing but heads for tokens travels: nothing is gathered over the others."""
    shape = {"fsdp": 2, "context": 2, "tensor": 2}
    devices = np.array(jp.target_devices("h100:1x8")).reshape(*shape.values())
    mesh = Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * 3)
    cut = NamedSharding(mesh, P("fsdp", "context", "tensor"))
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    given = [jax.ShapeDtypeStruct((2, 1024, n, HEAD_DIM), jnp.bfloat16, sharding=cut) for n in heads]
    named = {"batch": "fsdp", "seq": "context", "heads": "tensor", "kv_heads": "tensor"}

    def run(q, k, v, weight):
        out, back = jax.vjp(partial(distributed_attention, causal=True, ulysses=2, kernel=kernel), q, k, v)
        return out, *back(weight)

    with jax.set_mesh(mesh), activation_names(named, dict(mesh.shape)):
        ledger = jp.inspect(jax.jit(run, out_shardings=cut), *given, mesh=mesh).ledger
    assert {(each.kind, tuple(each.axes)) for each in ledger} == {("all-to-all", ("context",))}
    # a device's piece of q, out and their gradients, and of k, v and theirs, whose one head is repeated: half goes away
    pieces = 4 * HEADS // 2 + 4 * KV_HEADS
    assert sum(each.step_wire for each in ledger) == pytest.approx(pieces * 512 * HEAD_DIM * 2 / 2, rel=0.002)


@pytest.mark.spread(0)
@gpu_compiler
@pytest.mark.parametrize(("context", "ulysses"), some(CASES, [], [CASES[4]]))
def test_keys_and_values_hop_once_less_than_there_are_groups(context, ulysses):
    report, of = compiled(context=context, ulysses=ulysses, backward=False), row(ulysses, context)
    hop = (
        "collective-permute",
        of.ring,
        2 * 2 * of.entries(of.sent_kv_heads),
    )  # keys and values, bf16; doors are fewer
    hops = sum(each.times for each in report.ledger if (each.kind, each.group, each.payload) == hop)
    assert hops == of.ring - 1
    theory = wire(each for each in ring_collectives(of) if not each.backward)
    assert wire(report.ledger) == pytest.approx(theory, rel=0.002)


@pytest.mark.spread(0)
@gpu_compiler
@pytest.mark.parametrize(("context", "ulysses"), some(CASES, [], [(64, 8)]))
def test_a_ring_computes_half_of_the_square(context, ulysses):
    square = 2 * 7 * SEQ**2 / context * HEADS * HEAD_DIM  # q k and shares v, and backward five matmuls more
    share = compiled(context=context, ulysses=ulysses).flop.total / square
    assert 0.5 <= share <= (2 * context + 1) / (4 * context) * 1.01
    assert share <= work_share(row(ulysses, context)) * 1.01


@gpu_compiler
@pytest.mark.nightly
@pytest.mark.parametrize(
    "kernel", [pytest.param("auto", marks=pytest.mark.full), pytest.param("cudnn", marks=pytest.mark.slow)]
)
def test_memory_doubles_with_tokens(kernel):
    held = [program(tokens, kernel).temporary for tokens in (SEQ, 2 * SEQ, 4 * SEQ)]
    for less, more in pairwise(held):
        assert more / less == pytest.approx(2, rel=0.03)


def squares(assignment, piece):
    """Returns the shapes of buffers that have two dims of at least so many tokens."""
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", assignment)}
    assert any(piece in dims or piece * 2 in dims for dims in shapes)
    return [dims for dims in shapes if sum(dim >= piece for dim in dims) > 1]


@gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel", [pytest.param("auto", marks=pytest.mark.full), pytest.param("cudnn", marks=pytest.mark.slow)]
)
def test_no_buffer_has_two_dims_of_a_pieces_tokens(kernel):
    assert not squares(program(4 * SEQ, kernel).assignment, 4 * SEQ // 8)


def around_the_kernel(text):
    """Bytes to and from memory of all kernels but cuDNN's calls and collectives, forward and backward, loops too."""
    module, found = parse(text), 0
    player = timeline._Player(module, {"context": 8}, find_chip("h100"), 8)
    for visit in walk(module):
        op, calls = visit.op, ("while", "conditional", "call", "async-start", *timeline._FREE)
        waits = op.opcode.endswith(("-done", "-update"))
        if visit.in_fusion or op.opcode in calls or waits or "__cudnn" in op.attributes:
            continue
        if not player.collective(visit.computation, op):
            found += bytes_accessed(module, visit.computation, op) * (visit.times or 1)
    return found


@gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ulysses", "near"),
    [
        pytest.param(1, 0.1, marks=pytest.mark.full),
        pytest.param(2, 0.1, marks=pytest.mark.full),
        pytest.param(8, 0.25, marks=pytest.mark.slow),
    ],
)  # 8 devices have copies of 2 heads
def test_a_plan_counts_what_is_made_of_a_kernels_parts_and_the_memory_that_this_takes(ulysses, near):
    run, given, mesh = attention(kernel="cudnn", ulysses=ulysses)
    with jax.set_mesh(mesh):
        found = compile_program(run.lower(*given), list(mesh.devices.flat))
    shape = Shape(layers=1, dim=HEADS * HEAD_DIM, heads=HEADS, kv_heads=KV_HEADS, vocab=1, seq=SEQ)
    one = Candidate(context=8, context_by="ring" if ulysses < 8 else "ulysses", ulysses=ulysses)
    sizes = planned.device_elements(shape, one)
    moved = [JAXPAR_FUSED.ring_kernel.traffic(way, *sizes, ring=8 // ulysses, ulysses=ulysses) for way in (0, 1)]
    assert around_the_kernel(found.text) == pytest.approx(sum(moved), rel=near)
    gradients = 2 * (sizes[0] + 2 * sizes[1]) * (ulysses == 8)  # results of the program, that no ring works in
    kept, worked = planned.residual_bytes(shape, one), planned.backward_bytes(shape, one, JAXPAR_FUSED)
    assert found.temporary == pytest.approx(float(kept + worked) - gradients, rel=near)


@gpu_compiler
@pytest.mark.slow
def test_cudnn_is_called_once_for_own_keys_and_twice_a_turn():
    text = program(4 * SEQ, "cudnn").text
    for target in (FORWARD, BACKWARD):  # own keys, the ring steps of the loop, the last step
        assert text.count(f'custom_call_target="{target}"') == 1 + 2 + 2
    assert "while(" in text


@pytest.mark.spread(1)
@gpu_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("kernel", ["auto", "cudnn"])
def test_what_comes_next_travels_while_a_turn_is_worked_on(kernel):
    """All hops but the gradients' last, which end at home: they start before a walk over blocks, or cuDNN's calls."""
    module = parse(program(4 * SEQ, kernel).text)
    hops, alone = Counter(), 0
    for ops in module.computations.values():
        done = {op.operands[0]: at for at, op in enumerate(ops) if op.opcode == "collective-permute-done"}
        # the last hop has nothing to run beside, and XLA of jax 0.12 does not start it apart
        alone += sum(op.opcode == "collective-permute" and RING in op.attributes for op in ops)
        for at, op in enumerate(ops):
            if op.opcode == "collective-permute-start" and RING in op.attributes:
                between = ops[at : done[op.name]]
                walks = [each for each in between if each.opcode == "while" or "__cudnn$fmha" in each.attributes]
                alone += not walks
                hops[op.arrays[0].dtype] += bool(walks)
    # keys in the first ring step, in the others forward, and backward; gradients in the others, and in the last
    assert hops == {"bf16": 3, "f32": 2}
    assert alone == 1
