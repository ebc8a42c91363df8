"""A plan for any number of GPUs that people rent: its layouts are those that jaxpar stores and runs."""

import contextlib
import io
import random
import re
import shlex
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job.file.parse import load
from jaxpar.job.plan import apply_layout, command
from jaxpar.mesh.target import missing_plugin
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.enumeration import select_one
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model_protocol import Transformer

SETTINGS = [
    jp.DecoderConfig(vocab=32768, dim=1536, layers=6, heads=12, kv_heads=4, hidden=4096, seq=2048, gated=True),
    jp.DecoderConfig(vocab=50304, dim=1600, layers=5, heads=25, seq=1024, position="learned", use_bias=True),
    jp.DecoderConfig(vocab=1000, dim=96, layers=6, heads=6, seq=96),
]


def composes(settings, candidate):
    sizes = {axis: getattr(candidate, axis) for axis in ("pipe", "data", "fsdp", "context", "tensor")}
    zero = {"zero": candidate.zero} if candidate.shards > 1 else {}
    over = {"zero_over": "fsdp x context"} if candidate.zero_context else {}
    layers = {}
    if settings.layers % candidate.pipe:
        each, more = divmod(settings.layers, candidate.pipe)
        layers = {"layers": tuple(each + (stage < more) for stage in range(candidate.pipe))}
    pipeline = {"pipeline": jp.Pipeline(microbatches=candidate.microbatches, **layers)} if candidate.pipe > 1 else {}
    parallel = jp.Parallel(**sizes, **zero, **over, **pipeline, sequence=bool(candidate.sequence))
    try:
        jp.compose(partial(jp.Decoder, settings), parallel, candidate.devices)
    except JaxparError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(12, marks=pytest.mark.slow),
        pytest.param(24, marks=pytest.mark.slow),
        100,
        pytest.param(576, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("settings", SETTINGS, ids=["gated", "learned", "small"])
def test_a_layout_is_storable_where_it_composes(settings, devices):
    model = Transformer(shape=Shape.from_settings(settings))
    found = model.legal(devices=devices, rows=devices * 4, choices=Choices(remats=("full",), schedules=("1f1b",)))
    rng, storable = random.Random(devices), np.broadcast_to(model.storable(found), np.shape(found.pipe))
    for wanted in (True, False)[: 1 + (settings.dim > 96)]:  # of a small model some stages need not be equal
        alike = np.flatnonzero(storable == wanted)
        for index in rng.sample(list(alike), min(12, len(alike))):
            candidate = select_one(found, int(index))
            problem = composes(settings, candidate)
            assert (problem == "") == wanted, f"{candidate}: {problem}"


CONFIGS = sorted(Path(__file__).parents[2].glob("configs/*.toml"))
COUNTS = (8, 12, 24, 48, 96, 100, 576, 1000, 16384)
OFTEN = {("gpu_llama_8b_fsdp8", 12), ("pipe2_fsdp2_tensor2", 24), ("digits", 12)}


def said(*words):
    out, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(wrong):
        status = main([*map(str, words)])
    return status, out.getvalue() + wrong.getvalue()


def grid():
    for config in CONFIGS:
        for devices in COUNTS:
            mark = pytest.mark.slow if (config.stem, devices) in OFTEN else pytest.mark.full
            yield pytest.param(config, devices, marks=mark, id=f"{config.stem}-{devices}")


@pytest.mark.spread(0)
@pytest.mark.parametrize(("config", "devices"), [*grid()])
def test_the_first_layout_passes_check_as_it_is_printed_and_as_it_is_written(config, devices, tmp_path):
    """Also where no size of an axis is a power of two. What cannot be planned at all says so, and never a layout."""
    rows = devices * max(1, load(config).train.global_batch // devices)
    words = [f"train.global_batch={rows}", "train.precision=bf16", f"run.dir={tmp_path / 'run'}"]
    written = tmp_path / "planned.toml"
    status, text = said("plan", config, *words, "--devices", devices, "--write", written)
    if status:
        assert "fix:" in text, text
        pytest.skip(f"nothing to check: {text.splitlines()[0]}")
    train = shlex.split(text[text.index("jaxpar train") :].splitlines()[0])
    status, checked = said("check", *train[2:])
    assert status == 0, f"{shlex.join(train)}\n{checked}"
    status, checked = said("check", written)
    assert status == 0, checked
    assert load(train[2], train[3:]) == load(written)


COMPILED = ("gpu_gpt2_124m", "gpu_llama_1b3_fsdp8", "pipe2_fsdp2_tensor2", "zero3_fsdp8", "digits")


def compiled_grid():
    for config in CONFIGS:
        for devices in (8, 12, 24, 48, 100) if config.stem in COMPILED else ():
            often = (config.stem, devices) == ("zero3_fsdp8", 12)
            mark = pytest.mark.slow if often else pytest.mark.full
            yield pytest.param(config, devices, marks=mark, id=f"{config.stem}-{devices}")


@pytest.mark.spread(0)
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
@pytest.mark.parametrize(("config", "devices"), [*compiled_grid()])
def test_the_first_layout_compiles_and_fits(config, devices):
    """As `--verify` compiles it for H100s that are not there: the bytes of XLA's own assignment."""
    rows = devices * max(1, load(config).train.global_batch // devices)
    words = [f"train.global_batch={rows}", "train.precision=bf16"]
    status, text = said("plan", config, *words, "--devices", devices, "--chip", "h100", "--verify", 1)
    assert status == 0, text
    compiled = text[text.index("replayed (seconds") :].splitlines()[1]
    number, unit = re.search(r"; .*?, ([\d.]+) ([KMG])iB \(", compiled).groups()
    size = float(number) / {"K": 2**20, "M": 2**10, "G": 1}[unit]
    assert 0 < size < 80, compiled
    print(f"\n{config.stem} on {devices}: {compiled.strip()}")


def test_a_command_changes_what_a_plan_changes_and_quotes_what_a_shell_would_read():
    job = load(CONFIGS[0], ["parallel.axes.mine=1"])
    made = apply_layout(job, Candidate(fsdp=4, context=2, zero=3, zero_context=True, context_by="ring"), 4)
    words = command("my job.toml", ["data.seq=64", "parallel.context=4"], job, made)
    assert words.startswith("jaxpar train 'my job.toml' data.seq=64 ")
    assert "'parallel.zero_over=\"fsdp x context\"'" in words
    assert "parallel.context=4" not in words
