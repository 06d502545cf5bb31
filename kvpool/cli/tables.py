"""The figures of `kvpool plan` as tables for people."""

from typing import Any

from kvpool.cli.report import Question
from kvpool.text import table, tokens_text

SHOWN = 0.0005  # a source of waste below this share of what is held is not worth a word
MOST = 4  # sources of waste named


def show(question: Question, figures: dict[str, Any]) -> str:
    """The whole answer."""
    rank = f", one of {question.ranks} ranks" if question.ranks > 1 else ""
    parts = [f"{question.name}: {figures['layers']} layers{rank}", _groups(figures)]
    tail = " with tail_only" if question.tail_only else ""
    parts.append(
        f"One request, while the last of its tokens is computed; prefilled in steps of "
        f"{tokens_text(question.step_tokens)}{tail}"
    )
    parts.append(_requests(question, figures))
    parts.append(_waste(figures))
    if question.compare:
        parts.append("A cache without regions, in which every layer keeps everything")
        parts.append(_uniform(question, figures))
    return "\n\n".join(parts)


def _groups(figures: dict[str, Any]) -> str:
    head = ["group", "layers", "tokens/block", "bytes/block"]
    head += ["blocks", "MiB", "share"] if figures["plan"] else []
    rows = []
    for group in figures["groups"]:
        row = [
            " ".join([group["name"], *group["tags"]]),
            str(group["layers"]),
            "-" if group["block_tokens"] is None else f"{group['block_tokens']:,}",
            f"{group['bytes_per_block']:,}",
        ]
        if figures["plan"]:
            row += [f"{group['blocks']:,}", mib(group["bytes"]), f"{group['share']:.1%}"]
        rows.append(row)
    text, made = table([head, *rows]), figures["plan"]
    if not made:
        return text
    total, length = mib(figures["total_bytes"]), tokens_text(made["max_seq_len"])
    total = f"{total} MiB for {made['max_seqs']:,} rows of up to {length} tokens"
    return "\n".join([text, total, *figures["sharing"]])


def _requests(question: Question, figures: dict[str, Any]) -> str:
    head = ["tokens", "holds MiB", "needs MiB", "needs/holds", "on average", "prefill peak MiB"]
    fixed = bool(question.rows or question.ratio)  # else the plan is for the longest length
    rows = []
    for request in figures["requests"]:
        row = [
            tokens_text(request["tokens"]),
            mib(request["held_bytes"]),
            mib(request["needed_bytes"]),
            f"{request['efficiency']:.3f}",
            f"{request['mean_efficiency']:.3f}",
            mib(request["prefill_peak_bytes"]),
        ]
        if question.budget_bytes:
            row.append(f"{request['requests']:,}")
        if fixed:
            row.append(f"{request['requests_in_plan']:,}")
        rows.append(row)
    if not question.budget_bytes:
        return table([head, *rows])
    memory = "slabs" if question.in_slabs else "pools"
    note = f"requests: that grow to this length, in {memory} shaped for it alone"
    head += ["requests", "in this plan"] if fixed else ["requests"]
    return f"{table([head, *rows])}\n{note}" + (f"; in this plan: in the {memory} above" * fixed)


def _waste(figures: dict[str, Any]) -> str:
    rows = []
    for request in figures["requests"]:
        sources = sorted(
            (-share, f"{name} {source} {share:.1%}")
            for name, of in request["mean_waste"].items()
            for source, share in of.items()
            if share >= SHOWN
        )
        words = [text for _, text in sources[:MOST]]
        words += [f"{len(sources) - MOST} smaller ones"] if len(sources) > MOST else []
        share = f"{1 - request['mean_efficiency']:.1%}"
        rows.append((tokens_text(request["tokens"]), share, ", ".join(words) or "next to nothing"))
    width = max(len(tokens) for tokens, _, _ in rows)
    lines = [f"{tokens:>{width}}  {share:>6}  {words}" for tokens, share, words in rows]
    head = "Held in vain, on average over where in its last block a request ends"
    return "\n".join([head, *lines])


def _uniform(question: Question, figures: dict[str, Any]) -> str:
    head = ["tokens", "holds MiB", "times kvpool's"]
    rows = []
    for ours, theirs in zip(figures["requests"], figures["uniform"], strict=True):
        row = [
            tokens_text(ours["tokens"]),
            mib(theirs["held_bytes"]),
            f"{theirs['held_bytes'] / ours['held_bytes']:.2f}",
        ]
        if question.budget_bytes:
            row += [f"{theirs['requests']:,}", f"{ours['requests']:,}"]
        rows.append(row)
    return table([head + (["requests", "kvpool's"] if question.budget_bytes else []), *rows])


def mib(size: int) -> str:
    """Bytes as MiB."""
    return f"{size / 2**20:,.1f}"
