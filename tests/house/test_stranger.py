"""A stranger's folder, notebook and data: what is installed is found, shown whole, and named rightly."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import jaxpar
from jaxpar.cli.main import main
from jaxpar.hlo.source_frames import user_frame
from jaxpar.hlo.text import SourceFrame
from jaxpar.pipeline.draw.draw_schedule import svg
from jaxpar.pipeline.tables.library import schedule
from jaxpar.pipeline.tables.price import OpTimes

ROOT = Path(__file__).parents[2]
TINY = ("model.layers=1", "model.dim=32", "model.heads=4", "train.steps=2", "train.global_batch=8")


def ran(*command, folder, **variables):
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder)} | variables
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Returns a copy of what git has, in a folder of the stranger's own."""
    folder = tmp_path_factory.mktemp("stranger")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if name.startswith(("jaxpar", "configs", "pyproject", "README", "LICENSE")) and os.path.lexists(ROOT / name):
            (folder / "jaxpar" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "jaxpar" / name, follow_symlinks=False)
    return folder


@pytest.fixture
def environment(tmp_path):
    """Returns the programs of a new environment that has pip alone."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "environment")], check=True)
    return tmp_path / "environment" / "bin"


def share_packages(environment):
    """Lets a new environment see what this one has; after pip, whose builds would take their tools from here."""
    (site,) = environment.parent.glob("lib/python*/site-packages")
    packages = str(Path(np.__file__).parent.parent)
    (site / "packages.pth").write_text(f"import site; site.addsitedir({packages!r})\n")


@pytest.mark.full
def test_the_installed_package_wins_over_the_folder_of_a_clone(clone, environment):
    installed = ran(environment / "pip", "install", "-q", "--no-deps", "-I", "-e", "./jaxpar", folder=clone)
    assert installed.returncode == 0, installed.stderr
    (clone / "script.py").write_text("import jaxpar; print(jaxpar.__file__, jaxpar.Parallel)")
    for folder in (clone, clone.parent):
        found = ran(environment / "python", clone / "script.py", folder=folder)
        assert found.stdout.startswith(str(clone / "jaxpar" / "jaxpar" / "__init__.py")), found.stderr


@pytest.mark.nightly
def test_the_wheel_runs_the_first_command_of_the_readme_in_another_folder(clone, environment, tmp_path):
    built = ran(environment / "pip", "wheel", "-q", "--no-deps", "-w", tmp_path / "wheel", "./jaxpar", folder=clone)
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    ran(environment / "pip", "install", "-q", "--no-deps", "-I", wheel, folder=tmp_path)
    share_packages(environment)
    done = ran(environment / "jaxpar", "train", "configs/quickstart.toml", *TINY, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "configs/quickstart.toml: not in this folder; taken from" in done.stderr
    assert (tmp_path / "runs" / "quickstart" / "metrics.jsonl").is_file()
    (tmp_path / "job.toml").write_text(INSPECTED)
    ours = ran(environment / "jaxpar", "inspect", "job.toml", folder=tmp_path)
    assert ours.returncode == 0, ours.stderr
    assert re.search(r"all-reduce.*tensor.*FeedForward.*layers\.py:\d+", ours.stdout), ours.stdout
    (site,) = environment.parent.glob("lib/python*/site-packages")
    (site / "thirdnet.py").write_text(THIRD)
    other = INSPECTED.replace("layers = 1\ndim = 16\nheads = 2", 'name = "thirdnet:Net"')
    (tmp_path / "other.toml").write_text(other)
    theirs = ran(environment / "jaxpar", "inspect", "other.toml", "--allow-import", folder=tmp_path)
    assert theirs.returncode == 0, theirs.stderr
    assert re.search(r"all-reduce.*tensor.*Net.__call__.*thirdnet\.py:14", theirs.stdout), theirs.stdout


INSPECTED = """
[mesh]
simulate = 4
[parallel]
data = 2
tensor = 2
[model]
layers = 1
dim = 16
heads = 2
[data]
seq = 16
[train]
global_batch = 8
"""
THIRD = """from flax import nnx
import jax


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.up = nnx.Linear(32, 128, rngs=rngs)
        self.down = nnx.Linear(128, 32, rngs=rngs)
        self.head = nnx.Linear(32, 256, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(jax.nn.relu(self.up(x)))
        return self.head(x)
"""


def test_lines_of_models_count_wherever_they_are_installed():
    site = "/usr/lib/python3.12/site-packages"
    inner = [
        SourceFrame(f"{site}/flax/nnx/nn/linear.py", 9, "__call__"),
        SourceFrame(f"{site}/jax/_src/lax.py", 1, "dot"),
    ]
    for file in (f"{site}/transformers/models/gpt2/modeling_flax_gpt2.py", "/opt/dist-packages/thirdnet/net.py"):
        model = SourceFrame(file, 7, "__call__")
        assert user_frame([*inner, model, SourceFrame("run.py", 1, "<module>")]) == model
    home = str(Path(jaxpar.__file__).parent)
    ours = SourceFrame(f"{home}/models/layers.py", 7, "__call__")
    assert user_frame([*inner, SourceFrame(f"{home}/step/unpipelined.py", 3, "f"), ours]) == ours


def test_a_job_of_the_help_is_found_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "configs/quickstart.toml"]) == 0
    assert "configs/quickstart.toml: not in this folder; taken from" in capsys.readouterr().err
    assert main(["check", "configs/no_such.toml"]) == 1


def test_a_job_in_the_working_directory_comes_before_the_installed_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.toml").write_text("[train]\nsteps = 0\n")
    monkeypatch.chdir(tmp_path)
    assert main(["check", "configs/quickstart.toml"]) == 1
    assert "train.steps" in capsys.readouterr().err


def test_an_editable_install_puts_the_clone_on_the_path():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"] == {"": "."}  # setuptools hooks into the search otherwise, after folders


@pytest.mark.parametrize("width", [1280, 375])
def test_a_drawing_of_a_schedule_shrinks_to_the_page_of_a_stranger(browser, tmp_path, width):
    drawn = svg(schedule("1f1b", stages=16, microbatches=64), OpTimes(forward=1.0, backward=1.0, weights=1.0))
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><html><meta name=viewport content=width=device-width><body>{drawn}</body></html>")
    browser.show(page, width=width, theme="light")
    seen = "document.querySelector('svg').getBoundingClientRect()"
    assert browser.ask(f"{seen}.right") <= width
    wide, high = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn).groups())
    assert browser.ask(f"{seen}.width / {seen}.height") == pytest.approx(wide / high, rel=0.01)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the folder of a run on arrays of tokens, and what it printed."""
    folder = tmp_path_factory.mktemp("arrays")
    tokens = np.random.default_rng(0).integers(0, 256, (64, 65), np.int32)
    np.savez(folder / "tokens.npz", inputs=tokens[:, :-1], targets=tokens[:, 1:])
    settings = (
        "data.source=arrays",
        "data.path=tokens.npz",
        "data.seq=64",
        "data.held_out=0",
        "train.eval_every=0",
        "run.dir=run",
    )
    command = (sys.executable, "-m", "jaxpar", "train", ROOT / "configs" / "quickstart.toml", *TINY, *settings)
    done = ran(*command, folder=folder, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.full
def test_training_on_simulated_devices_shows_no_speed(saved):
    _, said = saved
    assert " left" in said
    assert not re.search(r"/s\b|/step", said)


@pytest.mark.nightly
def test_an_export_where_the_gpu_compiler_is_and_no_gpu_prints_no_traceback(saved):
    folder, _ = saved
    command = (sys.executable, "-m", "jaxpar", "checkpoint", "export", "run", "--format", "safetensors", "--to", "out")
    done = ran(*command, folder=folder, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr) == (0, "")


def test_ci_names_no_host():
    assert "://" not in (ROOT / ".ci" / "run").read_text()
