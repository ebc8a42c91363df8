"""What a run gets of a GPU's memory, tried from outside: what is promised is what JAX is told to take."""

import os
from pathlib import Path

import jax
import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options as options_of_gpus

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.inspector import report as reports
from jaxpar.job.check import check
from jaxpar.job.doctor import packages
from jaxpar.job.file.parse import load
from jaxpar.job.plan import question
from jaxpar.mesh import devices
from jaxpar.mesh.chips import CHIPS, find_chip
from jaxpar.mesh.memory_pool import NAME, OLD, PREALLOCATE, Pool, pool_of_environment
from jaxpar.mesh.target import missing_plugin

JOB = str(Path(__file__).parents[2] / "configs/gpu_llama_8b_fsdp8.toml")
H100 = find_chip("NVIDIA H100")
GIB = 2**30
VARIABLES = [
    {}, {NAME: "0.5"}, {OLD: "0.5"}, {PREALLOCATE: "false"}, {PREALLOCATE: "true"}, {NAME: "0.8", PREALLOCATE: "0"},
]  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
    for name in (NAME, OLD, PREALLOCATE):
        monkeypatch.delenv(name, raising=False)
    return lambda variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


@pytest.mark.parametrize("variables", VARIABLES)
def test_the_memory_that_is_promised_is_what_jax_is_told_to_take(variables, environment, monkeypatch):
    """JAX's own function reads the variables, at the moment in which a run has it make its devices."""
    environment(variables)
    told = []
    monkeypatch.setattr(devices.jax, "devices", lambda: told.append(options_of_gpus()) or [])
    before = dict(os.environ)
    promised = pool_of_environment(os.environ)
    devices.visible_devices()
    assert promised.share == told[0].get("memory_fraction", 0.75)  # what XLA takes where it is told nothing
    assert dict(os.environ) == before


def test_plan_and_inspect_count_on_the_same_bytes_and_leave_workspaces_out(environment):
    environment({})
    asked = question(load(JOB, []), devices=64, chip="h100", per_node=None, options={})
    assert asked.memory_limit == H100.usable_memory == int(0.9 * H100.visible_memory) - 512 * 2**20
    assert "workspaces of cuBLAS and cuDNN" in asked.memory_source
    assert "NCCL" in asked.memory_source


@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
@pytest.mark.parametrize(
    ("variables", "room"),
    [({}, H100.usable_memory), ({NAME: "0.5"}, Pool(share=0.5).program_bytes(H100.visible_memory))],
)
def test_a_report_counts_on_what_a_run_would_get_and_says_so(variables, room, environment):
    environment(variables)
    mesh = jax.sharding.Mesh(jp.target_devices("h100:1x1"), ("data",))
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    report = jp.inspect(jax.jit(lambda x: x + 1), x)
    assert report.capacity == room
    assert ("XLA_CLIENT_MEM_FRACTION=0.5" in str(report)) is bool(variables)
    assert "workspaces of cuBLAS and cuDNN" in str(report)


def test_on_a_gpu_that_is_there_the_capacity_is_what_this_process_took(monkeypatch):
    monkeypatch.setattr(reports, "allocated_bytes", lambda device: int(0.6 * H100.visible_memory))
    assert reports._pool(object(), H100).program_bytes(H100.visible_memory) == pytest.approx(
        0.6 * H100.visible_memory - 2**29, abs=2
    )


@pytest.mark.nightly
def test_a_plan_counts_on_the_share_that_the_user_set_and_says_so(environment, capsys):
    words = ["plan", JOB, "--devices", "64", "--top", "1"]
    environment({})
    assert main(words) == 0
    usual = capsys.readouterr().out
    environment({OLD: "0.5"})
    assert main(words) == 0
    half = capsys.readouterr().out
    assert "fit 70.7 GiB" in usual
    assert "fit 39.05 GiB" in half
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.5" in half


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("chip", "share", "fits"),
    [
        pytest.param("h100", "", False, marks=pytest.mark.slow),
        pytest.param("h200", "", True, marks=pytest.mark.slow),
        ("h200", "0.5", False),
    ],
)
def test_check_refuses_a_state_that_is_more_than_a_run_gets(chip, share, fits, environment):
    environment({NAME: share} if share else {})
    whole = ["parallel.fsdp=1", "parallel.data=8", "parallel.zero=0", f"mesh.target={chip}:1x8"]
    problems = check(load(JOB, whole))
    assert [problem.got for problem in problems] == (
        [] if fits else ["a device holds parameters 29.92 GiB and optimizer state 59.83 GiB"]
    )


@pytest.mark.parametrize("variables", [{NAME: "most"}, {NAME: "0"}, {OLD: "1.5"}, {NAME: "0.9", OLD: "0.9"}])
def test_shares_that_jax_would_not_take_are_refused(variables, environment):
    environment(variables)
    with pytest.raises(JaxparError):
        pool_of_environment(os.environ)
    ((found),) = packages.variables(variables, simulate=0)
    assert (found.what, found.state) == ("GPU memory", "problem")


@pytest.mark.parametrize(("share", "state"), [("0.9", "ok"), ("0.5", "warning"), ("0.99", "warning")])
@pytest.mark.parametrize("name", [NAME, OLD])
def test_doctor_knows_both_names_of_the_share(name, share, state):
    (found,) = packages.variables({name: share}, simulate=0)
    assert (found.what, found.state) == ("GPU memory", state)
    assert name in found.text


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.key)
@pytest.mark.parametrize("part", [0.1, 0.75, 0.9, 1.0])
def test_the_memory_of_which_so_much_is_for_a_program_is_room_turned_round(chip, part):
    pool = Pool(share=part)
    for memory in (chip.visible_memory, 10**6, 5 * GIB):
        assert pool.memory_for(pool.program_bytes(memory)) == pytest.approx(memory, abs=20)
        assert 0 < pool.program_bytes(memory) < memory
