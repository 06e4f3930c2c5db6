"""Is this machine ready for the workshop? Prints READY, or what is missing and its cure.

    python docs/workshop/preflight.py                # a laptop
    python docs/workshop/preflight.py --gpus 2       # a node, where you have sourced pair.sh or slurm.sh

Nothing is installed or changed. It runs in an old Python too, to say that it is old.
"""
import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LOSSES = "5.7309", "4.9988"                               # of the first two steps, under every layout
SECONDS = 180                                             # for two ranks, which take 20
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def output(*command):
    """Return what a command prints; nothing if there is no such command or it fails."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=60).decode().strip()
    except (OSError, subprocess.SubprocessError):
        return ""


# Each check returns the cure, or None.
def system(gpus):
    if sys.platform not in ("linux", "darwin"):
        return "this is %s: install WSL2 (wsl --install, as administrator) and begin there" % sys.platform


def shell(gpus):
    name = os.path.basename(output("ps", "-o", "comm=", "-p", str(os.getppid())).lstrip("-"))
    if name in ("fish", "csh", "tcsh", "dash", "ksh", "nu", "pwsh"):
        return "the shell is %s; the files to source are for bash and zsh: type bash" % name


def python(gpus):
    if sys.version_info < (3, 11):
        return ("Python 3.11 or newer is needed, this is %d.%d: install one, then make .venv/requirements.txt"
                % sys.version_info[:2])


def torch(gpus):
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        return "%s: make .venv/requirements.txt, then source one of laptop.sh, pair.sh, slurm.sh" % error
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    if not (2, 11) <= version <= (2, 13):
        return "torch %s: the steps run on 2.11 to 2.13" % torch.__version__


def driver(gpus):
    if not gpus:
        return None
    import torch
    known = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = torch.cuda.device_count()
    if not known:
        return "nvidia-smi shows no GPU: is this the login node?"
    if torch.version.cuda is None:
        return "this torch is a build for the CPU: install the one for your CUDA version (docs/workshop/README.md)"
    if not found:
        return ("the driver, %s, is too old for torch's CUDA %s: "
                "install a torch that was built for an older CUDA (docs/workshop/README.md)"
                % (known.split()[0], torch.version.cuda))
    if found < gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return "%d GPUs are seen, not %d: CUDA_VISIBLE_DEVICES is %r" % (found, gpus, visible)
    free = [torch.cuda.mem_get_info(i) for i in range(gpus)]
    taken = [i for i in range(gpus) if free[i][1] - free[i][0] > 3 * 2**30]
    if taken:
        return "somebody uses GPU %s: nvidia-smi shows which process, and whose" % taken


def memory(gpus):
    try:
        with open("/proc/meminfo") as file:
            kib = int(next(line for line in file if line.startswith("MemAvailable")).split()[1])
    except OSError:                                       # macOS does not say what is free
        kib = int(output("sysctl", "-n", "hw.memsize") or 0) // 1024 // 2
    wanted = 32 if gpus else 4
    if kib < wanted * 2**20:
        return "%.1f GiB of memory are free, %d are needed: close other programs" % (kib / 2**20, wanted)


def disk(gpus):
    free, wanted = shutil.disk_usage(ROOT).free / 2**30, 60 if gpus else 2
    if not os.access(ROOT, os.W_OK):
        return "nothing can be written to %s: make a clone of your own" % ROOT
    if free < wanted:
        return "%.1f GiB are free at %s, %d are needed" % (free, ROOT, wanted)


def two_ranks(gpus):
    said = train()
    if all(loss in said for loss in LOSSES):
        return None
    if all(loss in train(GLOO_SOCKET_IFNAME=LOOPBACK) for loss in LOSSES):
        return ("two processes do not find each other (a VPN, a firewall?); with this they do: "
                "export GLOO_SOCKET_IFNAME=" + LOOPBACK)
    return "two ranks do not train: " + (said.strip().splitlines() or ["no output"])[-1]


def train(**environment):
    """Return what two ranks print in two training steps on the CPU. Stop them if they take too long."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               os.path.join(ROOT, "step02_dp", "train.py"), "--steps", "2", "--device", "cpu"]
    with tempfile.TemporaryFile("w+") as file:
        environment = dict(os.environ, OMP_NUM_THREADS="1", **environment)
        child = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            child.wait(SECONDS)
        except subprocess.TimeoutExpired:
            child.terminate()                             # torchrun ends its ranks
            child.wait()
            return "did not end within %d s" % SECONDS
        file.seek(0)
        return file.read()


def main():
    gpus = int(sys.argv[2]) if sys.argv[1:2] == ["--gpus"] and sys.argv[2:] else 0
    for check in (system, shell, python, torch, driver, memory, disk, two_ranks):
        cure = check(gpus)
        print("%-10s %s" % (check.__name__.replace("_", " "), cure or "ok"), flush=True)
        if cure:
            sys.exit("NOT READY: " + cure)
    print("READY")


if __name__ == "__main__":
    main()
