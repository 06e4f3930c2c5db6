# source docs/workshop/slurm.sh               in a shell that Slurm gave to your pair, in bash or zsh
# Slurm has set CUDA_VISIBLE_DEVICES to the GPUs of the job, and they count from 0 in there: it stays as it is.
. "$(dirname -- "${BASH_SOURCE[0]:-$0}")/room.sh"
if [ -n "${SLURM_JOB_ID:-}" ]; then
    gpu_sizes && echo "job $SLURM_JOB_ID on $(hostname): GPUs ${CUDA_VISIBLE_DEVICES:-of the whole node}"
else
    echo "error: not in a Slurm job: srun --nodes 1 --gpus-per-node 2 --cpus-per-task 16 --time 8:00:00 --pty \$SHELL" >&2
fi
