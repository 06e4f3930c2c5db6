# source docs/workshop/pair.sh 3              the third pair on a node that all share: GPUs 4 and 5; `all` takes all eight
pair="$1"
. "$(dirname -- "${BASH_SOURCE[0]:-$0}")/room.sh"
case "$pair" in
    [1-8])
        export CUDA_VISIBLE_DEVICES="$((2 * pair - 2)),$((2 * pair - 1))"
        gpu_sizes && echo "pair $pair: GPUs $CUDA_VISIBLE_DEVICES" ;;
    all)
        unset CUDA_VISIBLE_DEVICES
        gpu_sizes && echo "all GPUs of the node" ;;
    *)
        echo "error: source docs/workshop/pair.sh N, N the number of your pair, from 1; or all" >&2 ;;
esac
