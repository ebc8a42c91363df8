"""What is read from others runs nothing, reaches nothing outside, and is shown as what it is.

OBJECTS   jobs that name Python objects
NUMBERS   arrays, weights and tokenizers with code in them
NAMES     that lead out of a run folder, or are HTML
"""

import ast
import json
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.cli.main import main
from jaxpar.data.arrays import load_arrays
from jaxpar.data.tokens import RunTokenizer
from jaxpar.errors import JaxparError
from jaxpar.job.check import check
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.imports import import_object
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.models import resolve_loss
from jaxpar.job.sample import SamplingRequest, sample
from jaxpar.models.huggingface.weights import load as load_pretrained
from jaxpar.pipeline.draw.draw_schedule import svg
from jaxpar.pipeline.tables.library import schedule
from jaxpar.pipeline.tables.price import OpTimes

ROOT = Path(jp.__file__).parent
OWN = """
    import os
    from functools import partial
    from subprocess import run as imported
    open("imported.txt", "w").close()
    class Net:
        def __init__(self, width=4): self.width = width
        def method(self): pass
    def loss(model, batch): return 0.0
    half = partial(Net, 2)
    rows = [{"inputs": [1.0]}]
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working directory with a module and a package of its own, and a virtual environment below it."""
    files = {
        "safe_own.py": OWN, "safe_package/__init__.py": "", "safe_package/deep/models.py": OWN,
        "safe_names/models.py": OWN, "../outside/safe_outside.py": "open('outside.txt', 'w').close()\nclass Net: pass",
        "venv/site/safe_installed.py": "open('installed.txt', 'w').close()\nclass Net: pass",
    }  # fmt: skip
    folder = tmp_path / "home"
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(tmp_path / "outside")
    monkeypatch.syspath_prepend(folder / "venv" / "site")
    monkeypatch.setattr("site.getsitepackages", lambda: [str(folder / "venv" / "site")])
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    yield folder
    for name in [name for name in sys.modules if name.startswith("safe_")]:
        del sys.modules[name]


@pytest.mark.parametrize("module", ["safe_own", "safe_package.deep.models", "safe_names.models"])
@pytest.mark.parametrize("name", ["Net", "Net.method", "loss", "half", "rows"])
def test_objects_of_the_working_directory_are_imported(module, name, home):
    assert import_object(f"{module}:{name}", "model.name", allowed=False) is not None


# the object, where it is said to be
ELSEWHERE = {
    "os:system": "is built into Python", "sys:exit": "is built into Python", "builtins:eval": "is built into Python",
    "subprocess:run": "lies in", "numpy:load": "lies in", "jax.numpy:ones": "lies in", "__main__:x": "__main__ ",
    "safe_outside:Net": "outside", "safe_installed:Net": "venv",
    "safe_own:os.system": "system is of", "safe_own:os.path.join": "os is of os", "safe_own:imported": "of subprocess",
    "safe_own:Net.__init__.__globals__.get": "get is of builtins", "safe_own:rows.append": "append is of builtins",
    "safe_own:loss.__class__": "__class__ is of builtins",
}  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_objects_from_elsewhere_are_named_and_not_imported(name, home):
    with pytest.raises(JaxparError) as caught:
        import_object(name, "train.loss", allowed=False)
    said = str(caught.value)
    assert repr(name) in said
    assert "working directory" in said
    assert "--allow-import" in said
    assert ELSEWHERE[name] in said or (name == "safe_own:os.system" and "built into" in said), said
    assert not {"outside.txt", "installed.txt"} & {path.name for path in home.iterdir()}


@pytest.mark.parametrize(
    "name", ["os:getcwd", "numpy:load", "safe_outside:Net", "safe_installed:Net", "safe_own:imported"]
)
def test_objects_from_elsewhere_are_imported_where_that_is_allowed(name, home):
    assert callable(import_object(name, "train.loss", allowed=True))


@pytest.mark.parametrize(
    "name",
    ["../outside/safe_outside:Net", "/etc/x:y", "a//b:c", "a\0b:c", "safe_own;os:c", ".x:y", "a..b:c", ":x", "x:"],
)
@pytest.mark.parametrize("allowed", [True, False])
def test_a_module_is_no_path(name, allowed, home):
    with pytest.raises(JaxparError, match="by its module, a colon and its name"):
        import_object(name, "train.loss", allowed=allowed)


JOB = '[mesh]\nsimulate = 8\n[parallel]\ndata = 8\n[model]\nname = "mlp"\n[data]\nsource = "digits"\n'


@pytest.mark.slow
@pytest.mark.parametrize("key", ["model.name", "train.loss", "data.source"])
def test_every_key_that_names_an_object_is_guarded(key, home):
    job = loads(JOB, [f"{key}=os:system"])
    assert any(f"{key} = 'os:system'" in problem.got and "--allow-import" in problem.fix for problem in check(job))


def test_the_file_itself_cannot_allow_it(home):
    for text in ("allow_import = true\n" + JOB, JOB + "[allow_import]\nx = true\n"):
        with pytest.raises(JaxparError, match="allow_import"):
            loads(text)
    with pytest.raises(JaxparError, match="allow_import"):
        loads(JOB, ["run.allow_import=true"])
    allowed = loads(JOB, ["train.loss=numpy:mean"], allow_import=True)
    assert resolve_loss(allowed) is np.mean
    assert "allow_import" not in dumps(allowed)
    assert not loads(dumps(allowed)).allow_import


@pytest.mark.slow
def test_the_command_asks_for_the_flag(home, capsys):
    (home / "job.toml").write_text(JOB)
    assert main(["check", "job.toml", "train.loss=os:system"]) == 1
    assert "fix:  --allow-import" in capsys.readouterr().err
    assert (
        main(["check", "job.toml", "train.loss=os:getpid", "--allow-import"]) == 1
    )  # it is no loss, but may be imported
    assert "--allow-import" not in capsys.readouterr().err


def test_a_run_folder_of_others_is_not_trusted_either(home):
    (home / "run").mkdir()
    (home / "run" / "job.toml").write_text('[train]\nloss = "subprocess:run"\n[data]\nsource = "stdlib"\n')
    with pytest.raises(JaxparError, match="--allow-import"):
        sample("run", ["a"], SamplingRequest(tokens=1))


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_nothing_is_unpickled(tmp_path):
    bomb = Bomb(tmp_path / "boom")
    held = np.array([bomb], object)
    np.save(tmp_path / "x.npy", held, allow_pickle=True)
    np.savez(tmp_path / "x.npz", inputs=held)
    (tmp_path / "raw.npz").write_bytes(pickle.dumps(bomb))
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as archive:
        archive.writestr("../../inputs.npy", (tmp_path / "x.npy").read_bytes())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inputs.npy").write_bytes((tmp_path / "x.npy").read_bytes())
    for name in ("x.npy", "x.npz", "raw.npz", "zip.npz", "folder"):
        with pytest.raises(JaxparError, match="Python objects"):
            load_arrays(tmp_path / name)
    (tmp_path / "bpe-300-0.json").write_bytes(pickle.dumps(bomb))
    with pytest.raises(JaxparError, match=r"bpe-300-0\.json"):
        RunTokenizer(tmp_path, "bpe")
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (tmp_path / "config.json").write_text(json.dumps(GPT2))
        (tmp_path / name).write_bytes(pickle.dumps(bomb))
        with pytest.raises(JaxparError, match=name.split(".")[0]):
            load_pretrained(tmp_path)
        (tmp_path / name).unlink()
    assert not (tmp_path / "boom").exists()
    pickle.loads(pickle.dumps(bomb))
    assert (tmp_path / "boom").exists()  # it would have


GPT2 = {"model_type": "gpt2", "vocab_size": 8, "n_positions": 8, "n_layer": 1, "n_embd": 8, "n_head": 1}
FORBIDDEN = {"eval", "exec", "pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}


@pytest.mark.nightly
def test_no_line_of_jaxpar_unpickles_evaluates_or_asks_a_shell():
    found = []
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            words = set()
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                words = {node.func.id}
            elif isinstance(node, ast.Import):
                words = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                words = {str(node.module).split(".")[0]}
            elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant) and node.value.value is True:
                words = {"eval"} if node.arg in ("allow_pickle", "shell") else set()
            if words & FORBIDDEN:
                found.append(f"{file.name}:{getattr(node, 'lineno', '?')}")
    assert not found


def test_members_of_an_archive_are_read_and_written_nowhere(tmp_path):
    rows = np.arange(8, dtype=np.float32)
    np.save(tmp_path / "rows.npy", rows)
    (tmp_path / "in").mkdir()
    with zipfile.ZipFile(tmp_path / "in" / "x.npz", "w") as archive:
        for name in ("../../out.npy", "/tmp/jaxpar_out.npy", "inputs.npy"):
            archive.writestr(name, (tmp_path / "rows.npy").read_bytes())
    before = sorted(tmp_path.rglob("*"))
    assert set(load_arrays(tmp_path / "in" / "x.npz")) == {"../../out", "/tmp/jaxpar_out", "inputs"}
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/tmp/jaxpar_out.npy").exists()


@pytest.mark.parametrize("name", ["../../../../escaped", "/escaped", "..", "a/../../b", "C:\\x"])
def test_a_parameter_does_not_name_its_way_out_of_a_checkpoint(name, tmp_path):
    store = Store(tmp_path / "a" / "b" / "run" / "checkpoints", Checkpoints())
    held = {"params": {name: jnp.arange(4.0)}, "step": jnp.zeros((), jnp.int32)}
    store.save(0, held, {})
    store.wait()
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone), held)
    restored, _ = store.restore(like)
    assert (restored["params"][name] == jnp.arange(4.0)).all()
    inside = tmp_path / "a" / "b" / "run" / "checkpoints"
    assert all(path.is_relative_to(inside) or inside.is_relative_to(path) for path in tmp_path.rglob("*"))


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def test_a_page_shows_hostile_names_as_text(tmp_path):
    def net(rngs):
        model = nnx.Module()
        setattr(model, HOSTILE, nnx.Param(jnp.ones((8, 8))))
        return model

    def forward(model, x):
        with jax.named_scope(HOSTILE):
            return jnp.sum(getattr(model, HOSTILE)[...] @ x)

    graph, state = nnx.split(net(None))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones(8), NamedSharding(mesh, PartitionSpec("data")))
    report = jp.inspect(jax.jit(lambda state, x: forward(nnx.merge(graph, state), x)), state, x)
    report.html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert not [bad for bad in ("<script", "<img", "onerror=alert(2)>") if bad in page]
    assert "<script" not in report._repr_html_()


def test_a_drawing_shows_a_hostile_name_as_text():
    from dataclasses import replace

    drawn = svg(replace(schedule("1f1b", stages=2, microbatches=2), name=HOSTILE), OpTimes())
    assert "<script" not in drawn
    assert "&lt;script&gt;" in drawn


@pytest.mark.nightly
def test_a_process_that_reads_a_hostile_job_runs_none_of_it(tmp_path):
    """The whole way, in a process of its own: the module of an installed package would leave a file."""
    (tmp_path / "job.toml").write_text(JOB.replace('"mlp"', '"evil:Net"'))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Net: pass")
    (tmp_path / "cwd").mkdir()
    path = os.pathsep.join([str(tmp_path / "elsewhere"), str(ROOT.parent)])
    for flags, ran in (([], False), (["--allow-import"], True)):
        ended = subprocess.run(
            [sys.executable, "-m", "jaxpar", "check", str(tmp_path / "job.toml"), *flags],
            cwd=tmp_path / "cwd", env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        )  # fmt: skip
        assert ended.returncode == 1
        assert ("--allow-import" in ended.stderr) is not ran, ended.stderr
        assert (tmp_path / "ran").exists() is ran
