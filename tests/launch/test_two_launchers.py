"""Variables of two launchers in one environment: the complete launcher is asked, and contradictions are refused."""

import os
import subprocess

import pytest

from jaxpar.cluster.environment import detect
from jaxpar.errors import JaxparError

TASKS = [
    {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2", "SLURM_PROCID": str(task), "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2",
    }
    for task in range(2)
]  # fmt: skip
ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("exported", [ADDRESS, {"MASTER_ADDR": "node1"}, ADDRESS | {"WORLD_SIZE": "2"}], ids=len)
def test_srun_beside_half_a_torchrun_is_slurm(exported):
    assert [detect(task | exported).process for task in TASKS] == [0, 1]
    assert {detect(task | exported).processes for task in TASKS} == {2}
    assert {detect(task | exported).coordinator for task in TASKS} == {detect(TASKS[0]).coordinator}


def test_a_rank_that_agrees_with_srun_is_no_contradiction():
    assert [detect(task | ADDRESS | {"RANK": task["SLURM_PROCID"]}).source for task in TASKS] == ["SLURM"] * 2


@pytest.mark.parametrize("exported", [{"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "-1"}], ids=str)
def test_a_rank_that_contradicts_srun_is_refused_and_the_fix_is_to_unset_it(exported):
    with pytest.raises(JaxparError, match="in task 1 of srun") as caught:
        detect(TASKS[1] | ADDRESS | exported)
    assert [problem.fix for problem in caught.value.problems] == ["unset RANK, before srun in the batch script"]


def test_a_torchrun_that_srun_started_on_each_machine_numbers_its_own_processes():
    eight = ADDRESS | {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "5"}
    assert (detect(TASKS[0] | eight).process, detect(TASKS[0] | eight).source) == (5, "torchrun")
    one = ADDRESS | {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}  # by the order in which they came
    assert detect(TASKS[1] | one).process == 0


def test_an_address_that_an_image_exports_leaves_a_process_alone():
    assert detect(ADDRESS) is None
    assert detect({"MASTER_ADDR": "localhost"}) is None


@pytest.mark.parametrize("half", [{"RANK": "1"}, {"WORLD_SIZE": "4"}], ids=str)
def test_half_a_torchrun_alone_is_refused_without_a_number_that_all_would_copy(half):
    with pytest.raises(JaxparError) as caught:
        detect(ADDRESS | half)
    assert not any(problem.fix.startswith(("RANK=", "WORLD_SIZE=")) for problem in caught.value.problems)


def test_half_an_open_mpi_beside_srun_is_slurm():
    assert detect(TASKS[1] | {"OMPI_COMM_WORLD_SIZE": "9"}).process == 1


def test_an_allocation_without_a_step_does_not_hide_the_pod_that_it_runs_in():
    pod = {"JOB_COMPLETION_INDEX": "2", "JAXPAR_PROCESSES": "4", "JAXPAR_COORDINATOR": "a:1"}
    assert detect({"SLURM_JOB_ID": "1", **pod}).process == 2


UNSUPPORTED = {
    "MPICH": {"PMI_SIZE": "4", "PMI_RANK": "2"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "2"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "2", "LSB_JOBID": "5"},
    "Flux in an allocation": {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "2", "SLURM_JOB_ID": "77"},
    "SkyPilot": {"SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
    "JAXJob": {"NUM_PROCESSES": "4", "PROCESS_ID": "2", "COORDINATOR_ADDRESS": "HOST:8476"},
}


@pytest.mark.parametrize("launcher", UNSUPPORTED)
def test_several_processes_of_a_launcher_that_is_not_read_do_not_each_train_alone(launcher):
    with pytest.raises(JaxparError, match="of these processes would train alone") as caught:
        detect(UNSUPPORTED[launcher])
    (problem,) = caught.value.problems
    command = problem.fix[: problem.fix.index("' as the command")].removeprefix("sh -c '")
    told = subprocess.run(
        ["sh", "-c", command.replace("jaxpar train JOB", "env")],
        env=UNSUPPORTED[launcher] | {"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    variables = dict(line.split("=", 1) for line in told.stdout.splitlines() if "=" in line)
    assert str(detect(variables)).startswith("process 2 of 4, coordinator HOST:8476 (says JAXPAR")
    assert detect(UNSUPPORTED[launcher] | {"JAXPAR_PROCESSES": "1"}) is None


def test_one_process_of_a_launcher_that_is_not_read_is_alone():
    assert detect({"PMI_SIZE": "1", "PMI_RANK": "0"}) is None
    assert detect({"NUM_PROCESSES": "8", "PROCESS_ID": "0"}) is None  # variables of anything


def test_srun_that_sets_the_variables_of_mpich_is_slurm():
    assert detect(TASKS[1] | {"PMI_SIZE": "2", "PMI_RANK": "1"}).source == "SLURM"
