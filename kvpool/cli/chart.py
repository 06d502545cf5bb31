"""The chart of `kvpool plan`: bytes of one request by region, and requests, over length."""

import dataclasses
import os

import numpy as np

from kvpool.cli.report import Question, most_bytes, requests_in_budget, tags_of
from kvpool.status import SpecError
from kvpool.text import tokens_text
from kvpool.variants import without_regions

COLOURS = ("#0b6e99", "#d9730d", "#6940a5", "#448361", "#ad1a72", "#b8860b", "#2f6f6f")
TOTAL, UNIFORM = "#222222", "#999999"
POINTS = 160


def draw(question: Question, path: str | os.PathLike) -> None:
    """Writes the chart as PNG.

    Raises:
      SpecError: when matplotlib is not installed, naming the extra that brings it.
      OSError: when the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SpecError("--chart: needs matplotlib; install kvpool[chart]") from error
    tokens = _lengths(question)
    panels = 2 if question.budget_bytes else 1
    figure = Figure(figsize=(6.8 * panels, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _bytes(axes[0], question, tokens)
    if question.budget_bytes:
        _requests(axes[1], question, tokens)
    for axis in axes:
        _style(axis, question)
    rank = f", one of {question.ranks} ranks" if question.ranks > 1 else ""
    figure.suptitle(f"{question.name}{rank}", fontsize=15, x=0.01, ha="left")
    figure.savefig(path, dpi=150, format="png")


def _lengths(question: Question) -> np.ndarray:
    """Lengths from 256 on, evenly spread on a logarithmic scale, that just fill their blocks."""
    block = max(group.block_size for group in question.spec.groups)
    spread = np.geomspace(min(256, question.longest), question.longest, POINTS)
    return np.unique(np.maximum(1, np.rint(spread / block).astype(np.int64)) * block)


def _bytes(axis, question: Question, tokens: np.ndarray) -> None:
    groups = question.spec.groups
    held = most_bytes(groups, tokens)
    alone, ends = without_regions(question.spec), []
    if alone != question.spec:
        uniform = most_bytes(alone.groups, tokens).sum(axis=0)
        axis.plot(tokens, uniform, color=UNIFORM, ls=(0, (4, 3)), lw=1.4)
        ends.append((uniform[-1], "without regions", UNIFORM))
    for number, (group, size) in enumerate(zip(groups, held, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        axis.plot(tokens, size, color=colour, lw=1.8)
        name = " ".join([group.name, *tags_of(question.spec, group)])
        ends.append((size[-1], f"{name}, {len(group.layers)} layers", colour))
    total = held.sum(axis=0)
    axis.plot(tokens, total, color=TOTAL, lw=2.6)
    ends.append((total[-1], "one request", TOTAL))
    axis.set_yscale("log", base=2)
    _label_ends(axis, tokens[-1], ends)
    axis.set_title(
        "most bytes that one request holds on its way to a length", loc="left", fontsize=11
    )
    axis.yaxis.set_major_formatter(lambda size, _: size_text(size))


def _requests(axis, question: Question, tokens: np.ndarray) -> None:
    alone = dataclasses.replace(question, spec=without_regions(question.spec))
    curves = [(question, "kvpool", {"color": COLOURS[0], "lw": 2.6})]
    if alone.spec != question.spec:
        curves.append((alone, "without regions", {"color": UNIFORM, "lw": 1.4, "ls": (0, (4, 3))}))
    ends = []
    for asked, name, style in curves:
        fit = np.array([requests_in_budget(asked, int(n)) for n in tokens], float)
        axis.plot(tokens, np.where(fit > 0, fit, np.nan), drawstyle="steps-post", **style)
        if fit[-1] > 0:
            ends.append((fit[-1], name, style["color"]))
    for length in question.lengths:
        count = requests_in_budget(question, length)
        if count and length >= tokens[0]:
            axis.plot([length], [count], "o", color=COLOURS[0], ms=5)
            axis.annotate(
                f"{count:,}", (length, count), (3, 6), textcoords="offset points",
                ha="left", fontsize=9, color=COLOURS[0],
            )  # fmt: skip
    axis.set_yscale("log")
    _label_ends(axis, tokens[-1], ends)
    title = f"requests that fit into {size_text(question.budget_bytes or 0)}"
    axis.set_title(title, loc="left", fontsize=11)
    axis.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")


def _label_ends(axis, right: int, ends) -> None:
    """Names the curves at their right ends, from the bottom up and clear of each other."""
    bottom, top = axis.get_ylim()
    gap, last = (top / bottom) ** 0.045, 0.0
    for value, name, colour in sorted(ends):
        last = max(value, last * gap)
        axis.annotate(
            name, (right, last), (6, 0), textcoords="offset points", va="center",
            fontsize=9, color=colour, annotation_clip=False,
        )  # fmt: skip


def _style(axis, question: Question) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xlabel("tokens of the request")
    axis.set_xticks(sorted(set(question.lengths)))
    axis.xaxis.set_major_formatter(lambda tokens, _: tokens_text(int(tokens)))
    axis.minorticks_off()
    axis.grid(color="#e6e6e6", lw=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def size_text(size: float) -> str:
    """Bytes with the unit that fits."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(4, int(np.log2(max(size, 1)) // 10))
    return f"{size / 1024**power:,.3g} {units[power]}"
