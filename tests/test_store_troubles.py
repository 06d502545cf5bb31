"""A store that is full, read-only, unreachable or slow costs hits, and says so once."""

import logging
import shutil
import socket
import subprocess
import time
import warnings

import boto3
import pytest
from bad_places import Failed, Failing, Stuck
from moto.server import ThreadedMotoServer
from store_worker import SPEC, block, digest

from kvpool.tiers import Store, StoreWarning


@pytest.fixture
def s3(monkeypatch):
    """A real S3 server on loopback with an empty bucket: (server, options for a store)."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="blocks")
    client.close()
    yield server, {"endpoint": endpoint, "aws_region": "us-east-1"}
    server.stop()


def test_s3_is_a_store_like_any_other(s3):
    _, options = s3
    store = Store("s3://blocks/some/where", SPEC, options=options)
    puts = [store.put("full", digest(number), block("full", number)) for number in range(20)]
    assert all(put.wait() for put in puts)
    again = Store("s3://blocks/some/where", SPEC, options=options)
    found = again.prefetch([("full", digest(number)) for number in range(21)]).result()
    for number in range(20):
        assert found["full", digest(number)].tobytes() == block("full", number).tobytes()
    assert found["full", digest(20)] is None
    assert Store("s3://blocks/some/where", SPEC, model="b", options=options).counts.hits == 0
    elsewhere = Store("s3://blocks/elsewhere", SPEC, options=options)
    assert elsewhere.get("full", digest(1)) is None


def test_s3_keeps_to_its_limit(s3):
    _, options = s3
    store = Store("s3://blocks/", SPEC, options=options, limit_bytes=3 * 4160)
    for number in range(6):
        assert store.put("full", digest(number), block("full", number)).wait()
    for delete in store._deletes:
        delete.result()
    found = [store.get("full", digest(number)) is not None for number in range(6)]
    assert found == [False, False, False, True, True, True]


def test_a_server_that_goes_away_costs_hits_and_no_time(s3):
    server, options = s3
    store = Store("s3://blocks/", SPEC, options=options, retry_s=60)
    assert store.put("full", digest(1), block("full", 1)).wait()
    server.stop()
    _fails_once(store, reads="cannot read", writes="cannot write")


def _fails_once(store, reads=None, writes=None):
    """The first read or write fails and says so; the next hundred cost nothing and say nothing."""
    if reads:
        with pytest.warns(StoreWarning, match=reads):
            assert store.get("full", digest(1)) is None
    if writes:
        with pytest.warns(StoreWarning, match=writes):
            assert not store.put("full", digest(2), block("full", 2)).wait()
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(100):
            if writes:
                assert not store.put("full", digest(number), block("full", 3)).wait()
            if reads:
                assert store.get("full", digest(number)) is None
    assert time.monotonic() - begin < 0.5


def test_an_unreachable_server(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.socket() as taken:  # nobody listens there
        taken.bind(("127.0.0.1", 0))
        options = {
            "endpoint": f"http://127.0.0.1:{taken.getsockname()[1]}",
            "aws_region": "us-east-1",
        }
        store = Store("s3://blocks/", SPEC, options=options)
        _fails_once(store, reads="cannot read, every read is a miss", writes="nothing is stored")


def test_a_server_that_does_not_answer(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        options = {
            "endpoint": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "aws_region": "us-east-1",
        }
        store = Store("s3://blocks/", SPEC, options=options, timeout_s=0.3)
        begin = time.monotonic()
        fetch = store.prefetch([("full", digest(n)) for n in range(50)], deadline_s=0.1)
        assert not fetch.ready
        assert set(fetch.result().values()) == {None}
        assert time.monotonic() - begin < 0.25  # the caller's deadline; the store is not given up
        _fails_once(store, reads="no answer for 0.3 s", writes="no answer for 0.3 s")


def test_a_store_is_asked_again_after_a_while(s3):
    _, options = s3
    store = Store("s3://blocks/", SPEC, options=options, retry_s=0.2)
    assert store.put("full", digest(1), block("full", 1)).wait()
    place = store._kv
    store._kv = Failing("UNAVAILABLE: come back later")
    _fails_once(store, reads="come back later", writes="come back later")
    store._kv = place
    time.sleep(0.25)
    assert store.get("full", digest(1)) is not None
    assert store.put("full", digest(2), block("full", 2)).wait()


@pytest.mark.parametrize(
    "message", ["RESOURCE_EXHAUSTED: No space left on device", "PERMISSION_DENIED: read-only"]
)
@pytest.mark.parametrize("limit", [None, 100_000])
@pytest.mark.parametrize("at_once", [False, True])
def test_every_operation_of_the_place_failing(tmp_path, message, limit, at_once):
    store = Store(tmp_path, SPEC, limit_bytes=limit)
    store._kv = Failing(message, at_once)
    reads = writes = message
    _fails_once(store, reads, writes)
    assert store.counts.dropped == 101
    assert store.counts.misses == 101


class FailsAt:
    """A key-value store of which one operation fails, at once or when it is waited for."""

    def __init__(self, place, at, at_once):
        self.place, self.at, self.at_once, self.calls = place, at, at_once, 0

    def __getattr__(self, verb):
        def run(*arguments):
            self.calls += 1
            if self.calls - 1 != self.at:
                return getattr(self.place, verb)(*arguments)
            if self.at_once:
                raise ValueError("an operation that fails")
            return Failed("an operation that fails")

        return run


@pytest.mark.parametrize("at_once", [False, True])
def test_every_operation_failing_in_turn_costs_a_miss_and_no_more(tmp_path, at_once):
    """Six blocks are stored and read in a store of four: writes, reads, deletes and a count."""
    size = len(block("full", 0)) + 64
    for at in range(100):
        place = tmp_path / str(at)
        store = Store(place, SPEC, limit_bytes=4 * size, retry_s=0)
        whole, store._kv = store._kv, FailsAt(store._kv, at, at_once)
        stored = set()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for number in range(6):
                if store.put("full", digest(number), block("full", number)).wait():
                    stored.add(number)
                found = store.get("full", digest(number))
                assert found is None or found.tobytes() == block("full", number).tobytes()
                assert found is not None or store._kv.calls > at
        assert len(told) <= 1
        assert len(stored) >= 5
        failed, store._kv = store._kv.calls > at, whole
        for number in range(6, 10):  # all is well again, and the limit holds
            assert store.put("full", digest(number), block("full", number)).wait()
            for delete in store._deletes:
                delete.result()
        for number in range(6, 10):
            assert store.get("full", digest(number)).tobytes() == block("full", number).tobytes()
        assert sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) == 4 * size
        if not failed:
            break
    assert at > 6 + 6 + 2


def test_a_directory_that_cannot_be_written(tmp_path):
    """/proc takes no directories, whoever asks; a file is none."""
    _fails_once(Store("/proc/kvpool", SPEC), writes="cannot write, nothing is stored")
    (tmp_path / "file").write_text("x")
    store = Store(tmp_path / "file", SPEC)
    _fails_once(store, writes="cannot write, nothing is stored")
    assert store.get("full", digest(1)) is None


@pytest.mark.parametrize("limit", [None, 10_000])
def test_a_directory_that_is_removed_costs_what_was_in_it(tmp_path, limit):
    store = Store(tmp_path / "blocks", SPEC, limit_bytes=limit)
    assert store.put("full", digest(1), block("full", 1)).wait()
    shutil.rmtree(tmp_path / "blocks")
    assert store.get("full", digest(1)) is None
    for number in range(2, 8):
        assert store.put("full", digest(number), block("full", number)).wait()
    assert store.get("full", digest(7)).tobytes() == block("full", 7).tobytes()


def test_writes_that_pile_up_are_left(tmp_path):
    store = Store(tmp_path, SPEC, pending_bytes=10_000)
    store._kv = Stuck()
    puts = [store.put("full", digest(number), block("full", number)) for number in range(2)]
    with pytest.warns(StoreWarning, match="takes blocks more slowly than they come"):
        puts += [store.put("full", digest(2), block("full", 2))]
    puts += [store.put("full", digest(3), block("full", 3))]
    assert [put.ended for put in puts] == [False, False, True, True]
    assert not any(put.done for put in puts)
    assert store.counts.dropped == 2


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB and what makes it read-only; where the tests may mount one."""

    def mount(*options):
        command = ["mount", *options, str(tmp_path)]
        return subprocess.run(command, capture_output=True, check=False).returncode

    if mount("-t", "tmpfs", "-o", "size=256k", "none"):
        pytest.skip("no right to mount a file system")
    yield tmp_path, lambda: mount("-o", "remount,ro")
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_is_full_and_one_that_is_read_only(small_disk):
    where, seal = small_disk
    store = Store(where, SPEC, retry_s=0.2)
    with pytest.warns(StoreWarning, match="No space left on device"):
        stored = [n for n in range(100) if store.put("full", digest(n), block("full", n)).wait()]
    assert 20 < len(stored) < 64
    for number in range(100):
        found = store.get("full", digest(number))
        assert (found is not None) == (number in stored)
        assert found is None or found.tobytes() == block("full", number).tobytes()
    limited = Store(where, SPEC, limit_bytes=100_000)
    assert all(limited.put("full", digest(n), block("full", n)).wait() for n in range(200, 210))
    assert seal() == 0
    store = Store(where, SPEC)
    _fails_once(store, writes="Read-only file system")
    assert store.get("full", digest(209)).tobytes() == block("full", 209).tobytes()
