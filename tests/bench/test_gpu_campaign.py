"""The day a GPU comes, rehearsed without one: every stage with tiny sizes, and all that may befall a run of them."""

import dataclasses
import json
import os
import sys
import time
from types import SimpleNamespace

import jax
import pytest

from bench.command import main as bench
from bench.gpu import day, fitted, identity, predicted, show
from bench.gpu.identity import REHEARSED, Identity, identify, sources
from bench.gpu.jobs import traced
from bench.gpu.jobs.training import REAL, TINY
from bench.gpu.lines import NAME, Lines, read
from bench.gpu.one_stage import main as one_stage
from bench.gpu.one_stage import work
from bench.gpu.process import Ended, run_limited
from bench.gpu.runner import WHOLE, Budget, run
from bench.gpu.stage import Stage
from bench.gpu.stages import machine
from bench.gpu.table import STAGES, chosen
from jaxpar.errors import JaxparError
from jaxpar.hlo.text import parse
from jaxpar.inspector.compiled import compile_program
from jaxpar.inspector.memory_causes import total
from jaxpar.inspector.stand_in_attention import NAME as NAME_OF_STAND_IN
from jaxpar.inspector.subject import step_subject
from jaxpar.inspector.timeline import price_kernels, replay
from jaxpar.mesh.absent_gpus import target_devices
from jaxpar.mesh.target import missing_plugin
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.kernels import Gemm

H100 = Identity("NVIDIA H100 80GB HBM3", "580.1", {"jax": "0.11.2", "jaxlib": "0.11.2"}, "abc")


@pytest.fixture
def nobody(monkeypatch):
    """Starts no process of the stage `machine`: it asks other programs about the machine."""
    monkeypatch.setattr(machine, "said", lambda command, **variables: "12345")


def rehearse(stage, folder):
    stage.run(work(stage, folder, identify(rehearsal=True)))
    return read(folder / NAME)


class KilledError(BaseException):
    """Stands for SIGKILL: nothing handles it, and nothing is written after it."""


MARKS = {"machine": (), "gemm": pytest.mark.slow}
KINDS = {stage.run: stage for stage in STAGES}.values()  # of the three models one


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "stage",
    [pytest.param(stage, id=stage.name, marks=MARKS.get(stage.name, pytest.mark.full)) for stage in KINDS],
)
@pytest.mark.usefixtures("nobody")
def test_a_stage_that_is_killed_goes_on_where_it_stopped(stage, tmp_path, monkeypatch):
    add, wanted = Lines.add, []

    def kill_in_the_second(self, **fields):
        wanted.append(fields["what"])
        if len(wanted) == 2:
            whole = (tmp_path / NAME).read_text()
            (tmp_path / NAME).write_text(whole + '{"stage": "' + fields["stage"])  # a line half written
            raise KilledError
        return add(self, **fields)

    monkeypatch.setattr(Lines, "add", kill_in_the_second)
    with pytest.raises(KilledError):
        rehearse(stage, tmp_path)
    lines = rehearse(stage, tmp_path)
    names = [line["what"] for line in lines]
    assert len(names) == len(set(names)) >= 2
    assert wanted == [names[0], *names[1:2], *names[1:]]  # the one that was cut off is taken again, the first is not
    assert all(line["rehearsal"] and line["sources"] == sources() for line in lines)
    if stage.predict:
        expected = dict(stage.predict(stage.tiny, HARDWARE["h100"]))
        held = show.rows(lines, {stage.name: expected})
        assert {what for _, what, *_ in held} == expected.keys()


def test_kernels_are_what_streams_of_a_gpu_ran_and_gaps_are_between_them():
    names = [("process_name", 1, 0, "/device:GPU:0"), ("thread_name", 1, 7, "Stream #7(Compute)"),
             ("thread_name", 1, 8, "XLA Ops"), ("process_name", 2, 0, "/host:CPU")]  # fmt: skip
    ran = [(1, 7, 0.0, 4.0, "fusion.1"), (1, 7, 6.0, 2.0, "fusion.2"), (1, 7, 7.0, 3.0, ""), (1, 8, 0.0, 9.0, "copy"),
           (2, 7, 4.0, 2.0, "host")]  # fmt: skip
    events = [dict(ph="M", name=kind, pid=pid, tid=tid, args={"name": name}) for kind, pid, tid, name in names]
    for pid, tid, ts, dur, op in ran:
        events.append(dict(ph="X", name="x", pid=pid, tid=tid, ts=ts, dur=dur, args={"hlo_op": op} if op else {}))
    found = list(traced.kernels({"traceEvents": events}))
    assert [kernel.instruction for kernel in found] == ["fusion.1", "fusion.2", ""]
    assert traced.gaps(found) == pytest.approx([2e-6])
    assert traced.by_instruction(found, steps=2) == pytest.approx({"fusion.1": 2e-6, "": 1.5e-6, "fusion.2": 1e-6})


@pytest.mark.slow
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_what_stands_in_for_cudnn_keeps_no_scores_and_kernels_add_up_to_the_timeline():
    """Without cuDNN a program for GPUs has XLA's own attention, whose scores would be most of the memory."""
    job = dataclasses.replace(TINY, seq=512, heads=4, dim=64, vocab=64)
    built = job.on(target_devices("h100:1x1"))
    program = compile_program(step_subject(built.step, built.batch).lowered, built.devices)
    assert total(program) - built.static < 4 * job.batch * job.heads * job.seq**2
    module, of = parse(program.text), (dict(built.step.layout.device_mesh.shape), HARDWARE["h100"].chip, 1)
    prices = price_kernels(module, *of)
    assert sum(prices.values()) == pytest.approx(replay(module, *of).compute)
    kernels = [op for _, op in module.ops() if NAME_OF_STAND_IN in op.attributes]
    assert len(kernels) == 2
    assert {op.name for op in kernels} <= prices.keys()


def test_every_stage_has_a_limit_above_its_estimate_and_sizes_of_both_kinds():
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    for stage in STAGES:
        assert 0 < stage.seconds <= stage.limit <= 240
        assert type(stage.real) is type(stage.tiny)
        assert stage.real != stage.tiny
    assert [stage.name for stage in chosen("gemm, machine")] == ["machine", "gemm"]
    with pytest.raises(JaxparError, match="--only gem"):
        chosen("gem")


def stages(*names, seconds=10.0, limit=30.0):
    return [
        Stage(name=name, seconds=seconds, limit=limit, measures="x", beside="y", real=1, tiny=0, run=print)
        for name in names
    ]


class FakeRun:
    """Stages without processes, on a clock that moves as they say."""

    def __init__(self, folder, *, minutes=10.0, who=H100, **ends):
        self.now, self.ends, self.begun, self.limits = 0.0, ends, [], {}
        self.lines, self.minutes = Lines(folder / NAME, who), minutes

    def start(self, stage, limit):
        self.begun.append(stage.name)
        self.limits[stage.name] = limit
        status, took = self.ends.get(stage.name, (0, 10.0))
        ended = Ended(None, limit, "still waiting") if took > limit else Ended(status, took, "the last line")
        self.now += ended.seconds
        return ended

    def run(self, *names, **keywords):
        budget = Budget(60 * self.minutes, lambda: self.now, self.now)
        return run(stages(*names, **keywords), self.lines, budget, self.start)


def test_what_is_there_for_this_device_version_and_commit_is_skipped(tmp_path):
    assert FakeRun(tmp_path).run("a", "b") == {"a": "measured", "b": "measured"}
    again = FakeRun(tmp_path)
    assert again.run("a", "b", "c") == {"a": "there already", "b": "there already", "c": "measured"}
    assert again.begun == ["c"]
    for key, other in (("device", "NVIDIA H200"), ("driver", "590"), ("versions", {"jax": "0.12"}), ("sources", "d")):
        other = FakeRun(tmp_path, who=dataclasses.replace(H100, **{key: other}))
        assert other.run("a") == {"a": "measured"}


def test_no_stage_is_started_that_does_not_fit_and_a_shorter_one_is(tmp_path):
    fake = FakeRun(tmp_path, minutes=0.5, a=(0, 15.0))
    assert fake.run("a") == {"a": "measured"}
    long, short = stages("long", seconds=20.0)[0], stages("short", seconds=12.0)[0]
    budget = Budget(30.0, lambda: fake.now, 0.0)
    found = run([long, short], fake.lines, budget, fake.start)
    assert found == {"long": "no time left", "short": "measured"}
    assert fake.limits["short"] == 15.0  # never more than is left


def test_a_stage_that_crashes_or_hangs_is_said_and_the_others_run(tmp_path):
    fake = FakeRun(tmp_path, crash=(-11, 1.0), hang=(0, 1e9))
    assert fake.run("crash", "hang", "good") == {
        "crash": "crashed", "hang": "stopped at its limit", "good": "measured"
    }  # fmt: skip
    said = {line["stage"]: line for line in read(tmp_path / NAME)}
    assert (said["crash"]["status"], said["crash"]["said"]) == (-11, "the last line")
    assert (said["hang"]["outcome"], said["hang"]["took_seconds"]) == ("stopped at its limit", 30.0)
    later = FakeRun(tmp_path, crash=(1, 1.0))
    assert list(later.run("crash", "new")) == ["new", "crash"]  # what failed comes last
    assert FakeRun(tmp_path).run("crash") == {"crash": "given up"}


def test_a_stage_that_the_minutes_cut_off_did_not_fail(tmp_path):
    fake = FakeRun(tmp_path, minutes=0.2, slow=(0, 20.0))
    assert fake.run("slow") == {"slow": "out of time"}
    assert FakeRun(tmp_path).run("slow") == {"slow": "measured"}


def test_a_full_disk_stops_the_run_and_leaves_whole_lines(tmp_path, monkeypatch):
    fake = FakeRun(tmp_path)
    fake.run("a")
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    with pytest.raises(JaxparError, match="No space left"):
        fake.run("b", "c")
    assert fake.begun == ["a", "b"]
    monkeypatch.undo()
    assert (tmp_path / NAME).read_text().count("\n") == 1
    assert FakeRun(tmp_path).run("a", "b") == {"a": "there already", "b": "measured"}


def test_a_record_has_a_size_that_it_does_not_outgrow(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.gpu.lines.MOST", 1000)
    lines = Lines(tmp_path / NAME, H100)
    lines.add(stage="a", what="b")
    with pytest.raises(JaxparError, match="the file is full"):
        lines.add(stage="a", what="c", text="x" * 1000)
    assert len(read(tmp_path / NAME)) == 1


def test_at_its_limit_a_process_is_killed_with_all_that_it_started(tmp_path):
    code = (
        "import os, subprocess, sys, time; print('begun', flush=True)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid)); time.sleep(60)"
    )
    ended = run_limited([sys.executable, "-S", "-c", code], limit=1.0, log=tmp_path / "gpu.log", environment=os.environ)
    assert (ended.status, ended.said) == (None, "begun")
    assert (tmp_path / "gpu.log").read_text() == "begun\n"
    child = int((tmp_path / "child").read_text())
    for _ in range(50):
        if not running(child):
            break
        time.sleep(0.02)
    assert not running(child)
    crashed = run_limited(["false"], limit=5.0, log=tmp_path / "gpu.log", environment=os.environ)
    assert crashed.status == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child", "gpu.log"]


def running(number):
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def planned(folder, **changes):
    code = dataclasses.replace(identify(rehearsal=True), **changes)
    predicted.write(folder, "h100", {"gemm": {}}, code, rehearsal=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"sources": "other"}, "sources other"), ({"versions": {"jax": "0.1", "jaxlib": "0.1"}}, "jax 0.1")],
)
def test_a_prediction_of_other_code_or_another_compiler_is_refused(changes, said, tmp_path, capsys):
    planned(tmp_path, **changes)
    assert bench("gpu", ["--rehearse", "--out", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / NAME).exists()


def test_a_prediction_with_tiny_sizes_is_no_prediction_of_a_measurement(tmp_path):
    planned(tmp_path)
    mine = identify(rehearsal=True)
    assert predicted.find(tmp_path, "h100", mine).numbers == {"gemm": {}}
    with pytest.raises(JaxparError, match="stages without 124m"):
        predicted.find(tmp_path, "h100", mine, stages=["gemm", "124m"])
    with pytest.raises(JaxparError, match="rehearsal True, here False"):
        predicted.find(tmp_path, "h100", dataclasses.replace(mine, device=H100.device))
    with pytest.raises(JaxparError, match="chips h100, here h200"):
        predicted.find(tmp_path, "h200", mine)


def test_predictions_of_a_second_chip_stand_beside_those_of_the_first(tmp_path):
    code = identify(rehearsal=True)
    for chip in ("h100", "h200"):
        predicted.write(tmp_path, chip, {"gemm": {}}, code, rehearsal=False)
    predicted.write(tmp_path, "h200", {"124m": {}}, code, rehearsal=False)
    chips = json.loads((tmp_path / predicted.NAME).read_text())["chips"]
    assert {chip: list(stages) for chip, stages in chips.items()} == {"h100": ["gemm"], "h200": ["gemm", "124m"]}
    predicted.write(tmp_path, "h200", {}, dataclasses.replace(code, sources="new"), rehearsal=False)
    assert list(json.loads((tmp_path / predicted.NAME).read_text())["chips"]) == ["h200"]


def test_sources_are_those_of_the_code_and_not_of_records(tmp_path):
    for name, text in {"a.py": "x = 1\n", "bench/b.py": "y = 2\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = sources(tmp_path)
    (tmp_path / "bench" / "predicted.json").write_text("{}")
    sources.cache_clear()
    assert sources(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    sources.cache_clear()
    assert sources(tmp_path) != before
    sources.cache_clear()


def test_predictions_of_sources_that_are_edited_meanwhile_are_not_signed(tmp_path, monkeypatch):
    asked = []

    def identified(*, rehearsal):
        asked.append("identity")
        return dataclasses.replace(identify(rehearsal=rehearsal), sources="before")

    monkeypatch.setattr(day, "identify", identified)
    stage = dataclasses.replace(STAGES[0], predict=lambda sizes, hardware: asked.append("predicted") or iter(()))
    with pytest.raises(JaxparError, match="sources before when it began"):
        day.plan([stage], tmp_path, rehearsal=True)
    assert asked == ["identity", "predicted"]
    assert not [*tmp_path.iterdir()]


def test_without_a_gpu_nothing_is_measured_and_the_way_out_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert bench("gpu", ["--out", str(tmp_path / "gpu")]) == 1
    assert "bench gpu without a GPU" in capsys.readouterr().err
    assert not (tmp_path / "gpu").exists()


def test_the_driver_says_which_gpu_it_is(monkeypatch):
    done = SimpleNamespace(returncode=0, stdout="NVIDIA H100 80GB HBM3, 580.159.04\n", stderr="")
    monkeypatch.setattr(identity, "subprocess", SimpleNamespace(run=lambda *_, **__: done, TimeoutExpired=OSError))
    found = identify(rehearsal=False)
    assert (found.device, found.driver, found.rehearsal) == ("NVIDIA H100 80GB HBM3", "580.159.04", False)


def test_tables_hold_measurements_to_predictions_and_take_no_rehearsal(tmp_path, capsys):
    lines = Lines(tmp_path / NAME, H100)
    lines.add(stage="gemm", what="bf16 8", seconds=1.1)
    code = dataclasses.replace(identify(rehearsal=True), sources=H100.sources)
    predicted.write(tmp_path, "h100", {"gemm": {"bf16 8": {"planner_seconds": 1.0}}}, code, rehearsal=False)
    assert bench("gpu", ["--table", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "One NVIDIA H100 80GB HBM3, driver 580.1, jax 0.11.2, sources abc." in said
    assert "| gemm | bf16 8 | 1.1 s | planner 1 s (+10.0%) |" in said
    (tmp_path / NAME).unlink()
    Lines(tmp_path / NAME, identify(rehearsal=True)).add(stage="gemm", what="bf16 8", seconds=1.1)
    assert bench("gpu", ["--table", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said == "No run on a GPU is on record yet. 1 lines of a rehearsal are none.\n"


def test_constants_are_fitted_on_matmuls_and_the_smallest_model_and_judged_on_the_others(tmp_path):
    true = dataclasses.replace(HARDWARE["h100"], gemm=Gemm(top=0.75, half=5e9, source="a curve alone"), streaming=0.6)
    lines = Lines(tmp_path / NAME, H100)
    lines.add(stage="gemm", what="curve of bf16", top=0.75, half=5e9, source="here")
    assert fitted.fit(lines.own(), HARDWARE["h100"]) is None
    for name in ("124m", "350m"):
        lines.add(stage=name, what="step", seconds=fitted.seconds(REAL[name], true))
    own = fitted.fit(lines.own(), HARDWARE["h100"])
    assert (own.gemm.top, own.streaming) == (0.75, pytest.approx(0.6))
    judged = fitted.judge(lines.own(), own)
    assert judged.keys() == {"350m"}
    assert judged["350m"][1] == pytest.approx(judged["350m"][0])
    code = dataclasses.replace(identify(rehearsal=True), sources=H100.sources)
    predicted.write(tmp_path, "h100", {"350m": {"step": {"planner_seconds": 0.1}}}, code, rehearsal=False)
    said = show.tables(lines.own(), predicted.all_of(tmp_path))
    assert "memory 0.600 of its bandwidth.\nJudged: 350m " in said


@pytest.mark.nightly
def test_a_rehearsal_goes_from_predictions_to_a_record(tmp_path, monkeypatch, capsys):
    folder = str(tmp_path / "day")
    here = lambda command, *, limit, log, environment: Ended(one_stage(command[3:]), 1.0, "")  # noqa: E731
    monkeypatch.setattr(day, "run_limited", here)
    told = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)  # other tests' devices are made already
    assert bench("gpu", ["--plan", "--rehearse", "--only", "gemm", "--out", folder]) == 0
    assert told == {"jax_platforms": "cpu"}
    monkeypatch.undo()
    monkeypatch.setattr(day, "run_limited", here)
    assert bench("gpu", ["--rehearse", "--only", "gemm", "--out", folder]) == 0
    said = capsys.readouterr().out
    assert "gemm        measured; " in said
    assert "FLOP" not in said
    assert {path.name for path in (tmp_path / "day").iterdir()} == {"predicted.json", NAME, "h100.toml"}
    assert bench("gpu", ["--rehearse", "--only", "gemm", "--out", folder]) == 0
    assert "gemm        there already; " in capsys.readouterr().out


def test_a_rehearsal_prints_no_times_of_a_measurement(tmp_path, capsys):
    who = dataclasses.replace(H100, device=REHEARSED)
    FakeRun(tmp_path, who=who).run("a")
    assert capsys.readouterr().out == "a           x; beside y\na           measured; 590 s left\n"
    assert [line["what"] for line in read(tmp_path / NAME)] == [WHOLE]
    assert jax.devices()[0].platform == "cpu"
