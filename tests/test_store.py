"""A store gives back the bytes that were put there, or nothing."""

import contextlib
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorstore
from store_worker import GROUPS, SPEC, block, digest, write

import kvpool as kv
from kvpool.tiers import Counts, Store, StoreWarning, values

LONG = float(os.environ.get("STORE_SECONDS", "30"))  # of mixed load
WORKER = pathlib.Path(__file__).parent / "store_worker.py"


def files(where):
    """The values of a store in a directory."""
    return [path for path in sorted(where.rglob("*")) if path.is_file() and "lock" not in path.name]


def test_blocks_come_back_and_outlive_the_store(tmp_path):
    where = tmp_path / "a store #1, ü"
    store = Store(where, SPEC)
    for group in GROUPS:
        assert store.get(group, digest(1)) is None
        put = store.put(group, digest(1), block(group, 1))
        assert put.wait()
        assert put.done
    assert store.counts == Counts(hits=0, misses=2, written=2)
    assert len(files(where)) == 2
    for again in (store, Store(where, SPEC), Store(where.as_uri(), SPEC)):
        found = again.prefetch([("full", digest(1)), ("window8", digest(1)), ("full", digest(2))])
        blocks = found.result()
        assert found.ready
        assert blocks["full", digest(1)].tobytes() == block("full", 1).tobytes()
        assert blocks["window8", digest(1)].tobytes() == block("window8", 1).tobytes()
        assert blocks["full", digest(2)] is None
        assert (again.counts.hits, again.counts.misses - 2 * (again is store)) == (2, 1)


def test_any_array_of_the_right_size_is_a_block(tmp_path):
    store = Store(tmp_path, SPEC)
    words = np.arange(2048, dtype=np.uint16).reshape(2, 1024)[:, ::-1]
    assert store.put("full", digest(3), words).wait()
    assert store.get("full", digest(3)).tobytes() == words.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        store.get("full", digest(3))[0] = 1


def test_a_put_copies_the_block_at_once(tmp_path):
    store, words = Store(tmp_path, SPEC), block("full", 1)
    put = store.put("full", digest(1), words)
    words[:] = 0
    assert put.wait()
    assert store.get("full", digest(1)).tobytes() == block("full", 1).tobytes()


def other(**changes):
    regions = {"dtype": "float32", "heads": 4, "dim": 32, "window": 8, **changes}
    layers = [
        kv.FullAttention(regions["heads"], regions["dim"], dtype=regions["dtype"]),
        kv.SlidingWindow(regions["window"], 1, 32, dtype="float32"),
    ]
    return kv.CacheSpec.from_layers(
        layers[:: changes.get("order", 1)], changes.get("block_size", 4)
    )


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (other(dtype="int32"), {}),  # of the same bytes per block
        (other(heads=2, block_size=8), {}),
        (other(order=-1), {}),
        (other(heads=2, dim=64), {}),
        (SPEC, {"layout": "layer_first"}),
        (SPEC, {"layers": (0, 1)}),
        (SPEC, {"heads": (0, 2)}),
        (SPEC, {"model": "another"}),
    ],
)
def test_what_makes_bytes_wrong_makes_another_key(tmp_path, spec, options):
    assert spec.group("full").bytes_per_block == GROUPS["full"]
    assert Store(tmp_path, SPEC).put("full", digest(1), block("full", 1)).wait()
    assert Store(tmp_path, other()).get("full", digest(1)) is not None
    stranger = Store(tmp_path, spec, **options)
    assert stranger.get("full", digest(1)) is None
    assert stranger.put("full", digest(1), block("full", 2)).wait()
    assert Store(tmp_path, SPEC).get("full", digest(1)).tobytes() == block("full", 1).tobytes()


def _older(value):
    return value[:4] + (values.VERSION - 1).to_bytes(2, "little") + value[6:]


def _flipped(at):
    return lambda value: value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda value: value[:-1], "cut short: 4159 bytes, wanted 4160"),
        (lambda value: value[:10], "cut short: 10 bytes"),
        (lambda value: b"", "cut short: 0 bytes"),
        (lambda value: value + b"x", "cut short: 4161 bytes, wanted 4160"),
        (lambda value: value[:2000] + bytes(len(value) - 2000), "torn"),
        (_flipped(4159), "torn"),
        (_flipped(values.OVERHEAD), "torn"),
        (_flipped(values.OVERHEAD - 1), "torn"),
        (_flipped(0), "foreign: not written by kvpool"),
        (_flipped(10), "foreign: written for another key"),
        (lambda value: b"x" * len(value), "foreign: not written by kvpool"),
        (_older, "of format version 0, wanted 1"),
    ],
)
def test_a_value_that_is_not_whole_is_a_miss_and_said_once(tmp_path, spoil, says):
    store = Store(tmp_path, SPEC)
    assert store.put("full", digest(1), block("full", 1)).wait()
    assert store.put("full", digest(2), block("full", 2)).wait()
    for path in files(tmp_path):
        path.write_bytes(spoil(path.read_bytes()))
    with pytest.warns(StoreWarning, match=says):
        assert store.get("full", digest(1)) is None
    assert store.get("full", digest(2)) is None
    assert store.put("full", digest(1), block("full", 1)).wait()
    assert store.get("full", digest(1)).tobytes() == block("full", 1).tobytes()


def test_every_flipped_bit_of_a_value_is_found_out():
    space, key, payload = b"n" * 16, b"key", bytes(range(64))
    value = values.pack(space, key, memoryview(payload))
    assert bytes(values.unpack(space, key, value, 64)) == payload
    for bit in range(8 * len(value)):
        spoilt = bytearray(value)
        spoilt[bit // 8] ^= 1 << bit % 8
        assert isinstance(values.unpack(space, key, bytes(spoilt), 64), values.Bad)


def test_a_value_under_another_key_is_a_miss(tmp_path):
    store = Store(tmp_path, SPEC)
    for number in (1, 2):
        assert store.put("full", digest(number), block("full", number)).wait()
    first, second = files(tmp_path)
    first.write_bytes(second.read_bytes())
    with pytest.warns(StoreWarning, match="written for another key"):
        found = [store.get("full", digest(number)) for number in (1, 2)]
    assert sum(one is None for one in found) == 1


def test_the_blocks_unused_for_longest_go_at_the_limit(tmp_path):
    size = GROUPS["full"] + values.OVERHEAD
    store = Store(tmp_path, SPEC, limit_bytes=4 * size)
    for number in range(4):
        assert store.put("full", digest(number), block("full", number)).wait()
    assert store.get("full", digest(0)) is not None
    for number in (4, 5):
        assert store.put("full", digest(number), block("full", number)).wait()
    _settled(store)
    found = [store.get("full", digest(number)) is not None for number in range(6)]
    assert found == [True, False, False, True, True, True]
    assert store.counts.evicted == 2
    assert sum(path.stat().st_size for path in files(tmp_path)) == 4 * size


def test_a_limit_counts_what_others_and_other_specs_stored(tmp_path):
    size = GROUPS["full"] + values.OVERHEAD
    stranger = Store(tmp_path, SPEC, model="another")
    for number in range(8):
        assert stranger.put("full", digest(number), block("full", number)).wait()
    store = Store(tmp_path, SPEC, limit_bytes=4 * size)
    assert store.put("full", digest(0), block("full", 0)).wait()
    _settled(store)
    assert sum(path.stat().st_size for path in files(tmp_path)) == 4 * size
    assert store.counts.evicted == 5
    assert store.get("full", digest(0)) is not None
    small = Store(tmp_path, SPEC, limit_bytes=size - 1)
    assert not small.put("full", digest(1), block("full", 1)).wait()
    assert small.counts.dropped == 1


def _settled(store):
    for delete in store._deletes:
        delete.result()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda store: store.put("swa", digest(1), block("full", 1)), "no group 'swa'"),
        (lambda store: store.get("swa", digest(1)), "the groups are full, window8"),
        (lambda store: store.get("full", "0123456789abcdef"), "wanted at least 8 bytes"),
        (lambda store: store.get("full", b"short"), "wanted at least 8 bytes"),
        (
            lambda store: store.put("window8", digest(1), block("full", 1)),
            "wanted 1024 bytes of 'window8', got 4096",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, call, says):
    store = Store(tmp_path, SPEC)
    with pytest.raises(kv.SpecError, match=says):
        call(store)
    assert files(tmp_path) == []
    with pytest.raises(kv.SpecError, match="limit_bytes"):
        Store(tmp_path, SPEC, limit_bytes=0)
    with pytest.raises(kv.SpecError, match="where: got 'nowhere://x'"):
        Store("nowhere://x", SPEC)


@pytest.mark.parametrize("module", ["tensorstore", "xxhash"])
def test_without_the_extra_the_cure_is_named(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'kvpool\[storage\]'"):
        Store(tmp_path, SPEC)


def run(*arguments):
    command = [sys.executable, str(WORKER), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("seconds", [3, pytest.param(LONG, marks=pytest.mark.slow)])
def test_two_processes_share_a_store(tmp_path, seconds):
    workers = [run(tmp_path, seed, seconds) for seed in (1, 2)]
    for worker in workers:
        told = worker.communicate()[0].split()
        assert worker.returncode == 0
        assert told[:4] == ["wrong", "0", "lost", "0"]
        assert int(told[5]) > 20
    assert any(tensorstore.KvStore.open(tmp_path.as_uri() + "/").result().list().result())


@pytest.fixture(scope="module")
def processes():
    """Processes that begin with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["store_worker", "tensorstore", "xxhash"])
    return context


def killed(processes, where, first, seconds):
    """The blocks that a process had acknowledged when it was killed so long after the first."""
    reader, writer = processes.Pipe(duplex=False)
    child = processes.Process(target=write, args=(where, first, writer.send))
    child.start()
    writer.close()
    acknowledged = [reader.recv()]
    time.sleep(seconds)
    child.kill()
    with contextlib.suppress(EOFError):
        while True:
            acknowledged.append(reader.recv())
    child.join()
    reader.close()
    assert child.exitcode == -signal.SIGKILL
    child.close()
    return acknowledged


@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_process_loses_nothing_that_was_acknowledged(tmp_path, processes, kills):
    """And nothing comes back wrong; the same blocks are written again and again."""
    choose, acknowledged = np.random.default_rng(0), set()
    for kill in range(kills):
        start = int(choose.integers(0, 2000))
        acknowledged.update(killed(processes, tmp_path, start, choose.uniform(0, 0.03)))
        store = Store(tmp_path, SPEC)
        everything = range(2400) if kill % 20 == 19 or kill == kills - 1 else acknowledged
        found = store.prefetch([("full", digest(number)) for number in everything], 60).result()
        for number in everything:
            got = found["full", digest(number)]
            assert got is not None or number not in acknowledged
            assert got is None or got.tobytes() == block("full", number).tobytes()
