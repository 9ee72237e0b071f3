"""What each launcher tells its ranks, and where they meet."""

from __future__ import annotations

import pytest

from bert_ds.cli.launcher import ProcessPlace, first_host, meeting_point, process_place
from bert_ds.errors import ConfigError
from bert_ds.pretrain import main

# As srun's tasks see it: rank 9 of 20 on the second of three machines.
SRUN = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "20",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_STEP_NODELIST": "gpu[07-08],old3", "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "gpu[06-08],old3", "SLURM_NTASKS": "20"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# A daemon of mpirun that srun has started hands its own place in Slurm's step down to the ranks.
DAEMON = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2",
          "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_JOB_ID": "4711"}
TORCHRUN = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(("environment", "place"), [
    ({}, ProcessPlace(0, 0, 1, 1, "none")),
    (TORCHRUN, ProcessPlace(9, 1, 16, 8, "torchrun")),
    ({**DAEMON, **TORCHRUN}, ProcessPlace(9, 1, 16, 8, "torchrun")),
    ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0"},
     ProcessPlace(1, 1, 2, 2, "deepspeed")),
    ({**HYDRA, "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"},  # deepspeed --launcher mpich
     ProcessPlace(3, 1, 4, 2, "deepspeed")),
    (OPEN_MPI, ProcessPlace(3, 1, 4, 2, "mpirun")),
    ({**DAEMON, **OPEN_MPI}, ProcessPlace(3, 1, 4, 2, "mpirun")),
    (HYDRA, ProcessPlace(3, 1, 4, 2, "mpirun")),
    ({**DAEMON, **HYDRA}, ProcessPlace(3, 1, 4, 2, "mpirun")),
    ({"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_SIZE": "4",
      "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, ProcessPlace(3, 1, 4, 2, "mpirun")),
    (SRUN, ProcessPlace(9, 1, 20, 8, "srun")),
    ({**SRUN, "PMI_RANK": "9", "PMI_SIZE": "20"}, ProcessPlace(9, 1, 20, 8, "srun")),  # srun --mpi=pmi2
    ({**SRUN, "SLURM_PROCID": "17", "SLURM_NODEID": "2"}, ProcessPlace(17, 1, 20, 4, "srun")),
    ({**SRUN, "SLURM_GPUS_PER_TASK": "1"}, ProcessPlace(9, 1, 20, 8, "srun", sees_own_gpu_only=True)),
    ({**SRUN, "SLURM_STEP_GPUS": "0,1,2,3,4,5,6,7"}, ProcessPlace(9, 1, 20, 8, "srun", sees_own_gpu_only=True)),
    # Within a batch script, but started without srun: one process.
    ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, ProcessPlace(0, 0, 1, 1, "none")),
    ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, ProcessPlace(1, 1, 2, 2, "environment")),
    ({"RANK": "0", "WORLD_SIZE": "1"}, ProcessPlace(0, 0, 1, 1, "environment")),
])
def test_launchers_are_understood(environment: dict[str, str], place: ProcessPlace) -> None:
    assert process_place(environment) == place


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, ("localhost", None)),
    ({**TORCHRUN, "MASTER_ADDR": "first", "MASTER_PORT": "6001"}, ("first", 6001)),
    ({**TORCHRUN, "MASTER_ADDR": "first"}, ("first", 29500)),
    (SRUN, ("gpu07", 15000 + 4711)),
    ({**SRUN, "SLURM_STEP_ID": "2"}, ("gpu07", 15000 + 4713)),
    ({**SRUN, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "6000"}, ("10.0.0.7", 6000)),
    ({**DAEMON, **OPEN_MPI}, ("gpu1", 15000 + 4711)),
    ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ("localhost", 29500)),
])
def test_ranks_find_each_other(environment: dict[str, str], expected: tuple[str, int | None]) -> None:
    assert meeting_point(environment, process_place(environment)) == expected


@pytest.mark.parametrize(("nodes", "first"), [
    ("gpu7", "gpu7"), ("gpu7,gpu8", "gpu7"), ("gpu[07-09,12],login1", "gpu07"), ("rack[3,5]-gpu[0-1]", "rack3-gpu0"),
    ("a-1.cluster,b[1-2]", "a-1.cluster"), ("gpu[110]", "gpu110"),
])
def test_slurms_list_begins_with_the_machine_of_rank_0(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(("environment", "message"), [
    (OPEN_MPI, r"MASTER_ADDR=none: is not set.*mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500"),
    ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR=none: is not set"),
    ({**TORCHRUN, "MASTER_ADDR": "first", "MASTER_PORT": "http"}, "MASTER_PORT=http: is not a whole number"),
    ({**TORCHRUN, "MASTER_ADDR": "first", "MASTER_PORT": "70000"}, "MASTER_PORT=70000: is not a port"),
    ({**TORCHRUN, "RANK": "first"}, "RANK=first: is not a whole number"),
    ({"RANK": "3", "WORLD_SIZE": "8"}, "LOCAL_RANK=none: is not set beside RANK=3 and WORLD_SIZE=8"),
])
def test_what_is_missing_is_asked_for(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        meeting_point(environment, process_place(environment))


def test_the_program_says_what_its_environment_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert main(["--recipe", "tiny"]) == 2
    assert "LOCAL_RANK=none: is not set beside RANK=3" in capsys.readouterr().err
