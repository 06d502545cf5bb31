"""The picture of a serving run: who holds which block, and how full the pools are."""

from __future__ import annotations

import colorsys
import itertools
from pathlib import Path

import matplotlib
import numpy as np

import kvpool as kv

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FREE = (0.96, 0.96, 0.95)
LINES = ("#0b6e99", "#d9730d", "#6940a5", "#448361")


class Recorder:
    """What a server's blocks look like after each of its steps."""

    def __init__(self, plan: kv.Plan):
        self.plan = plan
        self.groups = plan.spec.groups
        self.owners: dict[str, list[np.ndarray]] = {g.name: [] for g in self.groups}
        self.ideal: dict[str, list[int]] = {g.name: [] for g in self.groups}
        self.chunks: list[bool] = []
        self.preempted: list[int] = []

    def record(self, server) -> None:
        """Note the owners of all blocks, i32[N] per group: a request's index, or -1."""
        lengths = np.asarray(server.state.seq_lens)
        for group in self.groups:
            table = np.asarray(kv.block_table(server.state, group.name))
            owners = np.full(self.plan.num_blocks[group.name], -1)
            for row in server.order:
                owners[table[row][table[row] >= 0]] = server.rows[row].index
            self.owners[group.name].append(owners)
            self.ideal[group.name].append(int(_needed(group, lengths).sum()))
        self.chunks.append(server.chunked)
        self.preempted.append(server.preemptions)

    def averages(self) -> list[tuple[str, float, float]]:
        """(group, blocks held, blocks ideally needed) on average over the steps."""
        held = {name: np.mean([np.sum(o >= 0) for o in self.owners[name]]) for name in self.owners}
        return [(n, float(held[n]), float(np.mean(self.ideal[n]))) for n in self.owners]

    def draw(self, path: Path) -> None:
        """Write the picture as PNG."""
        heights = [max(1.7, len(self.owners[g.name][0]) ** 0.5 / 5) for g in self.groups]
        figure, axes = plt.subplots(
            len(self.groups) + 1, 1, sharex=True, figsize=(13, 2.2 * sum(heights) / 2 + 3.4),
            height_ratios=[*heights, 1.6], layout="constrained",
        )  # fmt: skip
        count = 1 + max(int(np.max(owners)) for owners in self.owners.values())
        title = f"{count} requests through {self.plan.max_seqs} rows: who holds which block"
        figure.suptitle(title, fontsize=15, x=0.01, ha="left")
        for axis, group in zip(axes, self.groups, strict=False):
            self._map(axis, group)
        self._usage(axes[-1])
        figure.savefig(path, dpi=130)
        plt.close(figure)

    def _map(self, axis, group) -> None:
        owners = np.stack(self.owners[group.name], axis=1)  # [N, steps]
        axis.imshow(
            _colours(owners), aspect="auto", interpolation="nearest", origin="lower",
            extent=(0, owners.shape[1], 0, owners.shape[0]),
        )  # fmt: skip
        axis.set_ylabel("block id")
        axis.set_title(_caption(group, len(owners)), loc="left", fontsize=10)
        for step in np.flatnonzero(np.diff(self.preempted, prepend=0)):
            axis.axvline(step + 1, color="black", lw=0.8, ls=(0, (4, 3)))
        if group.is_state:
            _name_runs(axis, owners)

    def _usage(self, axis) -> None:
        for colour, group in zip(LINES, self.groups, strict=False):
            size = self.plan.num_blocks[group.name]
            held = np.array([np.sum(o >= 0) for o in self.owners[group.name]]) / size
            steps = np.arange(len(held)) + 1
            axis.plot(steps, 100 * held, color=colour, lw=1.6, label=f"{group.name}: held")
            axis.plot(
                steps, 100 * np.array(self.ideal[group.name]) / size, color=colour, lw=1.0, ls=":",
                label=f"{group.name}: ideally needed",
            )  # fmt: skip
        chunked = np.array(self.chunks)
        axis.fill_between(
            np.arange(len(chunked) + 1), 0, 1, np.append(chunked, chunked[-1]), step="post",
            transform=axis.get_xaxis_transform(), color="black", alpha=0.06, lw=0,
            label="prompts in this step",
        )  # fmt: skip
        if any(self.preempted):
            axis.plot([], [], color="black", lw=0.8, ls=(0, (4, 3)), label="a row is preempted")
        axis.set(xlabel="scheduling step", ylabel="% of the pool", ylim=(0, 103))
        axis.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.28))
        axis.spines[["top", "right"]].set_visible(False)


def _needed(group: kv.Group, lengths: np.ndarray) -> np.ndarray:
    """Blocks for what the next query of each row reads, if none were cut: i64[S]."""
    if group.is_state:
        return (lengths > 0).astype(int)
    reach = lengths
    if group.region.span:
        reach = np.minimum(lengths, group.region.span - 1)
    return -(-reach // group.block_size)


def _colours(owners: np.ndarray) -> np.ndarray:
    """f32[N, steps, 3]: a colour for every request, neighbours in time far apart in hue."""
    count = max(int(owners.max()) + 1, 1)
    palette = [
        colorsys.hls_to_rgb(i * 0.618034 % 1, (0.42, 0.55, 0.68)[i % 3], 0.62) for i in range(count)
    ]
    return np.array([*palette, FREE], np.float32)[owners]


def _name_runs(axis, owners: np.ndarray) -> None:
    """Write each request's number on its stretch of a state block: the key to the colours."""
    for block, held in enumerate(owners):
        borders = np.flatnonzero(np.diff(held, prepend=-2, append=-2))
        for start, stop in itertools.pairwise(borders):
            if held[start] >= 0 and stop - start > 0.02 * len(held):
                at = ((start + stop) / 2, block + 0.47)
                axis.text(*at, str(held[start]), ha="center", va="center", fontsize=6.5)


def _caption(group: kv.Group, blocks: int) -> str:
    layers = ", ".join(map(str, group.layers))
    each = "one per row, with the request's number"
    if not group.is_state:
        each = f"{group.block_size} tokens each"
    return f"{group.name}   (layers {layers}; {blocks} blocks, {each})"
