"""Draw docs/figures/machine.png: a node of eight GPUs, two nodes, and an NVL72 rack.    python dev/figures/machine.py

The speeds on it are those of tools/simulate/gpus.py.
"""
from common import PICTURES

from plot import plt
from simulate.gpus import GPUS, NETWORKS

GPU, SWITCH, CARD, NETWORK = "#0072b2", "#009e73", "#f0b040", "#888888"
RAILS = 8


def box(axis, x, y, width, height, color, label="", size=7.5, text="white"):
    axis.add_patch(plt.Rectangle((x, y), width, height, facecolor=color, edgecolor="#333333", linewidth=0.8, zorder=2))
    axis.text(x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=size, color=text, zorder=3)


def line(axis, xs, ys, color, width=1.6, style="-"):
    axis.plot(xs, ys, color=color, linewidth=width, linestyle=style, solid_capstyle="butt", zorder=1)


def node(axis, x, y, step, first=0, labels=True):
    """Draw a node with its lower left corner at (x, y): cards below, GPUs above them, NVSwitches on top."""
    axis.add_patch(plt.Rectangle((x, y), step * 8 + 0.4, 4.6, facecolor="#f6f6f6", edgecolor="#333333", linewidth=1.0, zorder=0))
    box(axis, x + 0.3, y + 3.5, step * 8 - 0.2, 0.7, SWITCH, "NVSwitch: any GPU to any other" if labels else "NVSwitch")
    for rail in range(RAILS):
        left = x + 0.3 + step * rail
        center = left + (step - 0.2) / 2
        line(axis, [center] * 2, [y + 2.7, y + 3.5], SWITCH, 3.4)
        line(axis, [center] * 2, [y + 0.9, y + 1.9], CARD, 1.4)
        box(axis, left, y + 1.9, step - 0.2, 0.9, GPU, f"GPU\n{first + rail}" if labels else str(first + rail), 7)
        box(axis, left, y + 0.3, step - 0.2, 0.6, CARD, "card" if labels else "", 6.5, "black")


def one_node(axis, gpu, network):
    axis.set_title("One node", loc="left", fontsize=10.5, weight="bold")
    node(axis, 0, 0, 1.15)
    for y, text, color in ((3.1, f"NVLink: {gpu.nvlink / 1e9:.0f} GB/s\nper GPU, each way", SWITCH),
                           (2.3, f"its own memory:\n{gpu.hbm / 1e12:.2f} TB/s", GPU),
                           (0.6, f"network: {network / 1e9:.0f} GB/s\nper card, each way", "#a06a00")):
        axis.text(9.8, y, text, fontsize=8, va="center", color=color)
    axis.set(xlim=(-0.1, 13.4), ylim=(-0.15, 4.75))


def two_nodes(axis):
    axis.set_title("Two nodes: a switch of the network for each rail", loc="left", fontsize=10.5, weight="bold")
    for number, x in enumerate((0, 6.9)):
        node(axis, x, 2.0, 0.74, 8 * number, labels=False)
        axis.text(x + 0.2, 6.75, f"node {number}", fontsize=8.5)
        for rail in range(RAILS):
            at = x + 0.3 + 0.74 * rail + 0.27
            line(axis, [at, 2.1 + 1.25 * rail], [2.3, 0.95], NETWORK, 1.0)
    for rail in range(RAILS):
        box(axis, 1.65 + 1.25 * rail, 0.4, 0.95, 0.55, NETWORK, f"rail {rail}", 6.5)
    axis.set(xlim=(-0.1, 13.4), ylim=(0.2, 7.2))


def rack(axis, gpu, network):
    axis.set_title("An NVL72 rack: 72 GPUs on one NVLink", loc="left", fontsize=10.5, weight="bold")
    axis.add_patch(plt.Rectangle((0, 0), 9.7, 6.0, facecolor="#f6f6f6", edgecolor="#333333", linewidth=1.0, zorder=0))
    for tray in range(18):                                                         # 18 trays of four GPUs, nine on each side
        side, row = tray // 9, tray % 9
        x, y = 0.3 + 5.4 * side, 0.25 + 0.63 * row
        center = y + 0.24
        line(axis, [x + (3.62 if side == 0 else 0), 4.45 if side == 0 else 5.25], [center] * 2, SWITCH, 2.6)
        for place in range(4):
            box(axis, x + 0.93 * place, y, 0.83, 0.48, GPU, str(4 * tray + place), 6)
    box(axis, 4.4, 0.25, 0.9, 5.52, SWITCH)
    axis.text(4.85, 3.0, "18 NVSwitches", rotation=90, ha="center", va="center", fontsize=8.5, color="white", zorder=3)
    for y, text, color in ((4.4, f"NVLink: {gpu.nvlink / 1e9:.0f} GB/s\nper GPU, each way,\nto 71 others", SWITCH),
                           (1.8, f"between racks:\n{network / 1e9:.0f} GB/s per card,\nas between nodes", "#a06a00")):
        axis.text(9.9, y, text, fontsize=8, va="center", color=color)
    axis.set(xlim=(-0.1, 13.4), ylim=(-0.1, 6.15))


def main():
    figure, axes = plt.subplots(3, 1, figsize=(8, 10), height_ratios=(4.9, 7.0, 6.25))
    one_node(axes[0], GPUS["h100"], NETWORKS["infiniband"])
    two_nodes(axes[1])
    rack(axes[2], GPUS["gb200"], NETWORKS["infiniband"])
    for axis in axes:
        axis.axis("off")
    figure.subplots_adjust(left=0.02, right=0.99, top=0.97, bottom=0.01, hspace=0.1)
    figure.savefig(PICTURES / "machine.png", dpi=150)


if __name__ == "__main__":
    main()
