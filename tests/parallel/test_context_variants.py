"""Every form of context parallelism trains as one device does: masks, models and the other axes of a mesh."""

import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some
from tiny import assert_same_arrays, train

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.inspector.subject import step_subject
from jaxpar.job import check
from jaxpar.job.build import assemble
from jaxpar.job.file import parse
from jaxpar.job.parts.batches import abstract_batch
from jaxpar.mesh.target import missing_plugin
from jaxpar.models import layers
from jaxpar.models.islands import attention
from jaxpar.parallel.read_parameter import read_parameter
from jaxpar.parallel.techniques.all_techniques import ModelUse, tracing
from jaxpar.parallel.techniques.base import AttentionChoice
from jaxpar.plan.techniques import auto_context
from jaxpar.sharding.names import Compute
from jaxpar.step.losses import cross_entropy
from jaxpar.train.api import train_step

ROOT = Path(__file__).parents[2]
VOCAB, SEQ, BATCH = 32, 16, 8
LLAMA = jp.DecoderConfig(vocab=VOCAB, seq=SEQ, layers=2, dim=16, heads=4, kv_heads=2, hidden=32)
GPT = jp.DecoderConfig(
    vocab=VOCAB, seq=SEQ, layers=2, dim=16, heads=4, gated=False, position="learned", norm="layer", use_bias=True,
    tied=True, scan=False,
)  # fmt: skip
VIT = jp.ViTConfig(size=8, patch=2, classes=4, layers=2, dim=16, heads=4)
FORMS = {
    "gather": {},
    "ring": {"context_by": "ring"},
    "ulysses": {"context_by": "ulysses"},
    "ring x ulysses": {"context_by": "ring", "ulysses": 2},
}
LAYOUTS = {
    "context 4, data 2": {"context": 4, "data": 2},
    "context 4, fsdp 2": {"context": 4, "fsdp": 2},
    **{f"context 4, fsdp 2, zero {zero}": {"context": 4, "fsdp": 2, "zero": zero} for zero in (0, 1, 2)},
    "context 4, tensor 2": {"context": 4, "tensor": 2},
    "context 4, tensor 2, sequence": {"context": 4, "tensor": 2, "sequence": True},
    "context 4, pipe 2": {"context": 4, "pipe": 2},
    "context 2, tensor 2, pipe 2": {"context": 2, "tensor": 2, "pipe": 2},  # none is left to XLA inside of a ring
    "context 2, fsdp 2, tensor 2": {"context": 2, "fsdp": 2, "tensor": 2},
    "context 8": {"context": 8},
}
MODELS = {"llama": partial(jp.Decoder, LLAMA), "gpt": partial(jp.Decoder, GPT), "vit": partial(jp.ViT, VIT)}
MASKS = {"llama": ("causal", "window", "packed"), "gpt": ("causal", "packed"), "vit": ("full", "full window")}


def possible(form, layout):
    sizes = LAYOUTS[layout]
    ways = {"gather": 1, "ring": 1, "ulysses": sizes["context"], "ring x ulysses": 2}[form] * sizes.get("tensor", 1)
    return ways <= 4  # heads


def documents(count):
    """Rows of several documents, which the mask keeps from predicting each other."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        tokens = rng.integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32)
        begins = (rng.random((BATCH, SEQ + 1)) < 0.2) & (np.arange(SEQ + 1) > 0)
        segments = np.cumsum(begins, axis=1).astype(np.int32)
        last = np.maximum.accumulate(np.where(begins, np.arange(SEQ + 1), 0), axis=1)
        yield {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "mask": (segments[:, 1:] == segments[:, :-1]).astype(np.float32),
            "segments": segments[:, :-1],
            "positions": (np.arange(SEQ + 1) - last)[:, :-1].astype(np.int32),
        }


def rows(count):
    return ({name: batch[name] for name in ("inputs", "targets", "mask")} for batch in documents(count))


def images(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        pixels = rng.normal(size=(BATCH, 8, 8)).astype(np.float32)
        yield {"inputs": pixels, "labels": rng.integers(0, 4, BATCH).astype(np.int32)}


def apart(model, batch):
    """The loss of documents that do not see each other."""
    losses = cross_entropy(model(batch["inputs"], batch["segments"], batch["positions"]), batch["targets"])
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


def run(kind, mask, parallel=None, **settings):
    data = images if kind == "vit" else documents if mask == "packed" else rows
    loss = jp.classification_loss if kind == "vit" else apart if mask == "packed" else jp.next_token_loss
    with pytest.MonkeyPatch.context() as patch:
        if "window" in mask:
            patch.setattr(layers, "attention", partial(attention, window=5))
        devices = None if parallel else jax.devices()[:1]
        return train(MODELS[kind], parallel or jp.Parallel(), devices, loss=loss, data=data, **settings)


@cache
def alone(kind, mask):
    losses, state, _ = run(kind, mask)
    return losses, state.params


CASES = [
    (form, kind, mask, layout, remat)
    for form in FORMS
    for kind, masks in MASKS.items()
    for mask in masks
    for layout in LAYOUTS
    for remat in ("none", "full")
    if possible(form, layout)
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("form", "kind", "mask", "layout", "remat"),
    some(
        CASES,
        [("gather", "vit", "full", "context 4, fsdp 2, zero 0", "none")],
        [
            ("ring", "llama", "window", "context 4, tensor 2, sequence", "none"),
            ("ulysses", "gpt", "causal", "context 2, fsdp 2, tensor 2", "none"),
            ("ring x ulysses", "vit", "full", "context 4, data 2", "none"),
        ],
    ),
)
def test_losses_and_parameters_equal_one_device(form, kind, mask, layout, remat):
    want, params = alone(kind, mask)
    pipeline = {"pipeline": jp.Pipeline(microbatches=2)} if "pipe" in layout else {}
    got, state, _ = run(kind, mask, jp.Parallel(**LAYOUTS[layout], **FORMS[form], **pipeline), remat=remat)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays(state.params, params)


@pytest.mark.nightly
def test_packed_documents_lose_what_each_loses_alone_and_a_flipped_segment_shows():
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(MODELS["llama"](rngs=nnx.Rngs(0)))
    model = jax.jit(lambda *given: nnx.merge(graph, state)(*given))
    (batch,) = documents(1)
    total = float(apart(model, batch)[0])
    whose = [(row, document) for row in range(BATCH) for document in np.unique(batch["segments"][row])]
    rows = {name: np.zeros((len(whose), SEQ), batch[name].dtype) for name in ("inputs", "targets", "mask")}
    for i, (row, document) in enumerate(whose):  # each in a row of its own, which is filled up behind it
        own = batch["segments"][row] == document
        for name, alone in rows.items():
            alone[i, : own.sum()] = batch[name][row][own]
    losses = cross_entropy(model(rows["inputs"]), rows["targets"])
    assert total == pytest.approx(float((losses * rows["mask"]).sum()), rel=1e-5)
    flipped = batch["segments"].copy()
    row, token = np.argwhere(np.diff(flipped, axis=1) > 0)[0]
    flipped[row, token + 1] -= 1
    assert abs(float(apart(model, batch | {"segments": flipped})[0]) - total) > 1e-3


BAD = {
    "a form there is not": ({"context": 8, "context_by": "rign"}, "context_by='rign'.*\n.*gather, ring, ulysses"),
    "nothing to bring together": ({"data": 8, "context_by": "ring"}, "context_by='ring' with context=1 does nothing"),
    "two forms at once": (
        {"context": 8, "context_by": "ring", "how": {"context": "gather"}},
        "context_by='ring' and how=",
    ),
    "groups that are not equal": ({"context": 8, "context_by": "ring", "ulysses": 3}, "ulysses=3 of context=8"),
    "no devices": ({"context": 8, "context_by": "ring", "ulysses": 0}, "ulysses=0 of context=8"),
    "a mix of one": ({"context": 8, "ulysses": 2}, "ulysses=2 with context_by='gather'"),
}


@pytest.mark.parametrize(("declared", "said"), BAD.values(), ids=BAD)
def test_what_cannot_be_declared_is_refused(declared, said):
    with pytest.raises(JaxparError, match=said):
        jp.compose(MODELS["llama"], jp.Parallel(**declared))


def lowered(settings, **parallel):
    layout = jp.compose(partial(jp.Decoder, settings), jp.Parallel(**parallel))
    step = jp.train_step(layout, jp.next_token_loss, optax.sgd(0.1))
    ids = jax.ShapeDtypeStruct((8, settings.seq), np.int32)
    step.lower(step.abstract(), {"inputs": ids, "targets": ids})
    return step


@pytest.mark.parametrize(
    ("changed", "parallel", "said"),
    [
        ({"seq": 24}, {"context": 8, "context_by": "ring"}, "24 queries over context=8 by ring\n.*16 divides.*\n.*32"),
        ({}, {"context": 8, "context_by": "ulysses"}, "4 heads, 2 of keys, over ulysses=8\n.*\n.*ulysses=4"),
    ],
)
def test_tokens_and_heads_that_do_not_divide_are_refused(changed, parallel, said):
    with pytest.raises(JaxparError, match=said):
        lowered(replace(LLAMA, **changed), **parallel)


@pytest.mark.nightly
def test_the_layout_says_which_form_and_why_and_the_step_what_it_found(monkeypatch):
    step = lowered(LLAMA, data=2, context=4, context_by="ulysses")
    assert step.compiler.implementations == ("ulysses: 2 heads of keys are repeated 2 times, 4 are exchanged",)
    assert "context by ulysses: devices exchange heads for tokens" in step.layout.explain()
    step = lowered(LLAMA, data=2, context=4, context_by="auto")
    (said,) = step.compiler.implementations
    assert said.startswith(
        "context by auto: gather, for rows of 16 tokens on NVIDIA H100 SXM, assumed, as no chip is named"
    )
    assert "a layer takes gather " in said
    assert said in step.layout.explain()
    monkeypatch.setattr(auto_context, "SPARE", 1.0)  # no room for scores
    step = lowered(LLAMA, data=2, context=4, context_by="auto")
    assert "context by auto: ulysses, for rows" in step.layout.explain()
    assert "do not fit beside a state of" in step.layout.explain()


def test_the_step_asks_whoever_it_is_handed_and_takes_the_form_that_he_chooses():
    """No room below the plan knows it: what answers `auto` comes from above."""
    layout, calls = jp.compose(MODELS["llama"], jp.Parallel(context=4, data=2, context_by="auto")), []

    def choose(call):
        calls.append(call)
        return AttentionChoice(context_by="ring", ulysses=2, why="as he says")

    def run(params, ids):
        return layout.blueprint.bind(params, {}, partial(read_parameter, layout), Compute())(ids)

    used = ModelUse()
    with jax.set_mesh(layout.device_mesh), tracing(layout, used, choose, saves_activations=True):
        params, _ = jax.eval_shape(layout.blueprint.init, jax.random.key(0))
        text = jax.jit(run).lower(params, next(rows(1))["inputs"]).as_text()
    assert used.forms == {"as he says"}
    assert {(call.seq, call.heads, call.kv_heads, call.layers, call.dtype) for call in calls} == {
        (SEQ, 4, 2, 2, "float32")
    }
    assert "all_to_all" in text
    assert "collective_permute" in text


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "over",
    [
        pytest.param("train.accumulate=4", marks=pytest.mark.slow),
        pytest.param("parallel.pipe=2 parallel.context=4", marks=pytest.mark.full),
        pytest.param("train.remat=full", marks=pytest.mark.full),
    ],
)
def test_a_check_asks_what_a_step_of_the_job_asks(over, monkeypatch):
    path, devices = ROOT / "configs/context8_ring_data1.toml", jax.devices()
    job = parse.load(path, ["parallel.context_by=auto", "train.precision=bf16", *over.split()])
    asked = {"check": [], "step": []}
    for where, module, name in (("check", check, "choose_form"), ("step", train_step, "choose_attention")):
        ask = lambda call, calls=asked[where]: calls.append(call) or auto_context.choose_form(call)  # noqa: E731
        monkeypatch.setattr(module, name, ask)
    check.check(job)
    made = assemble(job, devices)
    step_subject(made, abstract_batch(job))
    forms = [{replace(call, state_bytes=0, chip="") for call in calls} for calls in asked.values()]
    assert forms[0] == forms[1]
    assert forms[0]


def test_no_room_below_the_plan_imports_it_by_name():
    """`lint-imports` sees statements alone."""
    house = Path(jp.__file__).parent
    below = ("parallel", "exchange", "pipeline", "sharding", "optim", "models", "mesh", "cluster", "hlo", "partition")
    by_name = re.compile(r"""["']jaxpar\.plan\.[\w.]+["']""")
    files = [file for room in below for file in (house / room).rglob("*.py")]
    assert len(files) > 100
    assert not [str(file) for file in files if by_name.search(file.read_text())]


@pytest.mark.nightly
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_scores_are_said_to_be_kept_where_keys_are_gathered_and_nowhere_else():
    ids = jax.ShapeDtypeStruct((8, SEQ), np.int32)
    for by, kept in (("gather", True), ("ring", False)):
        parallel, devices = jp.Parallel(context=8, context_by=by), jp.target_devices("h100:1x8")
        step = jp.train_step(
            jp.compose(MODELS["llama"], parallel, devices), jp.next_token_loss, optax.sgd(0.1), precision="bf16"
        )
        (said,) = [note for note in step_subject(step, {"inputs": ids, "targets": ids}).notes if "cuDNN" in note]
        assert ("does not take pieces of a sequence, so scores are kept" in said) == kept
        assert ("in blocks of plain JAX, not by cuDNN's kernel: it has no heads of 4" in said) != kept


def test_a_job_declares_it():
    job = parse.loads('[parallel]\ncontext = 8\ncontext_by = "ring"\nulysses = 2\n[mesh]\nsimulate = 8\n')
    layout = jp.compose(MODELS["llama"], job.parallel)
    assert "context by ring x ulysses 2" in layout.summary()
    assert "2 devices at a time exchange heads, 4 such groups rotate" in layout.explain()
