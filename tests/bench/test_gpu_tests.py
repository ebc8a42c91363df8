"""The day a GPU comes: tests that want one see it or say that they did not, and records know what they are of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def ran(*command, folder=ROOT, **variables):
    environment = {"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu"} | variables
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.nightly
def test_tests_on_gpus_that_find_none_do_not_end_as_if_they_had_passed():
    done = ran(sys.executable, "-m", "pytest", "tests/gpu")
    assert done.returncode == 6, done.stdout
    assert "no GPU: JAX sees cpu" in done.stdout
    assert "3 skipped" in done.stdout


@pytest.mark.nightly
def test_tests_on_gpus_have_no_simulated_devices():
    code = "import pytest; pytest.main(['tests/gpu', '--collect-only', '-q']); import jax; print(jax.device_count())"
    assert ran(sys.executable, "-c", code).stdout.splitlines()[-1] == "1"


@pytest.mark.nightly
def test_asking_the_simulated_tests_for_gpus_is_refused_with_the_way_out():
    done = ran(sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "pytest tests/gpu" in done.stderr


@pytest.mark.slow
def test_a_record_is_made_where_jaxpar_is_on_the_path_and_not_installed(tmp_path):
    (tmp_path / "jaxpar").symlink_to(ROOT / "jaxpar")
    code = (
        "import importlib.metadata as m; real = m.version\n"
        "def version(name):\n"
        "    if name == 'jaxpar': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "from jaxpar.measure.record import where; print(where()['versions']['jaxpar'], where()['commit'])"
    )
    done = ran(sys.executable, "-c", code, folder=tmp_path, PYTHONPATH=str(tmp_path), JAXPAR_COMMIT="abc1234")
    assert done.stdout.split() == ["0.1.0", "abc1234"], done.stderr
