"""Paths that jaxpar cannot write are refused, and no folder `gs:` is ever made."""

import importlib.util
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.buckets import is_address
from jaxpar.checkpoint import Checkpoints
from jaxpar.checkpoint.checkpoint_tables import export
from jaxpar.data.spec import Data
from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.check import check
from jaxpar.job.file.parse import load

PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs"}
JOB = """
[mesh]
simulate = 8
[parallel]
data = 8
[train]
steps = 2
global_batch = 8
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    yield
    assert not [name for name in os.listdir() if name.endswith(":")]


@pytest.mark.parametrize("scheme", [*PACKAGES, "gss", "s4"])
@pytest.mark.parametrize("key", ["run.dir", "checkpoint.start_from", "data.path"])
def test_an_address_that_no_installed_package_reads_is_refused_with_its_package(key, scheme, here):
    package = PACKAGES.get(scheme)
    if package and importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    more = ["data.source=text"] if key == "data.path" else ["run.dir=mine"] if key != "run.dir" else []
    job = load(Path("job.toml"), [f"{key}={scheme}://bucket/x", *more])
    words = f"pip install {package}" if package else "did you mean 'gs'" if scheme == "gss" else "gs://, s3://"
    problems = [problem for problem in check(job) if problem.got.startswith(key)]
    assert [words in problem.fix for problem in problems] == [True]
    with pytest.raises(JaxparError, match=words):
        run.train(job)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def loss(model, batch):
    return jnp.sum(model(batch["x"]) ** 2), 8


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_python_refuses_it(here):
    address = "gs://bucket/x"
    step = jp.train_step(jp.compose(Net, jp.Parallel(data=8)), loss, optax.sgd(0.1))
    data = {"x": np.ones([8, 4], np.float32)}
    with pytest.raises(JaxparError, match="pip install gcsfs"):
        jp.fit(step, data, steps=1, batch=8, run=address)
    with pytest.raises(JaxparError, match="pip install gcsfs"):
        jp.fit(step, data, steps=1, batch=8, checkpoints=Checkpoints(start_from=address), run="mine")


@pytest.mark.parametrize("address", ["gs://bucket/x", Path("s3://bucket/x"), "memory://bucket/x"])
def test_single_states_and_exports_stay_on_the_disk(address, here):
    step = jp.train_step(jp.compose(Net, jp.Parallel(data=8)), loss, optax.sgd(0.1))
    with pytest.raises(JaxparError, match="mounted"):
        jp.save(address, jp.init_state(step.layout, optax.sgd(0.1)))
    with pytest.raises(JaxparError, match="mounted"):
        export(Path("mine"), None, Path(address))


@pytest.mark.parametrize("name", ["a:b", "12:30/x", "C:/x", "runs/gs:/x"])
def test_a_folder_with_a_colon_is_one(name):
    assert not is_address(name)
    assert is_address("gs://a")
    assert is_address(Path("gs://a"))


NAMED_TWICE = [
    ["a.txt", "a.txt", "b.txt"],
    ["a.txt", "./a.txt"],
    ["*.txt", "b.txt"],
    [".", "a.txt"],
    ["a.txt", "{}/a.txt"],
]


@pytest.mark.parametrize("path", NAMED_TWICE)
def test_a_file_that_is_named_twice_is_refused(path, here):
    for name in "ab":
        Path(f"{name}.txt").write_text("some text " * 100)
    path = [each.format(Path.cwd()) for each in path]
    with pytest.raises(JaxparError, match=r"names [ab]\.txt twice") as error:
        jp.open_data(Data(source="text", path=path, pattern="*.txt"))
    assert "data.weights" in str(error.value)
    jp.open_data(Data(source="text", path=["a.txt", "b.txt"], weights=(0.75, 0.25)))
