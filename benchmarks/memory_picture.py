"""The picture of `memory.py`: the bytes that each group holds over time."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvpool.needs import block_bytes

COLOURS = ("#0b6e99", "#d9730d", "#6940a5", "#448361", "#ad1a72", "#b8860b", "#2f6f6f")
LINES = ("#d9730d", "#b8860b", "#6940a5", "#0b6e99", "#222222")
FREE = "#f4f4f2"


def draw(path: str, title: str, served: dict, budget: int) -> None:
    """Writes the picture as PNG: a panel for each way to divide the memory, and who runs."""
    figure = Figure(figsize=(13, 2.3 * len(served) + 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [2.3] * len(served) + [2.0]
    axes = figure.subplots(len(served) + 1, 1, sharex=True, height_ratios=heights)
    figure.suptitle(f"{title}: who holds the memory", fontsize=15, x=0.01, ha="left")
    for axis, (which, one) in zip(axes, served.items(), strict=False):
        _memory(axis, which, one, budget)
    handles, labels = axes[0].get_legend_handles_labels()
    for (which, one), colour in zip(served.items(), LINES[-len(served) :], strict=True):
        numbers = [tick.number for tick in one.run.ticks]
        running = [tick.running for tick in one.run.ticks]
        handles += axes[-1].plot(numbers, running, color=colour, lw=1.3)
        labels.append(f"{which}: requests")
    axes[-1].set_title("running requests", loc="left", fontsize=11)
    axes[-1].set_ylim(0)
    axes[-1].set_xlabel("tick")
    axes[-1].set_xlim(0, max(one.run.ticks[-1].number for one in served.values()))
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path, dpi=120, format="png")


def _memory(axis, which: str, one, budget: int) -> None:
    groups, run = one.spec.groups, one.run
    numbers = [tick.number for tick in run.ticks]
    held = run.held / budget * 100  # [ticks, G]
    independent = one.plan is not None and one.spec.pooling == "independent"
    # Independent groups stand each on the floor of its own pool, others on each other.
    floors = np.cumsum(held, axis=1) - held
    if independent:
        sizes = block_bytes(groups) * np.array(one.plan.blocks) / budget * 100
        floors[:] = np.cumsum(sizes) - sizes
        for floor in floors[0][1:]:
            axis.axhline(floor, color="#222222", lw=0.8, ls=(0, (4, 3)))
    for index, group in enumerate(groups):
        low = floors[:, index]
        axis.fill_between(
            numbers, low, low + held[:, index], step="post", lw=0, label=f"{group.name}: held",
            color=COLOURS[index % len(COLOURS)],
        )  # fmt: skip
    each = "independent pools, the best split, " if independent else ""
    mean = f"{run.concurrency:,.1f} requests run, {run.use(budget):.0%} of the memory is needed"
    axis.set_title(f"{each}{which}   ({mean})", loc="left", fontsize=11)
    axis.set_facecolor(FREE)
    axis.set_ylim(0, 100)
    axis.set_yticks([0, 25, 50, 75, 100])
    axis.set_ylabel("% of the memory")
