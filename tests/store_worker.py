"""What processes of the store's tests do: python store_worker.py DIRECTORY SEED SECONDS

It stores, overwrites and reads back what it and others stored, and prints what was wrong.
"""

import hashlib
import random
import sys
import time
import warnings

import numpy as np

import kvpool as kv

GROUPS = {"full": 4096, "window8": 1024}
SPEC = kv.CacheSpec.from_layers(
    [kv.FullAttention(4, 32, dtype="float32"), kv.SlidingWindow(8, 1, 32, dtype="float32")], 4
)


def digest(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()[:16]


def block(group: str, number: int) -> np.ndarray:
    """What block `number` of a group holds, everywhere and always."""
    return np.random.default_rng(number).integers(0, 256, GROUPS[group], np.uint8)


def write(where, number: int, acknowledge) -> None:
    """Stores blocks one after another, and tells the number of each that is acknowledged."""
    store = kv.tiers.Store(where, SPEC)
    while True:
        puts = [store.put("full", digest(n), block("full", n)) for n in range(number, number + 4)]
        for n, put in enumerate(puts, number):
            if put.wait():
                acknowledge(n)
        number += 4


def mixed(store, seed: int, seconds: float) -> None:
    end, choose, mine = time.monotonic() + seconds, random.Random(seed), set()
    wrong = lost = reads = 0
    while time.monotonic() < end:
        number, group = choose.randrange(500), choose.choice(list(GROUPS))
        if choose.random() < 0.3:
            if store.put(group, digest(number), block(group, number)).wait():
                mine.add((group, number))
            continue
        found = store.get(group, digest(number))
        reads += found is not None
        wrong += found is not None and not np.array_equal(found, block(group, number))
        lost += found is None and (group, number) in mine
    print(f"wrong {wrong} lost {lost} reads {reads} stored {len(mine)}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("error")
    where, seed, seconds = sys.argv[1:]
    mixed(kv.tiers.Store(where, SPEC), int(seed), float(seconds))
