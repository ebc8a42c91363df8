"""What the README, the docstrings and the jobs say is what happens."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some

import jaxpar
import jaxpar as jp
from jaxpar.job.file import dump, parse, schema
from jaxpar.mesh.target import missing_plugin

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "jaxpar").rglob("README.md"))]}
JOBS = sorted((ROOT / "configs").glob("*.toml"))
OFTEN = "quickstart", "context4_data2", "zero1_fsdp8", "gpu_gpt2_124m"


def blocks(kind, text=README):
    return re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL)


def is_printed(shown, said):
    """Returns whether all lines shown are those that were said, in their order, `...` standing for any lines."""
    pieces = [re.escape(piece) for piece in re.split(r"^ *\.\.\.\n", shown, flags=re.MULTILINE)]
    return re.match("(?:.*\n)*?".join(pieces), said) is not None


def shell(command, first=Path(sys.executable).parent, **settings):
    environment = {"PATH": f"{first}:/usr/bin:/bin", "HOME": str(Path.home())}
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        check=False,
        env=environment,
        **settings,
    )


def test_the_readme_is_one_page_with_a_picture():
    assert len(README.splitlines()) <= 170
    assert README.index("](notebooks/pictures/jaxpar.svg)") < README.index("```")


@pytest.mark.nightly
def test_the_model_of_the_readme_trains():
    code = next(block for block in blocks("python") if "nnx.Module" in block)
    names = {"jp": jp, "optax": optax, "nnx": nnx}
    exec(code, names)
    state = jp.init_state(names["layout"], optax.sgd(0.1))
    batch = {"x": np.ones((8, 64), np.float32), "y": np.zeros(8, np.int32)}
    step, losses = jp.train_step(names["layout"], names["loss"], optax.sgd(0.1)), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    assert "mlp/tensor" in names["layout"].explain()


@pytest.mark.slow
def test_the_first_code_of_the_readme_is_short_early_and_prints_what_it_says():
    code, said = blocks("python")[0], blocks("text")[0]
    assert len(code.splitlines()) <= 12
    assert README[: README.index("```python")].count("\n") + len(code.splitlines()) < 20
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    before, loss = done.stdout.strip().rsplit(" ", 1)
    assert before == said.strip().rsplit(" ", 1)[0]
    shown = float(said.strip().rsplit(" ", 1)[1])  # of Python 3.12's own text; 3.11's is nearly the same, 3.13's is not
    assert float(loss) == pytest.approx(shown if sys.version_info < (3, 13) else 2.27, abs=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "command",
    [
        pytest.param("jaxpar plan configs/digits.toml --devices 8", marks=pytest.mark.slow),
        pytest.param("jaxpar check configs/digits.toml", marks=pytest.mark.slow),
        "python -c 'import jaxpar as jp; jp.compose(lambda rngs: jp.ViT(jp.ViTConfig(), rngs=rngs), jp.Parallel())'",
    ],
)
def test_where_only_the_compiler_for_gpus_is_installed_nobody_complains_that_there_is_no_gpu(command):
    done = shell(command)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.nightly
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_the_block_of_the_readme_on_inspection_runs_as_printed():
    page = PAGES[ROOT / "jaxpar" / "inspector" / "README.md"]
    code = next(block for block in blocks("python", page) if "jp.inspect" in block)
    mesh = jax.sharding.Mesh(jp.target_devices("h100:1x8"), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    settings = jp.DecoderConfig(vocab=256, seq=64, layers=2, dim=64, heads=8)
    tokens = jax.ShapeDtypeStruct((16, 64), "int32")
    names = {
        "jax": jax, "jp": jp, "LAYERS": 2, "optimizer": optax.adamw(1e-3), "parallel": jp.Parallel(tensor=8),
        "model": lambda rngs: jp.Decoder(settings, rngs=rngs), "batch": {"inputs": tokens, "targets": tokens},
        "weights": jax.ShapeDtypeStruct((64, 64), "float32", sharding=split), "f": lambda weights, x: x @ weights,
        "x": jax.ShapeDtypeStruct((64, 64), "float32", sharding=split),
    }  # fmt: skip
    exec(code, names)
    assert names["report"].by_axis["data"].keys() == {"all-gather"}


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in blocks("bash")[0].splitlines() if "pytest" not in line])
def test_the_commands_of_the_readme_run_as_printed(command, tmp_path):
    # in an environment of its own, that sees what is installed here: to install jaxpar anew takes the command `jaxpar`
    # away for a moment, from tests that run beside this one
    venv.create(tmp_path, with_pip=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": tmp_path}))
    (packages / "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    done = shell(command, first=tmp_path / "bin")
    assert done.returncode == 0, done.stdout + done.stderr
    loss, evaluated = re.findall(r"loss (\d\.\d+)  eval (\d\.\d+)", done.stdout)[-1]
    assert float(loss) < 2.0
    assert float(evaluated) < 2.0


def test_the_test_command_of_the_readme_is_what_ci_calls():
    (command,) = [line for line in blocks("bash")[0].splitlines() if "pytest" in line]
    assert command == "pip install -e '.[test]' && pytest"
    ci = (ROOT / ".ci" / "run").read_text()
    assert "pip install --quiet -e '.[test]'" in ci
    # those that `pytest` runs, and the slow ones; what is before it says how, such as by which allocator
    assert re.search(r'^(?:[A-Z_]+=\S+ )*pytest -m "not nightly and not full"', ci, flags=re.MULTILINE)


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("page", "begins"),
    [
        pytest.param("README.md", "$ jaxpar check", marks=pytest.mark.slow),
        pytest.param("README.md", "$ jaxpar plan", marks=pytest.mark.slow),
        ("jaxpar/pipeline/README.md", "$ jaxpar schedule"),
        ("jaxpar/plan/README.md", "$ jaxpar partition"),
    ],
)
def test_what_a_page_shows_is_what_the_command_prints(page, begins):
    shown = next(block for block in blocks("text", PAGES[ROOT / page]) if block.startswith(begins))
    command, _, said = shown.partition("\n")
    done = shell(command.removeprefix("$ "))
    assert done.returncode == (1 if "problem:" in said else 0), done.stderr
    assert is_printed(said, done.stderr if "problem:" in said else done.stdout)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page):
    for path in re.findall(r"`((?:configs|jaxpar|tests|notebooks)/[\w./]+)`", PAGES[page]):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([^)#:]+)\)", PAGES[page]):
        assert (page.parent / path).exists(), path


def test_tests_that_a_page_names_exist():
    there = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = {name for text in PAGES.values() for name in re.findall(r"`(test_\w+)`", text)}
    assert "test_at_full_rank_nothing_is_lost" in named <= there


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "job",
    [pytest.param(job, id=job.stem, marks=[pytest.mark.slow] * (job.stem not in OFTEN)) for job in JOBS],
)
def test_every_job_passes_its_check(job):
    from jaxpar.job.check import check

    assert check(parse.load(job)) == []


@pytest.mark.full
@pytest.mark.parametrize(("steps", "least"), some([(200, 95), (600, 97)], [], [(200, 95)]))
def test_the_digits_are_read(steps, least):
    done = shell(f"jaxpar train configs/digits.toml run.dir=$(mktemp -d)/digits train.steps={steps}")
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = float(re.findall(r"\((\d+\.\d+)%\)", done.stdout)[-1])
    assert accuracy > least


def test_print_defaults_is_a_job_and_explains_every_key(capsys):
    from jaxpar.cli.main import main
    from jaxpar.job.check import check

    assert main(["train", "--print-defaults"]) == 0
    text = capsys.readouterr().out
    job = parse.loads(text)
    assert job == parse.loads("")
    assert check(parse.loads(text, ["parallel.data=-1"])) == []  # on all devices that are there
    for cls in schema.TABLES.values():
        for key, meaning in schema.meanings(cls).items():
            assert key in text
            assert meaning.strip(), f"{cls.__name__}.{key} has no meaning"


@pytest.mark.nightly
def test_a_resolved_job_reads_back_as_itself():
    for path in JOBS:
        job = parse.load(path)
        assert parse.loads(dump.dumps(job)) == job


MODULES = [name for _, name, _ in pkgutil.walk_packages(jaxpar.__path__, "jaxpar.") if not name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_run_and_public_names_have_one(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    assert doctest.testmod(module, raise_on_error=False).failed == 0


def test_the_public_face_resolves_and_is_small():
    assert 15 <= len({*jaxpar.__all__} - {"__version__"}) <= 40
    for name in jaxpar.__all__:
        assert getattr(jaxpar, name) is not None
