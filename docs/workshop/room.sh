# What laptop.sh, pair.sh and slurm.sh share; they source it, in bash or zsh.
#
#     train STEP RANKS FLAGS     a run, of the size for this room         long STEP RANKS FLAGS     one with long sequences
#     dry STEP RANKS FLAGS       llama-1b, simulated                      dry_long STEP RANKS FLAGS
#
# Each shows the whole command before it runs it. Your flags come last, so they override those of the room.

cd -- "$(dirname -- "${BASH_SOURCE[0]:-$0}")/../.." > /dev/null || return
# COURSE: another clone, whose .venv is used instead of this one's
if [ -f "${COURSE:-.}/.venv/bin/activate" ]; then
    . "${COURSE:-.}/.venv/bin/activate"
fi
export PYTHON=python OMP_NUM_THREADS=1

LLAMA=(--model llama-1b --seq_len 4096 --global_batch_size 16 --micro_batch_size 1)

shown() {
    printf '+ %s\n' "$*"
    "$@"
}
run_step() { shown torchrun --standalone --nproc_per_node "$2" "$(echo step0"$1"_*/train.py)" "${@:3}"; }
train() { run_step "$1" "$2" "${SIZE[@]}" "${@:3}"; }
long() { run_step "$1" "$2" "${LONG[@]}" "${@:3}"; }
dry() { shown python tools/simulate "$1" "$2" "${LLAMA[@]}" "${@:3}" --details; }
dry_long() { shown python tools/simulate "$1" "$2" "${LLAMA_LONG[@]}" "${@:3}" --details; }

long_sequence() { LLAMA_LONG=(--model llama-1b --seq_len "$1" --global_batch_size 2 --micro_batch_size 1); }
long_sequence 40960

# For GPUs. The long sequence is one that a GPU with this much memory cannot hold, and half of which it can; see README.md.
gpu_sizes() {
    local mib
    mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null | head -n 1)
    if [ -z "$mib" ]; then
        echo "error: nvidia-smi shows no GPU here; on a laptop, source docs/workshop/laptop.sh" >&2
        return 1
    elif [ "$mib" -gt 100000 ]; then
        long_sequence 90112
    elif [ "$mib" -lt 50000 ]; then
        long_sequence 12288
    fi
    SIZE=("${LLAMA[@]}" --steps 10)
    LONG=("${LLAMA_LONG[@]}" --steps 5)
}
