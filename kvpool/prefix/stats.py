"""Stats: what a prefix cache counts."""

import dataclasses


@dataclasses.dataclass
class Stats:
    """What a cache has done so far, and what it holds."""

    matches: int = 0
    hits: int = 0  # of them those with a length
    tokens: int = 0  # of all prompts matched
    tokens_hit: int = 0
    snapshots_skipped: int = 0  # wanted, but no block was free
    held: dict[str, int] = dataclasses.field(default_factory=dict)  # blocks of each group now
    stored: dict[str, int] = dataclasses.field(default_factory=dict)
    removed: dict[str, int] = dataclasses.field(default_factory=dict)
