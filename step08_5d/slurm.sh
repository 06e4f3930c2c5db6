#!/bin/bash
# Train on several GPU nodes, save before the time limit, and resume when Slurm starts the job again.
#
#     sbatch step08_5d/slurm.sh
#
# srun starts one torchrun per node, and torchrun starts one trainer per GPU. This script has not been run on a cluster.
#SBATCH --job-name=step08
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1                # one torchrun per node; the trainers are its children
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64                 # all CPU cores of a node; adapt it to yours
#SBATCH --exclusive                        # share the nodes with no other job
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120                  # SIGTERM to every torchrun 120 s before the limit: the trainers save
#SBATCH --requeue                          # allows Slurm, when a node fails, and the last lines below to requeue
#SBATCH --open-mode=append                 # a requeued job appends to its output file, which it would overwrite
#SBATCH --output=%x_%j.out
set -u

TRAINER=${TRAINER:-step08_5d}              # the trainer's folder, which all nodes must see
# The run's folder must be on a SHARED file system: each rank writes a part of a checkpoint and reads the others'.
RUN=${RUN:-$PWD/run}
mkdir -p "$RUN"

# torchrun numbers ranks node by node, and in the mesh tp is the innermost dimension and pp the outermost. With
# tp x cp x dp = 8, each pipeline stage fills one node, so tp stays inside a node and only pp communicates
# between nodes.
STEPS=20000
FLAGS=(--model llama-8b --tp 2 --dp 4 --pp 4 --zero 1 --seq_len 8192 --global_batch_size 256 --micro_batch_size 1
       --recompute selective --steps "$STEPS" --checkpoint "$RUN/checkpoints" --save_every 500 --keep 3
       --log_file "$RUN/log.jsonl" --resume)

# all torchruns meet on the first node, at a port that depends on the job: another may have the same first node
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=$((20000 + SLURM_JOB_ID % 10000))

# after a restart the ranks meet in a new store, so a replacement node can join
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=8                   # CPU threads per trainer: torchrun would set 1
# use INFO once to see which network NCCL uses: it falls back to slow sockets without a warning
export NCCL_DEBUG=WARN
# export NCCL_SOCKET_IFNAME=eth0           # how ranks find each other: set it if NCCL picks the wrong interface
# export NCCL_IB_HCA=mlx5                  # the InfiniBand adapters to use: set it if some of them are for storage
# reduces fragmentation, most of all with --zero 3, which keeps freeing weights
export PYTORCH_ALLOC_CONF=expandable_segments:True
# the flight recorder keeps each rank's last 2000 collectives (newer name: TORCH_FR_BUFFER_SIZE)
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000
export TORCH_NCCL_DUMP_ON_TIMEOUT=1        # write them to a file when a collective times out; its name begins with:
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$RUN/flight_recorder_"                       # torch appends the rank
# seconds from SIGTERM until torchrun kills the trainers (default 30): enough for a step and a save
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100

newest() { ls "$RUN/checkpoints" 2>/dev/null | grep -x "step_[0-9]*" | tail -n 1; }
BEFORE=$(newest)

srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc_per_node 8 --max-restarts 3 \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$HEAD:$PORT" "$TRAINER/train.py" "${FLAGS[@]}"
status=$?

# torchrun returns an error even if the trainers saved and stopped on SIGTERM, so its status does not say whether
# to continue. Requeue the job if it has saved a new checkpoint (else it would fail again and again) and that
# checkpoint is not the last.
NOW=$(newest)
if [ "$NOW" != "$BEFORE" ] && [ "$NOW" != "$(printf 'step_%08d' "$STEPS")" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
