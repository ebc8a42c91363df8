"""A run's page: all that its folder says of it, on any screen, from nowhere else; and no speed of simulated devices."""

import io
import itertools
import json
import subprocess
import sys
from dataclasses import asdict

import jax
import pytest
from browser import CUT, OPEN, PALE, WIDTHS, Reader, shades

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.job.parts.plan_traced import layout_candidate
from jaxpar.job.plan import apply_layout, question
from jaxpar.job.report.page import predict, render
from jaxpar.job.report.read import classify_event, read
from jaxpar.parallel.compose import compose
from jaxpar.plan.search import search
from jaxpar.train.lock import Holder, Lock
from jaxpar.train.progress import Progress, say_and_record

HOSTILE = """<script>alert(1)</script><img src=x onerror=alert(2)>"' onload='alert(3)' &amp; </style></title>"""
FACTS = {
    "devices": "8 x cpu (simulated)",
    "machine": "x86_64, 2 cores, Linux",
    "versions": {"jaxpar": "0.1.0", "jax": "0.12.0"},
    "commit": "abc1234",
    "mesh": {"pipe": 1, "data": 2, "fsdp": 4},
    "parameters": 918656,
    "chosen": ["head: on the last stage"],
    "summary": "Decoder on data 2 x fsdp 4, ZeRO-3",
    "placed": {"embed": "f32[vocab, embed/fsdp]"},
    "layout": {
        "axes": [["fsdp 4", "shards of the training state", "0, 1, 2, 3", "simulated", "gathers 3 MiB"]],
        "cards": [
            {
                "name": "embed/table",
                "more": 2,
                "placed": "f32[vocab, embed/fsdp]",
                "shape": "8×8",
                "kept": "256 B in 2 pieces",
                "less": "",
                "rows": [[{"number": 0, "devices": [0, 4], "more": 0}, {"number": 1, "devices": [1, 5], "more": 9}]],
            }
        ],
    },
    "candidate": {"fsdp": 8, "zero": 3, "microbatch": 4, "remat": "full"},
    "peak": {"compiled": 2**30, "measured": 2**31},
}


def run_folder(path, steps=40, **facts):
    path.mkdir()
    rows = [
        {"step": i, "loss": 5 / i, "grad_norm": 1.0, "tokens": 1000.0, "seconds": 0.5, "tokens_per_second": 2000.0,
         "input_wait_seconds": 0.1, "learning_rate": 1e-3}
        for i in range(1, steps + 1)
    ]  # fmt: skip
    rows[19] |= {"eval_loss": 0.31}
    rows[29] |= {"skipped": True, "loss": None}
    path.joinpath("metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 41, "lo')
    path.joinpath("run.json").write_text(json.dumps(FACTS | facts))
    for name, rate in (("job.0001.toml", 0.001), ("job.toml", 0.002)):
        path.joinpath(name).write_text(f"[train]\nsteps = 50\n[optimizer]\nlearning_rate = {rate}\n")
    said = Progress(50, every=10, events=path / "events.jsonl")
    for step, text in (
        (0, "Decoder on data 2: 919 k parameters, 3 MiB\n2 x cpu"),
        (20, f"stopped by SIGTERM {HOSTILE}"),
    ):
        said._last = step
        said.say(text)
    return path


def test_a_page_says_what_the_folder_says(tmp_path, capsys):
    folder = run_folder(tmp_path / "mine")
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == [
        "step 40, loss 0.1250, best eval loss 0.3100 at step 20, 0 checkpoints, 3 events, 1 changes",
        f"page: {folder / 'report.html'}",
    ]
    page = Reader((folder / "report.html").read_text())
    assert page.wrong == []
    assert not {"script", "img"}.intersection(page.tags)
    for words in ("0.1250", "0.3100", "919 k", "step 30 skipped", "stopped by SIGTERM", "optimizer.learning_rate",
                  "+ 9", "gathers 3 MiB", "3 MiB; 2 x cpu", "1 GiB", "2 GiB",
                  "0.001", "0.002", "Decoder on data 2 x fsdp 4", "f32[vocab, embed/fsdp]", "of 50"):  # fmt: skip
        assert words in page.said, words
    assert "embed/table" in "".join(page.text)  # it may break after a slash
    assert [event.kind for event in read(folder).events] == ["start", "fault", "fault"]
    drawn = [look for name, look in page.attributes if name == "class" and "jx-point" in look]
    assert len(drawn) == 1  # of one evaluation there is no line to draw


def test_a_killed_process_and_a_resume_are_events_at_their_steps(tmp_path):
    """Of a run that was killed after step 40 and goes on from step 30; step 30 was skipped before that."""
    folder = run_folder(tmp_path / "mine")
    pid = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    ).stdout
    gone = Holder(pid=int(pid), started="1")
    (folder / "lock").write_text(json.dumps(asdict(gone)))
    lines = []
    with Lock(folder, say_and_record(folder, lines.append)):
        progress = Progress(50, every=10, events=folder / "events.jsonl", stream=io.StringIO())
        progress.resume(30)
        progress.say("2 x cpu, mine, on from step 30")
    assert "which is gone: its lock is broken" in lines[0]
    events = [(event.step, event.kind) for event in read(folder).events]
    assert events == [(0, "start"), (20, "fault"), (30, "fault"), (40, "fault"), (30, "start")]


def test_speed_is_shown_of_real_devices_alone(tmp_path):
    simulated, real = (
        Reader(render(read(run_folder(tmp_path / name, devices=devices))))
        for name, devices in (("simulated", "8 x cpu (simulated)"), ("real", "8 x NVIDIA H100"))
    )
    assert "500 ms" in real.said
    assert "planner" in real.said
    assert "2 k per second" in real.said
    assert "waited at most 3.7 s for their batches, 20.0% of the time" in real.said
    assert "waited at most" not in simulated.said
    assert not any(word in simulated.said for word in ("500 ms", "per second", "tokens_per_second"))
    assert "Not shown: devices were simulated" in simulated.said


@pytest.mark.parametrize(
    ("said", "kind"),
    [("step 3 skipped: loss nan", "fault"), ("changed since step 4: a = 1, it was 2", "changed"),
     ("on from step 3: what was saved after it", "start"), ("checkpoint 000200 is saved", "checkpoint"),
     ("noise", "said")],
)  # fmt: skip
def test_events_have_a_kind(said, kind):
    assert classify_event(said) == kind


WRONG = {
    "no run": (lambda folder: (folder / "metrics.jsonl").unlink(), "has no metrics.jsonl"),
    "no step": (lambda folder: (folder / "metrics.jsonl").write_text(""), "is empty"),
    "a broken line": (
        lambda folder: (folder / "metrics.jsonl").write_text('{"step": 1}\n{\n{}\n'),
        "line 2 is no JSON",
    ),
    "a broken job": (lambda folder: (folder / "job.toml").write_text("[train"), "it is no TOML"),
    "a broken layout": (lambda folder: (folder / "run.json").write_text('{"layout": {"cards": [{}]}}'), "run.json"),
    "broken facts": (lambda folder: (folder / "run.json").write_text("{"), "run.json"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_run_is_refused(tmp_path, case):
    folder = run_folder(tmp_path / "mine", steps=30)
    spoil, said = WRONG[case]
    spoil(folder)
    with pytest.raises(jp.JaxparError, match=said):
        render(read(folder))


@pytest.mark.slow
def test_a_layout_is_predicted_as_the_plan_that_it_came_from(tmp_path):
    job = loads("""
        model = {name = "decoder", layers = 4, dim = 64, heads = 4}
        data.seq = 64
        train = {global_batch = 32, precision = "bf16"}
        """)
    asked = question(job, devices=8, chip="h100", per_node=None, options={"attention": "fused"})
    kinds = {}
    for each in search(asked, top=60).best:
        kinds.setdefault((each.candidate.pipe > 1, each.candidate.zero, each.candidate.tensor > 1), each.candidate)
    assert len(kinds) > 5
    for candidate in kinds.values():
        mine = apply_layout(job, candidate, 4)
        layout = compose(resolve_model(mine, resolve_loss(mine)), mine.effective_parallel, jax.devices())
        recorded = json.loads(json.dumps(asdict(layout_candidate(mine, layout))))
        (tmp_path / "job.toml").write_text(dumps(mine))
        said = predict(tmp_path, {"devices": "8 x NVIDIA H100 80GB HBM3", "candidate": recorded})
        causes = said.pop("causes")
        assert said["bytes"] == asked.bytes(candidate).total
        # causes are summed in another order
        assert said["seconds"] == pytest.approx(asked.seconds(candidate).total, rel=1e-12)
        assert sum(causes.values()) == pytest.approx(said["seconds"], rel=1e-6)
    assert predict(tmp_path, {"devices": "8 x cpu (simulated)", "candidate": recorded}) == {"why": "simulated devices"}


@pytest.mark.slow
def test_in_a_browser_nothing_of_a_run_is_cut_off_pale_or_run(browser, tmp_path):
    file = tmp_path / "run.html"
    file.write_text(render(read(run_folder(tmp_path / "mine", commit=HOSTILE))))
    for width, theme in itertools.product(WIDTHS.values(), ("light", "dark")):
        browser.show(file, width=width, theme=theme)
        browser.ask(OPEN)
        browser.picture(file.with_suffix(".png"))
        assert shades(file.with_suffix(".png")) > 16
        assert browser.ask("document.documentElement.scrollWidth") <= width
        assert browser.ask(CUT) == []
        assert browser.ask(PALE) == []
        assert browser.complaints(file) == []
