"""Draw the figures of the pages: `python docs/figures/draw.py` writes the .svg files beside this one."""

import re
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

HERE = Path(__file__).parent
COLORS = ("#5b8ff9", "#f6a04d", "#61c29a", "#c277d1")
GREY = "#7d7d7d"  # readable on white and on black

mpl.rcParams.update({"svg.hashsalt": "lockstep", "svg.fonttype": "none", "text.color": GREY, "font.size": 11})


def canvas(width: float, height: float) -> Axes:
    """Return axes without frame in which one unit is 0.8 inch."""
    _, axes = plt.subplots(figsize=(width * 0.8, height * 0.8))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def save(axes: Axes, name: str) -> None:
    """Write the figure, the same bytes each time."""
    figure = axes.figure
    figure.savefig(HERE / f"{name}.svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close()


def box(axes: Axes, at: tuple[float, float], size: tuple[float, float], text: str, color: str) -> None:
    """Draw a rounded box with its lower left corner at a place."""
    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch(at, *size, boxstyle=style, facecolor=color, edgecolor="none"))
    axes.text(at[0] + size[0] / 2, at[1] + size[1] / 2, text, ha="center", va="center", color="white", fontsize=10)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0) -> None:
    """Draw an arrow."""
    style = f"arc3,rad={bend}"
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, connectionstyle=style, color=GREY))


def ring() -> None:
    """Ring all-reduce of three ranks: what each has of the three parts, before, between and after."""
    axes = canvas(13.2, 5.2)
    states = (
        (
            "each rank has its own gradient,\nin three parts",
            (("a0", "b0", "c0"), ("a1", "b1", "c1"), ("a2", "b2", "c2")),
        ),
        (
            "reduce-scatter, 2 messages per rank:\neach rank has the sum of one part",
            (("", "Σb", ""), ("", "", "Σc"), ("Σa", "", "")),
        ),
        ("all-gather, 2 messages per rank:\neach rank has all sums", (("Σa", "Σb", "Σc"),) * 3),
    )
    for column, (title, ranks) in enumerate(states):
        left = 0.6 + 4.3 * column
        axes.text(left + 1.5, 4.7, title, ha="center", va="center", fontsize=10)
        for rank, parts in enumerate(ranks):
            for part, text in enumerate(parts):
                if text:
                    box(axes, (left + part, 3.1 - 1.2 * rank), (0.9, 0.7), text, COLORS[part])
        if column < len(states) - 1:
            arrow(axes, (left + 3.1, 2.2), (left + 4.1, 2.2))
    for rank in range(3):
        axes.text(0.45, 3.45 - 1.2 * rank, f"rank {rank}", ha="right", va="center", fontsize=10)
    save(axes, "ring")


def buckets() -> None:
    """A backward whose buckets are sent while it goes on, and one that sends everything at its end."""
    axes = canvas(12.5, 4.4)
    layers = ("layer 4", "layer 3", "layer 2", "layer 1")
    for row, (title, overlap) in enumerate((("one message at the end", False), ("buckets during the backward", True))):
        y = 2.4 - 2.2 * row
        axes.text(0.1, y + 1.55, title, ha="left", va="center", fontsize=11)
        axes.text(1.3, y + 1.0, "backward", ha="right", va="center", fontsize=9)
        axes.text(1.3, y + 0.35, "network", ha="right", va="center", fontsize=9)
        for number, layer in enumerate(layers):
            box(axes, (1.5 + 1.55 * number, y + 0.75), (1.5, 0.5), layer, COLORS[number])
        if overlap:
            for number, at in enumerate((4.6, 7.7)):
                box(axes, (at, y + 0.1), (2.0, 0.5), f"bucket {number}", COLORS[1 + 2 * number])
                arrow(axes, (at, y + 0.75), (at + 0.1, y + 0.6))
            arrow(axes, (10.6, y + 0.35), (9.75, y + 0.35))
            axes.text(10.7, y + 0.35, "done", ha="left", va="center", fontsize=9)
        else:
            box(axes, (7.7, y + 0.1), (4.0, 0.5), "all gradients", GREY)
    save(axes, "buckets")


def tree() -> None:
    """Four shards, added in the same tree by one worker, by two, and by three."""
    axes = canvas(13.4, 4.6)
    for column, owners in enumerate(((0, 0, 0, 0), (0, 0, 1, 1), (0, 0, 1, 2))):
        left = 0.4 + 4.4 * column
        count = max(owners) + 1
        axes.text(left + 1.95, 4.2, f"{count} worker{'s' if count > 1 else ''}", ha="center", fontsize=11)
        for shard, owner in enumerate(owners):
            box(axes, (left + shard, 0.3), (0.85, 0.6), f"g{shard}", COLORS[owner])
        for pair in range(2):
            box(
                axes,
                (left + 0.3 + 2 * pair, 1.6),
                (1.25, 0.6),
                f"g{2 * pair} + g{2 * pair + 1}",
                COLORS[owners[2 * pair]],
            )
            for side in range(2):
                shard = 2 * pair + side
                arrow(axes, (left + shard + 0.42, 0.9), (left + 0.92 + 2 * pair, 1.6))
        box(axes, (left + 0.5, 2.9), (2.9, 0.6), "(g0 + g1) + (g2 + g3)", GREY)
        for pair in range(2):
            arrow(axes, (left + 0.92 + 2 * pair, 2.2), (left + 1.95, 2.9))
    save(axes, "tree")


def steps() -> None:
    """Bars of the ratios in the first table of docs/benchmarks.md, of the rows with SGD."""
    text = (HERE.parent / "benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+), [^|]+ \| SGD \| (\d) \| ([\d.]+) \| ([\d.]+) \| ~?[\d.]+ \|$", text, re.MULTILINE)
    axes = canvas(7.4, 0.7 * len(rows) + 1.6)
    left, unit, top = 2.7, 3.6, 0.7 * len(rows)
    for number, (model, workers, *ratios) in enumerate(rows):
        y = top - 0.7 * number
        axes.text(left - 0.2, y + 0.03, f"{model}, {workers} workers", ha="right", va="center")
        for bar, ratio in enumerate(map(float, ratios)):
            at = y + 0.03 - 0.28 * bar
            axes.add_patch(Rectangle((left, at), unit * ratio, 0.24, facecolor=COLORS[bar], edgecolor="none"))
            axes.text(left + unit * ratio + 0.1, at + 0.11, f"{ratio:.2f}", ha="left", va="center", fontsize=9)
    axes.plot([left + unit] * 2, [0.3, top + 0.55], color=GREY, linewidth=1, linestyle="dashed")
    axes.text(left + unit, top + 0.75, "torch on Gloo: 1.00", ha="center", va="center", fontsize=10)
    for bar, (at, name) in enumerate(((left - 1.3, "Lockstep on shm"), (left + 1.5, "Lockstep on Gloo"))):
        axes.add_patch(Rectangle((at, top + 1.2), 0.3, 0.3, facecolor=COLORS[bar], edgecolor="none"))
        axes.text(at + 0.45, top + 1.35, name, ha="left", va="center", fontsize=10)
    save(axes, "steps")


if __name__ == "__main__":
    ring()
    buckets()
    tree()
    steps()
