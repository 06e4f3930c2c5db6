# source docs/workshop/laptop.sh              in every new terminal of a laptop, in bash or zsh
. "$(dirname -- "${BASH_SOURCE[0]:-$0}")/room.sh"
SIZE=(--steps 5)
LONG=(--seq_len 1024 --global_batch_size 4 --micro_batch_size 1 --steps 3)
