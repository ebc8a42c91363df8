"""A plan of a job that trains a part of its parameters: the rest has no gradients, no update, and 4 FLOP for 6."""

from pathlib import Path

import pytest

from jaxpar.job.file.parse import load
from jaxpar.job.inspect import observe
from jaxpar.job.plan import question
from jaxpar.mesh.target import missing_plugin, parse_target
from jaxpar.plan.candidate import Candidate

EIGHT_B = Path(__file__).parents[2] / "configs" / "gpu_llama_8b_fsdp8.toml"
LORA = 'train.adapters={rank=16,paths=["blocks/attention/*"]}'
absent = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")


def asked(*words):
    job = load(EIGHT_B, ["train.global_batch=16", *words])
    given = dict.fromkeys(("inside", "between", "memory", "attention"))
    return question(job, devices=8, chip="h100", per_node=None, options=given)


@pytest.mark.parametrize("words", [(LORA,), (LORA.replace("rank=16", 'rank=16,base="int8"'),)], ids=["LoRA", "QLoRA"])
def test_frozen_weights_have_no_gradients_and_no_update(words):
    candidate = Candidate(fsdp=8, zero=3, microbatch=2, remat="full")
    whole, part = (each.seconds(candidate) for each in (asked(), asked(*words)))
    assert 0.65 < part["matmuls"] / whole["matmuls"] < 0.7, "two products for three"
    assert part["attention"] == whole["attention"]
    assert part["optimizer"] < 0.01 * whole["optimizer"]
    assert part["sharding"] <= whole["sharding"]
    assert 0.66 < asked(*words).model.step_flop(16) / asked().model.step_flop(16) < 0.72


def test_a_frozen_embedding_saves_no_product():
    whole, part = (
        asked(*words).seconds(Candidate(fsdp=8, zero=3, microbatch=2)) for words in ((), ('train.freeze=["embed"]',))
    )
    assert part["matmuls"] == whole["matmuls"]


@absent
@pytest.mark.full
def test_a_compiled_program_has_as_many_fewer_products():
    small = [f"model.{name}" for name in ("layers=2", "dim=512", "heads=8", "kv_heads=8", "hidden=2048", "seq=512")]
    small += ["model.vocab=4096", "data.vocab=4096", "data.seq=512", "train.remat=none", "train.accumulate=1"]
    target = parse_target("h100:1x8")
    whole, part = (
        observe(load(EIGHT_B, ["train.global_batch=16", *small, *more]), target).flop for more in ((), (LORA,))
    )
    planned = [asked(*small, *more).model.step_flop(16) for more in ((), (LORA,))]
    assert part.total / whole.total == pytest.approx(planned[1] / planned[0], rel=0.04)
