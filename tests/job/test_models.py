"""Models that a job names: whatever `jp.compose` takes, and what makes it."""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from misuse import BATCH

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.job.run import train

jp.simulate(8)

batches = [BATCH]
WIDTH = 24


@dataclass(frozen=True)
class Config:
    width: int = 16


class Typed(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10, name="out")(nn.Dense(self.config.width, name="hidden")(x))


class Untyped(Typed):
    config: Any


class Nnx(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, config.width, rngs=rngs)
        self.out = nnx.Linear(config.width, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.hidden(x))


def returns_blueprint(width: int = WIDTH):
    return jp.from_linen(Typed(Config(width)), np.zeros([1, 64], np.float32))


def returns_module(config: Config):
    return Typed(config)


def linen_of_rngs(rngs: nnx.Rngs):
    return Typed(Config(WIDTH))


def linen_of_settings_and_rngs(config: Config, *, rngs: nnx.Rngs):
    return Typed(config)


def blueprint_of_rngs(rngs: nnx.Rngs, width: int = WIDTH):
    return returns_blueprint(width)


def wide() -> Config:
    return Config(WIDTH)


def returns_text():
    return "Net"


small = Config(WIDTH)
module = Typed(small)
blueprint = returns_blueprint()

JOB = """
[mesh]
simulate = 8
[parallel]
data = 8
[data]
source = "test_models:batches"
[train]
steps = 2
global_batch = 16
loss = "classify"
[model]
name = "test_models:{name}"
"""
TABLE, NAMED = f"[model.config]\nwidth = {WIDTH}", f'[model.config]\nname = "test_models:Config"\nwidth = {WIDTH}'


def blueprint_of(name, settings=""):
    job = loads(JOB.format(name=name) + settings, allow_import=True)
    return jp.compose(resolve_model(job, resolve_loss(job)), job.parallel).blueprint


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("blueprint", ""),
        ("module", ""),
        ("returns_blueprint", ""),
        ("returns_blueprint", f"width = {WIDTH}"),
        ("returns_module", TABLE),
        ("Typed", TABLE),
        ("Typed", 'config = "test_models:small"'),
        ("Untyped", NAMED),
        ("Untyped", 'config = "test_models:wide"'),
        ("Nnx", TABLE),
        ("linen_of_rngs", ""),
        ("linen_of_settings_and_rngs", TABLE),
        ("blueprint_of_rngs", ""),
        ("blueprint_of_rngs", f"width = {WIDTH}"),
    ],
)
def test_a_job_takes_a_model_as_python_does(name, settings):
    assert blueprint_of(name, settings).leaves["hidden/kernel"].shape == (64, WIDTH)


def test_a_job_reads_the_dims_of_an_nnx_model_from_what_its_loss_does_with_it():
    job = loads(JOB.format(name="Nnx").replace("data = 8", "tensor = 8", 1) + TABLE, allow_import=True)
    layout = jp.compose(resolve_model(job, resolve_loss(job)), job.parallel)
    assert layout.describe("hidden/kernel") == "f32[embed, mlp/tensor]"
    assert layout.describe("out/kernel") == "f32[mlp/tensor, embed]"


def test_a_job_reads_the_dims_of_a_model_that_it_names_from_use_too():
    text = (
        "[data]\nsource = 'photographs'\n[train]\nloss = 'classify'\n[model]\nname = 'unet'\nclasses = 3\nlevels = 2\n"
    )
    job = loads(text + "[mesh]\nsimulate = 8\n[parallel]\ntensor = 8\n")
    layout = jp.compose(resolve_model(job, resolve_loss(job)), job.parallel)
    assert layout.describe("down/1/conv1/kernel") == "f32[3, 3, embed, channels/tensor]"
    assert layout.describe("down/1/conv2/kernel") == "f32[3, 3, channels/tensor, embed]"


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("blueprint", "width = 8", "made already"),
        ("Typed", "[model.config]\nwidht = 8", "its keys: width"),
        ("returns_text", "", "returned str"),
    ],
)
def test_settings_that_no_model_takes_are_refused(name, settings, words):
    with pytest.raises(JaxparError, match=words):
        blueprint_of(name, settings)


@pytest.mark.nightly
def test_a_job_trains_the_linen_module_of_a_function_of_rngs(tmp_path):
    words = [f"run.dir={tmp_path / 'run'}", "train.steps=1"]
    job = loads(JOB.format(name="linen_of_rngs"), words, allow_import=True)
    assert train(job, stream=io.StringIO())["step"] == 1


def test_a_linen_module_of_rngs_without_an_example_is_refused_with_the_way_out():
    with pytest.raises(JaxparError, match=r"jp.from_linen\(Typed\(\.\.\.\), jnp.zeros"):
        jp.compose(linen_of_rngs, jp.Parallel(data=8))
