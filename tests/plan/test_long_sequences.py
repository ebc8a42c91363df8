"""Long rows, planned from outside: whose attention is assumed, how fast every layout is, and when none is worth it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpar.cli.main import main
from jaxpar.job.file.parse import load
from jaxpar.job.plan import question as asked_of
from jaxpar.models.islands import _kernel
from jaxpar.plan.enumeration import select
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.software import JAXPAR, JAXPAR_FUSED
from jaxpar.plan.model.layer_bytes import layer_bytes
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model_protocol import Transformer
from jaxpar.plan.pages.html import write
from jaxpar.plan.pages.terminal import hopeless, page
from jaxpar.plan.search import Question, search
from jaxpar.plan.speed import LOW, WAITING, improvements, speed

ROOT = Path(__file__).parents[2]
JOB = str(ROOT / "configs/gpu_llama_8b_fsdp8.toml")
LARGE = str(ROOT / "configs/gpu_llama_405b_pipe16_fsdp4_tensor8.toml")
H100 = HARDWARE["h100"]
LLAMA_8B = Shape(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, seq=32768, gated=True)


def asked(**given):
    usual = {"model": Transformer(shape=LLAMA_8B), "devices": 64, "rows": 8, "hardware": H100}
    return Question(**usual | {"software": JAXPAR_FUSED} | given)


def test_a_plan_has_the_attention_of_a_run_unless_it_is_compiled():
    job = load(JOB, [])
    given = lambda attention: asked_of(job, devices=8, chip="h100", per_node=None, options={"attention": attention})  # noqa: E731
    assert given(None).software == given("fused").software == JAXPAR_FUSED
    assert given("unfused").software == JAXPAR


def test_fused_attention_plans_context_too_and_prices_it_as_it_runs():
    """Gathered keys have scores that are kept: such a layout costs the same whichever is asked for. Pieces that travel
    have the kernel too.
    """
    fused, plain = asked(), asked(software=JAXPAR)
    layouts = fused.legal()
    gathers = layouts.context_by == "gather"
    cut = select(layouts, np.flatnonzero((layouts.context > 1) & gathers)[::17])
    far = select(layouts, np.flatnonzero((layouts.context > 1) & ~gathers)[::17])
    whole = select(layouts, np.flatnonzero(layouts.context == 1)[::17])
    assert min(len(cut.context), len(far.context)) > 100
    assert (fused.seconds(far).total < plain.seconds(far).total).all()
    np.testing.assert_array_equal(fused.seconds(cut).total, plain.seconds(cut).total)
    np.testing.assert_array_equal(fused.bytes(cut).total, plain.bytes(cut).total)
    assert (fused.seconds(whole).total < plain.seconds(whole).total).all()
    kept = [layer_bytes(LLAMA_8B, whole, software)[1] for software in (JAXPAR_FUSED, JAXPAR)]
    assert (kept[0] < kept[1]).all()


@pytest.mark.parametrize(("words", "said"), [
    ([], "attention: cuDNN's kernel, which keeps no scores; where context cuts sequences XLA's own"),
    (["--attention", "unfused"], "attention: XLA's own, which keeps the scores"),
])  # fmt: skip
def test_the_report_says_whose_attention_it_assumes(words, said, capsys):
    assert main(["plan", JOB, "--devices", "8", "--top", "1", *words]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("attention", [pytest.param("fused", marks=pytest.mark.slow), "unfused"])
def test_what_is_compiled_is_what_the_plan_recommends(attention, monkeypatch, capsys):
    """The first layouts of the same table, with a stand-in for cuDNN's kernel where the plan is of that."""
    compiled, words = [], ["plan", JOB, "--devices", "8", "--top", "2", "--attention", attention]

    def observe(job, target):
        sizes = job.parallel.sizes
        compiled.append(
            (sizes["fsdp"], sizes["context"], sizes["tensor"], job.train.accumulate, _kernel.get() is not None)
        )
        return SimpleNamespace(total=60 * 2**30, memory=(), timeline=None, flop=SimpleNamespace(squeezed=0, total=1))

    monkeypatch.setattr("jaxpar.job.inspect.observe", observe)
    assert main(words) == 0
    before = capsys.readouterr().out
    assert main([*words, "--verify", "2"]) == 0
    after = capsys.readouterr().out
    table = [line for line in before.splitlines() if line.startswith(("  1  ", "  2  "))]
    assert table == [line for line in after.splitlines() if line.startswith(("  1  ", "  2  "))]
    meant = asked_of(load(JOB, []), devices=8, chip="h100", per_node=None, options={"attention": attention})
    first = [ranked.candidate for ranked in search(meant, top=2).best]
    rows = meant.rows // (first[0].data * first[0].fsdp)
    assert compiled[0] == (
        first[0].fsdp,
        first[0].context,
        first[0].tensor,
        rows // first[0].microbatch,
        attention == "fused",
    )
    assert [(each.fsdp, each.context, each.tensor) for each in first] == [each[:3] for each in compiled]


@pytest.mark.nightly
def test_every_layout_shows_step_throughput_mfu_and_bubble(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main(["plan", JOB, "--devices", "64", "--top", "12", "train.global_batch=64", "--json", str(out)]) == 0
    text, found = capsys.readouterr().out, json.loads(out.read_text())
    head = next(line for line in text.splitlines() if "against the first" in line)
    assert [word in head for word in ("step", "tokens/s", "MFU", "per device")] == [True] * 4
    flop = load_flop()
    for row in found["best"]:
        seconds = sum(row["seconds"].values())
        assert row["speed"]["rate"] == pytest.approx(64 * 4096 / seconds)
        assert row["speed"]["mfu"] == pytest.approx(flop / seconds / (64 * H100.chip.bf16_flops))
        piped = row["pipe"] > 1
        assert row["speed"]["bubble"] == (pytest.approx(row["seconds"]["bubble"] / seconds) if piped else None)
    assert f"{found['best'][0]['speed']['mfu']:.1%}" in text


def load_flop():
    asked = asked_of(load(JOB, ["train.global_batch=64"]), devices=64, chip="h100", per_node=None, options={})
    return asked.model.step_flop(64)


@pytest.mark.nightly
def test_bubbles_stand_beside_the_layouts_that_have_them():
    # without the kernel for pieces that travel, beside which pipelines are among the first 40
    plan = search(asked(rows=16, software=replace(JAXPAR_FUSED, ring_kernel=None)), top=40)
    rows = page(plan).partition("bubble")[2].splitlines()
    piped = [i for i, each in enumerate(plan.best, 1) if each.candidate.pipe > 1]
    assert piped
    for i in piped:
        assert f"  {speed(plan.question, plan.best[i - 1]).bubble:.0%}  " in rows[i]


@pytest.mark.full
def test_too_few_rows_of_128k_tokens_on_16384_gpus_are_called_hopeless_with_what_would_help(capsys):
    """Half of the batch that Llama 3 ran there: with all of it, and cuDNN's kernel for the pieces, MFU is 36 %."""
    words = ["plan", LARGE, "--devices", "16384", "data.seq=131072", "train.global_batch=64", "--top", "1"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "The first choice is hopeless as it is asked: MFU" in text
    helps = text.partition("What would help:\n")[2].partition("\n\n")[0].splitlines()
    assert any("train.global_batch=" in line for line in helps)
    assert any("--devices" in line for line in helps)


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize(("given", "wanted"), [
    ({"rows": 128}, False),
    pytest.param({"devices": 2048}, True, marks=pytest.mark.full),
    ({"hardware": replace(H100, between=replace(H100.between, bandwidth=1e8))}, True),
])  # fmt: skip
def test_a_first_choice_is_called_hopeless_by_mfu_and_bubble_alone(given, wanted):
    plan = search(asked(**given), top=1)
    fast = speed(plan.question, plan.best[0])
    assert fast.hopeless is (fast.mfu < LOW or (fast.bubble or 0) > WAITING) is wanted
    assert bool(hopeless(plan)[0]) is wanted
    assert ("hopeless" in page(plan)) is wanted
    assert ("hopeless" in write(plan, title="plan")) is wanted
    for way in improvements(plan.question, plan.best[0]) if wanted else ():
        assert way.speed.mfu > 1.1 * fast.mfu
