"""Compiling for absent GPUs needs nothing of CUDA, and what is read of a program is the same without it."""

import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from pairwise import some

import jaxpar as jp
from jaxpar.inspector import compiled
from jaxpar.mesh import absent_gpus
from jaxpar.mesh.target import missing_plugin

pytestmark = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
SETTINGS = jp.DecoderConfig(vocab=256, seq=64, layers=2, dim=64, heads=4)
READ = ("text", "assignment", "lifetimes", "arguments", "outputs", "aliased", "temporary", "said")
PROGRAMS = {
    "a pipeline": ("h200:1x8", jp.Parallel(pipe=2, fsdp=4, pipeline=jp.Pipeline(microbatches=4)), {}),
    "between nodes": ("h100:2x8", jp.Parallel(data=2, fsdp=8), {"precision": "bf16", "remat": "full"}),
}


def lowered(name):
    target, parallel, numerics = PROGRAMS[name]
    devices = jp.target_devices(target)
    step = jp.train_step(
        jp.compose(partial(jp.Decoder, SETTINGS), parallel, devices), jp.next_token_loss, optax.adamw(1e-3), **numerics
    )
    shape = jax.ShapeDtypeStruct((16, 64), jnp.int32)
    return step.lower(step.abstract(), {"inputs": shape, "targets": shape}), devices


def test_it_is_the_stand_in_that_is_started(tmp_path, monkeypatch):
    script, log = absent_gpus.ASSEMBLER, tmp_path / "log"
    monkeypatch.setattr(absent_gpus, "ASSEMBLER", script.replace("sh\n", f'sh\necho "$*" >> {log}\n', 1))
    program = jax.jit(lambda x: jnp.exp(x @ x))  # an exponential is a function of the library
    mesh = jax.sharding.Mesh(jp.target_devices("h100:1x1"), ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert jp.inspect(program, jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=whole)).total > 0
    assert any("-arch=sm_90" in line and " -o " in line for line in log.read_text().splitlines())


@pytest.mark.nightly
@pytest.mark.parametrize("name", some(PROGRAMS, [], ["between nodes"]))
def test_what_is_read_of_a_program_is_the_same_with_cuda(name, monkeypatch):
    program, devices = lowered(name)
    without = compiled.compile_program(program, devices)
    with tempfile.TemporaryDirectory() as empty:
        monkeypatch.setattr(compiled, "make_toolkit", lambda folder: Path(empty))  # XLA looks elsewhere then
        try:
            with_cuda = compiled.compile_program(program, devices)
        except jp.JaxparError as error:
            pytest.skip(f"this machine has no CUDA: {str(error).splitlines()[0]:.200}")
    for part in READ:
        assert getattr(without, part) == getattr(with_cuda, part), part
