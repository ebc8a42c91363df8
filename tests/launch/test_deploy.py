"""The files of deploy/: their commands parse, what they name exists, and the locks fit the package's requirements."""

import os
import re
import shlex
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest

from jaxpar.cli.main import parser
from jaxpar.cli.options import job_file

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
README = (DEPLOY / "README.md").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
STUB = """#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
[ "${1##*/}" = jaxpar ] || [ "$1" = apptainer ] && echo "$@" >> "$SEEN"
"""


def commands(text):
    """The words of each jaxpar command that a text has, also after docker run's image, up to the shell's next word."""
    for line in re.findall(r"(?<![\w/-])jaxpar ((?:train|doctor|check) [^`&|#\n]+)", text):
        yield shlex.split(line)


def kubernetes():
    yaml = pytest.importorskip("yaml", reason="PyYAML, which flax brings")
    job = next(each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if each["kind"] == "Job")
    return job["spec"]["template"]["spec"]


def test_the_commands_of_all_files_parse():
    words = [*commands(DOCKERFILE), *commands(README), kubernetes()["containers"][0]["command"][1:]]
    assert len(words) >= 5
    for each in words:
        args = parser().parse_args(each)
        assert args.job.endswith("job.toml") or Path(job_file(args.job)).is_file()


def test_the_image_is_made_of_files_that_exist_and_are_sent_to_its_builder():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    sent = {line[1:] for line in ignored if line[0] == "!"}
    assert ignored[0] == "**"
    assert all((ROOT / path).exists() for path in sent)
    copied = [words.split()[0] for words in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)]
    assert copied == [".", "deploy/constraints"]
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {package["readme"], *package["license-files"], "pyproject.toml", "jaxpar", "configs"} <= sent
    version = re.findall(r"ARG PYTHON=(.+)", DOCKERFILE)[0]
    assert (DEPLOY / f"constraints/python{version}.txt").is_file()
    assert {*re.findall(r"ARG EXTRAS=(.+)", DOCKERFILE)[0].split(",")} <= EXTRAS.keys()


def test_pods_use_the_image_and_its_user():
    pod = kubernetes()
    assert pod["containers"][0]["image"].startswith("registry.example.com/jaxpar")
    assert str(pod["securityContext"]["fsGroup"]) == re.findall(r"--uid (\d+)", DOCKERFILE)[0]


@pytest.mark.parametrize("image", ["", "jaxpar.sif"])
def test_the_slurm_script_examines_the_machine_and_then_trains(tmp_path, image):
    stub = tmp_path / "srun"
    stub.write_text(STUB)
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    seen = tmp_path / "seen"
    subprocess.run(
        ["bash", DEPLOY / "slurm.sh", "job.toml", "train.steps=3"], check=True, cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(seen), "JAXPAR_IMAGE": image},
    )  # fmt: skip
    container = f"apptainer exec --nv --bind {tmp_path} --pwd {tmp_path} jaxpar.sif " if image else ""
    assert seen.read_text().splitlines() == [
        f"{container}jaxpar doctor job.toml", f"{container}jaxpar train job.toml train.steps=3"
    ]  # fmt: skip
    assert subprocess.run(["bash", DEPLOY / "slurm.sh"], capture_output=True, check=False).returncode


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_the_locks_fit_the_requirements_of_the_package(version):
    requirements = pytest.importorskip("packaging.requirements", reason="packaging, which pytest brings")
    text = (DEPLOY / f"constraints/python{version}.txt").read_text()
    assert "//" not in text  # an address of a registry or a folder
    locked = dict(line.split("==") for line in text.splitlines())
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"ARG EXTRAS=(.+)", DOCKERFILE)[0].split(",")
    for line in [*package["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]:
        need = requirements.Requirement(line)
        assert need.specifier.contains(locked[need.name]), line
    assert locked["jax"] == locked["jaxlib"] == locked["jax-cuda13-plugin"] == locked["jax-cuda13-pjrt"]
    assert (locked["jax"] == "0.10.2") == (version == "3.11")
    assert f"jax {locked['jax']} in `python{version}.txt`" in README


def test_the_check_list_has_lines_of_the_doctor():
    sources = "".join(path.read_text() for path in (ROOT / "jaxpar/job/doctor").glob("*.py"))
    names = {*re.findall(r'Finding\(\s*"([^"]+)"', sources)}
    listed = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", README.partition("## Check list")[2], re.MULTILINE)
    listed = [name for line in listed for name in line.split(", ")][1:]
    assert len(listed) > 15
    assert {*listed} - {"-"} <= names
