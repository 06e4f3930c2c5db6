#!/bin/bash
# Trains on several nodes of GPUs, saves before its time is over, and goes on where it stopped when it is started again.
#
#     sbatch step08_5d/slurm.sh
#
# One torchrun per node, started by srun; each starts one trainer per GPU. Written for such a cluster, not run on one.
#SBATCH --job-name=step08
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1                # torchrun; the trainers are its children
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64                 # all of a node's
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120                  # SIGTERM to every torchrun, 120 s before the time is over
#SBATCH --requeue                          # the job may be put back into the queue, after a node has failed or by the last lines below
#SBATCH --open-mode=append                 # and then goes on in the same output file
#SBATCH --output=%x_%j.out
set -u

TRAINER=${TRAINER:-step08_5d}              # the trainer's folder; it has to be on all nodes, as has this:
RUN=${RUN:-$PWD/run}                       # a SHARED file system: every rank writes a part of each checkpoint and reads others'
mkdir -p "$RUN"

# Ranks are numbered node by node and tp is the innermost dimension, pp the outermost. So with tp x cp x dp = 8 a stage of the pipeline
# is one node: tp never leaves it, and only pp crosses.
STEPS=20000
FLAGS=(--model llama-8b --tp 2 --dp 4 --pp 4 --zero 1 --seq_len 8192 --global_batch_size 256 --micro_batch_size 1
       --recompute selective --steps "$STEPS" --checkpoint "$RUN/checkpoints" --save_every 500 --keep 3 --log_file "$RUN/log.jsonl" --resume)

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)                    # where ranks meet
PORT=$((20000 + SLURM_JOB_ID % 10000))                                              # two jobs may share that host's ports

export OMP_NUM_THREADS=8                   # threads of a trainer on the CPU; with none given torchrun sets 1
export NCCL_DEBUG=WARN                     # INFO says which network is used: look once, for a fall back to sockets is silent and slow
# export NCCL_SOCKET_IFNAME=eth0           # the interface over which ranks find each other, where NCCL picks a wrong one
# export NCCL_IB_HCA=mlx5                  # the InfiniBand adapters to use, where some are for storage
export PYTORCH_ALLOC_CONF=expandable_segments:True     # ZeRO-3 frees and takes its units' weights all the time: less fragmentation
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000   # the flight recorder: so many collectives back, of every rank (newer name: TORCH_FR_BUFFER_SIZE)
export TORCH_NCCL_DUMP_ON_TIMEOUT=1        # written when one times out
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$RUN/flight_recorder_"                       # + the rank
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100  # s from SIGTERM to SIGKILL: a step and a save must end in it. Without it torchrun takes 30

newest() { ls "$RUN/checkpoints" 2>/dev/null | grep -x "step_[0-9]*" | tail -n 1; }
BEFORE=$(newest)

srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc_per_node 8 --max-restarts 3 \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$HEAD:$PORT" "$TRAINER/train.py" "${FLAGS[@]}"
status=$?

# torchrun ends with an error also when it was told to end. As long as there is a newer checkpoint than before, but not the last one, go on.
NOW=$(newest)
if [ "$NOW" != "$BEFORE" ] && [ "$NOW" != "$(printf 'step_%08d' "$STEPS")" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
