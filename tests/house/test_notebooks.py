"""Every notebook runs from top to bottom, and is the one its percent-format pair describes.

`python tests/house/test_notebooks.py` writes the notebooks anew, executed; with names (`02_what_xla_did`), only those.
"""

import ast
import os
import sys
from importlib import import_module
from pathlib import Path

import jupytext
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from jaxpar.mesh.target import missing_plugin

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("*.py"))


class ThisPython(AsyncKernelManager):
    """Starts kernels in this interpreter, whether or not Jupyter has heard of it."""

    @property
    def kernel_spec(self):
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python", name="python3")


def execute(notebook, folder):
    """Runs a notebook in a folder, and returns it."""
    where = {"metadata": {"path": str(folder)}}
    settings = {"kernel_manager_class": ThisPython, "kernel_name": "python3", "record_timing": False}
    NotebookClient(notebook, timeout=600, resources=where, **settings).execute()
    return notebook


def sources(notebook):
    return [(cell.cell_type, cell.source.strip()) for cell in notebook.cells]


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def warnings_of(notebook):
    """Returns what was written to stderr, but for matplotlib's first start on a machine."""
    streams = [output for output in outputs(notebook) if output.output_type == "stream"]
    return [s.text for s in streams if s.name == "stderr" and "font cache" not in s.text]


def test_every_notebook_has_its_pair():
    assert SOURCES
    assert [path.stem for path in SOURCES] == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_pair_says_the_same(path):
    assert sources(jupytext.read(path)) == sources(jupytext.read(path.with_suffix(".ipynb")))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_takes_what_is_public_alone(path):
    """The names of `jaxpar`, and those that a room lists in `__all__`: none of its modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        inner = node.names if isinstance(node, ast.Import) else ()
        assert all(each.name == "jaxpar" or not each.name.startswith("jaxpar") for each in inner)
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "jaxpar":
            room = import_module(node.module)
            assert node.module.count(".") == 1
            assert {each.name for each in node.names} <= {*room.__all__}, node.module


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_reads_nothing_of_the_clone(path):
    """It runs in an empty folder beside an installed jaxpar: it names no folder above it and no module of tests."""
    code = "\n".join(cell.source for cell in jupytext.read(path).cells if cell.cell_type == "code")
    texts = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    texts = [text for text in texts if isinstance(text, str)]
    assert not [text for text in texts if text == ".." or text.startswith(("../", "tests."))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_stored_outputs_are_whole_and_clean(path):
    notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    assert outputs(notebook)
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert not warnings_of(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    text = str([notebook.metadata, [cell.metadata for cell in notebook.cells], outputs(notebook)])
    for place in (str(NOTEBOOKS.parent), os.path.expanduser("~") + "/", "/home/", "/tmp/", "site-packages"):
        assert place not in text, f"{path.stem} shows a path of the machine that ran it: {place}"


LONG = ("00_by_hand", "03_pipelines", "07_large_batches", "08_long_sequences", "09_fine_tune", "10_experts")


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "path",
    [
        # other tests cover these, too: `step/test_step.py`, `pipeline/test_pipeline.py`, `optim/test_large_batch.py`,
        # `parallel/test_context_compiled.py`, `job/test_fine_tune.py`, `experts/test_decoder_of_experts.py`
        pytest.param(path, id=path.stem, marks=pytest.mark.full if path.stem in LONG else pytest.mark.slow)
        for path in SOURCES
    ],
)
def test_notebook_runs(path, tmp_path):
    if "target_devices(" in path.read_text() and (missing := missing_plugin()):
        pytest.skip(f"compiling for absent GPUs: {missing}")
    notebook = execute(nbformat.read(path.with_suffix(".ipynb"), as_version=4), tmp_path)
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert not warnings_of(notebook)


if __name__ == "__main__":
    for path in [path for path in SOURCES if path.stem in sys.argv[1:] or not sys.argv[1:]]:
        fresh = execute(jupytext.read(path), NOTEBOOKS)
        for number, cell in enumerate(fresh.cells, 1):
            cell.id = f"{number:02}"  # the same cells on every run
        jupytext.write(fresh, path.with_suffix(".ipynb"))
        print(path.with_suffix(".ipynb"))
