"""Variables of two launchers in one environment: the complete launcher is asked, and contradictions are refused."""

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
