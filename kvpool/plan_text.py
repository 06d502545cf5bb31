"""What a plan says of itself: blocks, bytes, and how much of them can serve no one."""

from typing import TYPE_CHECKING

from kvpool.text import table

if TYPE_CHECKING:
    from kvpool.plan import Plan


def describe(plan: "Plan") -> str:
    """The plan as a table with a line for each group, and what it adds up to."""
    head = ("group", "layers", "tokens/block", "bytes/block", "blocks", "MiB", "share")
    shared = sharing(plan)
    rows = [(*head, "array", "a row", "unused") if shared else head]
    for index, (group, blocks) in enumerate(zip(plan.spec.groups, plan.blocks, strict=True)):
        array = plan.array_of[index]
        size = plan.array_bytes[array] * plan.array_rows[array]
        row = (
            group.name,
            str(len(group.layers)),
            "-" if group.is_state else f"{group.block_size:,}",
            f"{group.bytes_per_block:,}",
            f"{blocks:,}",
            f"{size / 2**20:,.1f}",
            f"{size / plan.total_bytes:.1%}",
        )
        layout = (str(array), f"{plan.per_row[index]:,}", f"{_unused(plan, index):.2%}")
        rows.append((*row, *layout) if shared else row)
    total = (
        f"{plan.total_bytes / 2**20:,.1f} MiB; {plan.token_capacity:,} tokens "
        f"in up to {plan.max_seqs:,} rows of up to {plan.max_seq_len:,}"
    )
    return "\n".join([table(rows), total, *shared])


def sharing(plan: "Plan") -> list[str]:
    """For each block array that groups share a line that says which, and what it costs at most."""
    arrays = range(len(plan.array_bytes))
    return [_waste(plan, array) for array in arrays if _is_shared(plan, array)]


def _members(plan: "Plan", array: int) -> list[int]:
    return [group for group, home in enumerate(plan.array_of) if home == array]


def _is_shared(plan: "Plan", array: int) -> bool:
    return array == plan.slab_array or len(_members(plan, array)) > 1


def _unused(plan: "Plan", group: int) -> float:
    """The share of a row of the group's array that holds no block of it, however full."""
    block = plan.spec.groups[group].bytes_per_block
    return 1 - plan.per_row[group] * block / plan.array_bytes[plan.array_of[group]]


def _waste(plan: "Plan", array: int) -> str:
    """What sharing this array costs at most."""
    members = _members(plan, array)
    most = f"at most {max(_unused(plan, group) for group in members):.2%} of each unused"
    names = ", ".join(plan.spec.groups[group].name for group in members)
    rows, size = plan.array_rows[array], plan.array_bytes[array]
    if array != plan.slab_array:
        return f"array {array}: {names} share {rows:,} blocks of {size:,} bytes; {most}"
    pools = len({plan.pool_of[group] for group in members})
    return (
        f"array {array}: {names} share {rows:,} slabs of {size:,} bytes; {most} at its end; "
        f"up to {pools} half used ({pools / rows:.2%}) while nothing is given back, and then up to "
        "all but one block of each"
    )
