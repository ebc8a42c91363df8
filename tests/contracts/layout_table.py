"""The table of layouts: a row for each technique, with what every contract of `test_contracts.py` expects of it.

To add a technique, add a `Row` to `ROWS`. It then has all contracts:

    equal        three steps have the losses and parameters of Flax and optax alone, on one device
    bytes        the state on a device takes the bytes that a plan predicts
    restored     its checkpoint is restored under another layout, and back, and goes on as if it had not stopped
    collectives  compiled for eight absent H100s it sends `collectives`: (mesh axes, kind) to payload bytes of a step
    refused      with the fields in `misuse` it is refused, in words that `refusal` matches

A contract that does not hold of a row stands in `exempt`, with the reason.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
import toy_axis
from test_images import Segmenter, images
from test_images import loss as pixel_loss

import jaxpar as jp
from jaxpar.models.settings.experts import ExpertsConfig
from jaxpar.pipeline.tables.library import LIBRARY

CONTRACTS = {"equal", "bytes", "restored", "collectives", "refused"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A layout, and what holds of it."""

    name: str
    parallel: jp.Parallel
    misuse: Mapping[str, Any]
    refusal: str
    collectives: Mapping[tuple[str, str], float] = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)
    model: str = "decoder"
    tier: Literal["every run", "slow", "nightly", "full"] = "nightly"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to train on simulated devices, and a wide one to compile for GPUs."""

    make: Callable[..., Any]
    loss: Callable[..., Any]
    batch: Mapping[str, Any]
    wide: Callable[..., Any] | None = None
    wide_batch: Mapping[str, Any] = field(default_factory=dict)


LAYERS, DIM, VOCAB, SEQ, EXAMPLES = 4, 256, 1024, 128, 16  # of the wide decoder
SMALL = jp.DecoderConfig(vocab=64, seq=16, layers=8, dim=32, heads=8, hidden=64)
WIDE = jp.DecoderConfig(vocab=VOCAB, seq=SEQ, layers=LAYERS, dim=DIM, heads=8, hidden=2 * DIM)
MIXTURE = replace(SMALL, layers=2, experts=ExpertsConfig(count=8, per_token=2, capacity=1.25))
TOKENS = np.random.default_rng(0).integers(0, 64, (EXAMPLES, SMALL.seq + 1)).astype(np.int32)
TEXT = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
WIDE_TEXT = {name: jax.ShapeDtypeStruct((EXAMPLES, SEQ), np.int32) for name in TEXT}
VECTORS = {"x": np.random.default_rng(0).normal(size=(EXAMPLES, 16)).astype(np.float32)}
MODELS = {
    "decoder": Model(
        make=partial(jp.Decoder, SMALL), loss=jp.next_token_loss, batch=TEXT,
        wide=partial(jp.Decoder, WIDE), wide_batch=WIDE_TEXT,
    ),
    "mixture": Model(make=partial(jp.Decoder, MIXTURE), loss=jp.next_token_loss, batch=TEXT),
    "images": Model(make=Segmenter, loss=pixel_loss, batch=images((8, 32, 32, 3), labels=(8, 32, 32))),
    "two matrices": Model(
        make=lambda rngs: toy_axis.Wide(16, 32, rngs=rngs), loss=toy_axis.loss, batch=VECTORS,
        wide=lambda rngs: toy_axis.Wide(rngs=rngs),
        wide_batch={"x": jax.ShapeDtypeStruct((1024, 256), np.float32)},
    ),
}  # fmt: skip

# bytes of one layer of the wide decoder, of a norm, of a table, of all parameters; of an activation of all examples
# [EXAMPLES, SEQ, DIM], and of one number for each token
LAYER = 4 * (4 * DIM * DIM + 3 * DIM * 2 * DIM + 2 * DIM)
NORM, TABLE = 4 * DIM, 4 * VOCAB * DIM
ALL = LAYERS * LAYER + 2 * TABLE + NORM
ACTIVATION, STATISTIC = 4 * EXAMPLES * SEQ * DIM, 4 * EXAMPLES * SEQ
LOOKED_UP = ACTIVATION + 8 * 2 * STATISTIC  # the embeddings of tokens, and two numbers a token of each part of the head
KERNELS = 4 * 2 * 256 * 1024  # of the two matrices

SHARDED = {("fsdp", "reduce-scatter"): ALL, ("fsdp", "all-gather"): ALL}
PIPELINES = [
    {"pipe": 2, "data": 2, "fsdp": 2}, {"pipe": 4, "tensor": 2}, {"pipe": 2, "fsdp": 4, "zero": 1},
    {"pipe": 4, "data": 2}, {"pipe": 2, "fsdp": 2, "tensor": 2}, {"pipe": 2, "fsdp": 4, "zero": 2},
]  # fmt: skip
TIERS = {"1f1b_phased": "slow", "1f1b": "nightly", "interleaved": "nightly", "zb_v": "nightly"}


def pipeline_row(number: int, schedule: str) -> Row:
    """Returns the row of a schedule, with sizes and what a forward saves in turn."""
    pipeline = jp.Pipeline(schedule=schedule, keep=("inputs", "residuals")[number % 2])
    return Row(
        name=f"pipe, {schedule}",
        parallel=jp.Parallel(**PIPELINES[number % len(PIPELINES)], pipeline=pipeline),
        misuse={"pipeline": jp.Pipeline(schedule=schedule, stack="text/blocks")},
        refusal="text/blocks",
        exempt={"collectives": "messages are counted in the schedule's table: tests/pipeline/test_compiled.py"},
        tier=TIERS.get(schedule, "full"),
    )


ROWS = (
    Row(
        name="data", parallel=jp.Parallel(data=8), tier="every run", collectives={("data", "all-reduce"): ALL},
        misuse={"data": 3}, refusal="need 3 devices, 8 are visible",
    ),
    Row(
        name="zero 0", parallel=jp.Parallel(fsdp=8, zero=0), collectives={("fsdp", "all-reduce"): ALL},
        misuse={"zero": 4}, refusal="zero=4",
    ),
    *(
        Row(
            name=f"zero {zero}", parallel=jp.Parallel(fsdp=8, zero=zero), collectives=SHARDED, tier=tier,
            misuse={"fsdp": 1, "data": 8}, refusal=f"zero={zero}",
        )
        for zero, tier in ((1, "nightly"), (2, "slow"), (3, "every run"))
    ),
    Row(
        name="zero 3 in replicas", parallel=jp.Parallel(data=2, fsdp=4),
        misuse={"zero_over": "fsdp x context"}, refusal="zero_over",
        collectives=SHARDED | {("data", "all-reduce"): ALL / 4},
    ),
    Row(
        name="tensor", parallel=jp.Parallel(tensor=8), tier="slow",
        misuse={"tensor": 1, "data": 8, "sequence": True}, refusal="sequence=True",
        collectives={("tensor", "all-reduce"): (4 * LAYERS + 1) * ACTIVATION, ("tensor", "all-gather"): LOOKED_UP},
    ),
    Row(  # 2 each in forward and backward pass of a layer, 2 more to gather inputs again; one for the head
        name="sequence", parallel=jp.Parallel(tensor=8, sequence=True), tier="slow",
        misuse={"sequence": "yes"}, refusal="sequence=",
        collectives={
            ("tensor", "reduce-scatter"): (4 * LAYERS + 1) * ACTIVATION,
            ("tensor", "all-gather"): 6 * LAYERS * ACTIVATION + LOOKED_UP,
            ("tensor", "all-to-all"): 2 * ACTIVATION / 8,  # of what was looked up: columns for tokens, and back
            ("tensor", "all-reduce"): (2 * LAYERS + 1) * NORM,
        },
    ),
    Row(
        name="context, gather", parallel=jp.Parallel(context=8), tier="slow",
        misuse={"context_kernel": "cudnn"}, refusal="context_kernel",
        collectives={
            ("context", "all-gather"): 2 * LAYERS * ACTIVATION,
            ("context", "reduce-scatter"): 2 * LAYERS * ACTIVATION,
            ("context", "all-reduce"): ALL,
        },
    ),
    Row(  # keys and values hop 7 times forward and backward, their gradients 8 times: 44; q, k, v and out and their
        # gradients change places before and after, so that causal attention takes all devices alike: 8
        name="context, ring", parallel=jp.Parallel(context=8, context_by="ring"),
        misuse={"ulysses": 3}, refusal="ulysses=3",
        collectives={("context", "collective-permute"): 52 * LAYERS * ACTIVATION / 8, ("context", "all-reduce"): ALL},
    ),
    Row(
        name="context, ulysses", parallel=jp.Parallel(context=8, context_by="ulysses"),
        misuse={"ulysses": 2}, refusal="ulysses=2",
        collectives={("context", "all-to-all"): 8 * LAYERS * ACTIVATION / 8, ("context", "all-reduce"): ALL},
    ),
    Row(
        name="context, auto", parallel=jp.Parallel(fsdp=2, context=4, context_by="auto"),
        misuse={"context": 1, "fsdp": 8}, refusal="context_by='auto'",
        exempt={"collectives": "those of the form that it chooses, which has a row"},
    ),
    Row(
        name="expert", parallel=jp.Parallel(data=2, expert=4), model="mixture",
        misuse={"expert": 8}, refusal="need 16 devices",
        exempt=dict.fromkeys(("bytes", "collectives"), "a plan traces a mixture: tests/plan/test_expert_costs.py"),
    ),
    Row(
        name="height and width", parallel=jp.Parallel(fsdp=2, height=2, width=2), model="images",
        misuse={"height": 1, "expert": 2}, refusal="has no experts",
        exempt={
            "bytes": "no plan splits pictures; a device's share: tests/parallel/test_images_compiled.py",
            "collectives": "halos depend on kernels: tests/parallel/test_images_compiled.py",
        },
    ),
    Row(
        name="added axis", parallel=jp.Parallel(data=4, axes={"toy": 2}), model="two matrices",
        misuse={"axes": {"toy": 4}}, refusal="need 16 devices",
        collectives={
            ("toy", "all-gather"): KERNELS, ("toy", "reduce-scatter"): KERNELS, ("data", "all-reduce"): KERNELS / 2,
            ("data,toy", "all-reduce"): 4 * (1024 + 256),  # biases
        },
        exempt={"bytes": "tests/house/test_seams_plan.py compares them with the plan of the added technique"},
    ),
    *(pipeline_row(number, schedule) for number, schedule in enumerate(LIBRARY)),
)  # fmt: skip
