#!/bin/bash
# A job on two nodes with eight GPUs each, one process for each GPU.
# Run:     sbatch deploy/slurm.sh configs/gpu_llama_8b_fsdp8.toml parallel.data=2
#          JAXPAR_IMAGE=jaxpar.sif sbatch deploy/slurm.sh job.toml       from the image of deploy/Dockerfile, by Apptainer
# jaxpar reads the rest from SLURM: how many processes there are (SLURM_NTASKS), which one this is
# (SLURM_PROCID), and where the first is (SLURM_STEP_NODELIST, with a port that follows from the job's number).
# Stopped by the time limit, it has saved and goes on with the same command.
#SBATCH --job-name=jaxpar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8            # processes of a node: 2 x 8 = 16 GPUs, as mesh.target and parallel multiply to
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300              # five minutes before the end: finish the step, save, exit
#SBATCH --output=%x-%j.out
set -euo pipefail

job=${1:?the job file, then overrides such as train.steps=1000}

# run.dir lies where all nodes see it: beside the job that is submitted, unless the job file says otherwise
cd "${SLURM_SUBMIT_DIR:-.}"

jaxpar=(jaxpar)
if [ -n "${JAXPAR_IMAGE:-}" ]; then  # --nv brings the host's driver
  jaxpar=(apptainer exec --nv --bind "$PWD" --pwd "$PWD" "$JAXPAR_IMAGE" jaxpar)
fi

srun --ntasks=1 --nodes=1 "${jaxpar[@]}" doctor "$job"               # what is wrong with this machine, before 16 GPUs wait
exec srun --kill-on-bad-exit=1 --wait=60 "${jaxpar[@]}" train "$@"  # one that fails ends the others: none waits for it
