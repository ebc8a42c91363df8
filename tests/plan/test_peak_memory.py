"""The planner's peak memory beside XLA's, and what programs no longer keep. `bench.memory` draws layouts."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from bench.memory import compiled

import jaxpar as jp
from jaxpar.job.file.parse import load
from jaxpar.job.plan import question
from jaxpar.mesh.target import missing_plugin
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.software import JAXPAR_FUSED
from jaxpar.plan.memory import memory
from jaxpar.plan.model.layer_bytes import logit_chunks
from jaxpar.plan.model.shape import Shape

gpu_compiler = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
JOB = str(Path(__file__).parents[2] / "configs/gpu_llama_8b_fsdp8.toml")
SMALL = (
    "model.layers=8 model.dim=1024 model.heads=16 model.hidden=2816 model.vocab=32768 data.vocab=32768 data.seq=2048 "
    "train.global_batch=32"
).split()
LAYOUTS = {
    "one stage, ZeRO-3": Candidate(fsdp=8, zero=3, microbatch=4, remat="full"),
    "one stage, ZeRO-3, gathered layers kept": Candidate(fsdp=8, zero=3, microbatch=1, microbatches=4),
    "scores of pieces": Candidate(fsdp=4, context=2, zero=1, microbatch=4, microbatches=2),
    "two chunks": Candidate(
        pipe=2, data=4, schedule="interleaved_phased", chunks=2, microbatches=4, microbatch=2, remat="dots"
    ),
    "ZeRO-2 in a pipeline": Candidate(
        pipe=2, fsdp=2, tensor=2, zero=2, schedule="1f1b_phased", microbatches=8, microbatch=2
    ),
    "scores of pieces on stages": Candidate(
        pipe=2, fsdp=2, context=2, zero=3, schedule="1f1b_phased", microbatches=4, microbatch=4
    ),
}


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full, pytest.mark.slow][n < 2]) for n, name in enumerate(LAYOUTS)]
)
@gpu_compiler
def test_a_peak_is_what_xla_assigns(name):
    job, candidate = load(JOB, SMALL), LAYOUTS[name]
    asked = question(job, devices=8, chip="h100", per_node=None, options={})
    found = compiled(job, asked, candidate)
    assert not found["refusal"]
    assert asked.bytes(candidate).total == pytest.approx(found["bytes"], rel=0.08)


@pytest.mark.nightly
def test_the_gradient_of_logits_is_not_in_float32_where_they_are_not():
    """XLA keeps what stands before a barrier as it is: a cast after it is a second array of the size of all logits."""
    vocab = 640
    model = partial(jp.Decoder, jp.DecoderConfig(vocab=vocab, seq=8, layers=1, dim=16, heads=2))
    step = jp.train_step(jp.compose(model, jp.Parallel(data=8)), jp.next_token_loss, optax.sgd(1.0), precision="bf16")
    tokens = jax.ShapeDtypeStruct((8, 8), jnp.int32)
    text = step.lower(step.abstract(), {"inputs": tokens, "targets": tokens}).as_text()
    kept = re.findall(rf"optimization_barrier [^\n]*?tensor<8x8x{vocab}x(\w+)>", text)
    assert kept
    assert set(kept) == {"bf16"}


def test_logits_are_counted_in_chunks_where_a_step_makes_them_so():
    shape = Shape(layers=2, dim=1024, heads=16, vocab=131072, seq=4096, gated=True)
    here = partial(memory, shape, software=JAXPAR_FUSED)
    whole, chunks = (here(candidate=Candidate(microbatch=rows, microbatches=2)) for rows in (2, 4))
    assert whole.logits == 2 * 2 * shape.seq * shape.vocab  # in 16 bits, their gradient in their place
    assert chunks.logits <= 2**30  # a chunk's, and their gradient
    assert chunks.gradients - whole.gradients == pytest.approx(4 * shape.vocab * shape.dim)


@pytest.mark.parametrize("head", [{"head_bias": True}, {"logits_softcap": 30.0}])
def test_logits_of_a_head_with_a_bias_or_a_softcap_are_counted_without_chunks(head):
    plain = jp.DecoderConfig(vocab=51200, seq=2048, layers=2, dim=1024, heads=16)
    settings = replace(plain, **head)
    shapes = [Shape.from_settings(each) for each in (plain, settings)]
    chunked, whole = (memory(shape, Candidate(microbatch=16), JAXPAR_FUSED).logits for shape in shapes)
    assert chunked <= 2**30
    assert whole == 4 * 16 * 2048 * 51200
    assert logit_chunks(16 * 2048, 51200, JAXPAR_FUSED) > 1
    assert logit_chunks(16 * 2048, 51200, JAXPAR_FUSED, chunked_head=shapes[1].chunked_head) == 1


def test_what_stages_hold_is_the_same_on_all():
    """One program: the last stage, which keeps one microbatch, has slots for as many as the first; each has logits."""
    shape = Shape(layers=16, dim=1024, heads=16, kv_heads=8, hidden=2816, vocab=32768, seq=2048, gated=True)
    four = Candidate(pipe=4, schedule="1f1b_phased", microbatches=8, microbatch=4, remat="full")
    found = memory(shape, four, JAXPAR_FUSED)
    rows = 4 * shape.seq
    assert found.logits == 2 * rows * shape.vocab
    assert found.activations == 2 * rows * shape.dim * (7 * 4 + 8)  # 7 in flight, 4 layers each, and 8 messages
    assert memory(shape, replace(four, microbatches=4), JAXPAR_FUSED).activations < found.activations
    assert HARDWARE["h100"].chip.usable_memory > found.total
