"""What XLA is told about the collectives of several GPUs: who reads it, what is left out, what the record says."""

import json
from functools import cache, partial
from pathlib import Path

import jax
import optax
import pytest
from tiny import Staged

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.inspector import compiled
from jaxpar.job.file.parse import loads
from jaxpar.mesh.target import missing_plugin
from jaxpar.mesh.xla import OVERLAPPED, compile_with, options

absent = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
TOLD = {option.name: option.value for option in OVERLAPPED}
AT_ONCE = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}


def step(devices, **numerics):
    layout = jp.compose(partial(Staged, layers=2), jp.Parallel(fsdp=-1), devices)
    return jp.train_step(layout, jp.next_token_loss, optax.sgd(0.1), **numerics)


@absent
def test_several_gpus_are_told_and_one_key_turns_it_off():
    eight = jp.target_devices("h100:1x8")
    assert step(eight).compiler.options == TOLD
    assert step(eight, collectives="plain").compiler.options == {}
    assert step(eight[:1]).compiler.options == {}


@absent
@pytest.mark.parametrize(
    ("by", "more"),
    [
        pytest.param("ring", AT_ONCE, marks=pytest.mark.slow),
        ("auto", AT_ONCE),
        ("gather", {}),
        pytest.param("ulysses", {}, marks=pytest.mark.slow),
    ],
)
def test_a_ring_has_keys_and_gradients_under_way_at_once(by, more):
    settings = jp.DecoderConfig(seq=16, layers=1, dim=16, heads=8)
    parallel, devices = jp.Parallel(context=8, context_by=by), jp.target_devices("h100:1x8")
    layout = jp.compose(partial(jp.Decoder, settings), parallel, devices)
    assert jp.train_step(layout, jp.next_token_loss, optax.sgd(0.1)).compiler.options == TOLD | more
    assert jp.train_step(layout, jp.next_token_loss, optax.sgd(0.1), collectives="plain").compiler.options == {}


def test_simulated_devices_are_told_nothing():
    assert options(jax.devices(), "overlapped") == step(jax.devices()).compiler.options == {}


def test_a_job_says_it_with_one_key():
    assert loads("").train.collectives == "overlapped"
    assert loads("", ["train.collectives=plain"]).train.collectives == "plain"
    with pytest.raises(JaxparError, match="collectives is one of overlapped, plain"):
        step(jax.devices(), collectives="plane")


class Lowered:
    """Compiles for a version of XLA that has only some options."""

    def __init__(self, *known):
        self.known, self.seen = known, []

    def compile(self, compiler_options=None):
        self.seen.append(dict(compiler_options or {}))
        for name in compiler_options or {}:
            if name not in self.known:
                raise jax.errors.JaxRuntimeError(f"INVALID_ARGUMENT: No such compile option: '{name}'")
        return "program"


def test_an_option_that_xla_has_not_is_left_out_and_said():
    first, *others = TOLD
    lowered = Lowered(*others)
    with pytest.warns(UserWarning, match=f"no option {first}: compiled without it"):
        assert compile_with(lowered, TOLD) == "program"
    assert lowered.seen == [TOLD, {name: TOLD[name] for name in others}]


def test_an_inspection_leaves_it_out_too_and_says_so():
    first, *others = TOLD
    program, said = compiled._compile(Lowered(*others), TOLD)
    assert (program, len(said)) == ("program", 1)
    assert first in said[0]


def test_what_a_preset_cannot_mend_is_raised():
    class Failing:
        def compile(self, compiler_options=None):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_with(Failing(), TOLD)


@cache
def recorded():
    (file,) = (Path(__file__).parents[1] / "bench/records").glob("collectives_*.json")
    return json.loads(file.read_text())["table"]


def test_in_the_record_what_the_preset_does_exposes_less_communication_and_in_no_job_more():
    ratios = [
        ways["combine 8 MiB"]["exposed_seconds"] / ways["plain"]["exposed_seconds"] for ways in recorded().values()
    ]
    assert len(ratios) >= 4
    assert max(ratios) < 1.001
    assert min(ratios) < 0.9


def test_in_the_record_what_is_left_out_is_worse_in_some_job_or_does_not_compile():
    for way in ("combine 128 MiB", "collective matmul", "O1", "no latency hiding"):
        rows = [(ways[way], ways["plain"]) for ways in recorded().values() if way in ways]
        assert any("absent" in row or row["exposed_seconds"] > plain["exposed_seconds"] for row, plain in rows), way
