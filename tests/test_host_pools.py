"""Joint allocation over host pools: what is refused, what goes for it, what it answers."""

import threading

import pytest
from host_entries import KV, books, entries

import kvpool as kv
from kvpool.tiers import Allocation, HostPool, HostPoolGroup, PoolEntry, Shortfall


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([], "one with anchor=True, got none among no entries"),
        (entries({"kv": 4, "swa": 2}, anchor=""), "got none among kv, swa"),
        (
            [PoolEntry("kv", HostPool(4), anchor=True), PoolEntry("swa", HostPool(2), anchor=True)],
            "got 2: kv, swa",
        ),
        ([*entries({"kv": 4}), PoolEntry("kv", HostPool(2))], "'kv': there are two"),
        ([*entries({"kv": 4}), PoolEntry("idx", source="swa")], "'idx': no source 'swa'.*are kv"),
        ([*entries({"kv": 4}), PoolEntry("idx", source="idx")], "'idx': no source 'idx'"),
        (
            [*entries({"kv": 4}), PoolEntry("a", source="kv"), PoolEntry("b", source="a")],
            "'b': its source 'a' is itself derived; name 'kv'",
        ),
        (
            [*entries({"kv": 4}), PoolEntry("idx", HostPool(3), source="kv")],
            "'idx': wanted room for the 4 blocks of its source 'kv', got 3",
        ),
        (
            [
                PoolEntry("kv", HostPool(4, block_tokens=16), anchor=True),
                PoolEntry("idx", HostPool(4, block_tokens=8), source="kv"),
            ],
            "'idx': wanted blocks of 16 tokens like its source 'kv', got 8",
        ),
        ([*entries({"kv": 4}), PoolEntry("swa")], "'swa': wanted a HostPool or a source"),
        ([PoolEntry("kv", HostPool(4), anchor=True, source="kv")], "no source 'kv'"),
        (
            [*entries({"kv": 4}), PoolEntry("swa", HostPool(1), layers=(1,), draft_layers=2)],
            "'swa': wanted at most its 1 layers as draft_layers, got 2",
        ),
        ([*entries({"kv": 4}), "swa"], "wanted PoolEntry, got 'swa'"),
    ],
)
def test_entries_that_do_not_go_together_are_refused_by_name(wrong, says):
    with pytest.raises(kv.SpecError, match=says):
        HostPoolGroup(wrong)


def test_an_anchor_has_blocks_of_its_own_and_a_sidecar_a_pool_of_its_own():
    anchor = PoolEntry("idx", anchor=True, source="kv")
    with pytest.raises(kv.SpecError, match="'idx': an anchor has blocks of its own"):
        HostPoolGroup([PoolEntry("kv", HostPool(4)), anchor])
    pool = HostPool(4)
    with pytest.raises(kv.SpecError, match="'swa': wanted a pool of its own, got that of 'kv'"):
        HostPoolGroup([PoolEntry("kv", pool, anchor=True), PoolEntry("swa", pool)])


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (PoolEntry("swa", HostPool(2), anchor=True), "got 2: kv, swa"),
        (PoolEntry("kv", HostPool(2)), "'kv': there are two"),
        (PoolEntry("idx", source="swa"), "no source 'swa'"),
    ],
)
def test_what_is_added_later_is_checked_the_same(entry, says):
    group = HostPoolGroup(entries({"kv": 4}))
    held = group.allocate({"kv": 1})
    before = books(group)
    with pytest.raises(kv.SpecError, match=says):
        group.add_entry(entry)
    assert books(group) == before
    assert [entry.name for entry in group.entries] == ["kv"]
    group.add_entry(PoolEntry("swa", HostPool(2)))
    group.add_entry(PoolEntry("idx", source="swa"))
    assert group.available() == {"kv": 3, "swa": 2}
    assert group.allocate({"swa": 2}).ids == {"swa": (0, 1), "idx": (0, 1)}
    group.release(held)
    assert (group.anchor, group.available()) == ("kv", {"kv": 4, "swa": 0})


def test_a_derived_sidecar_names_its_sources_blocks_and_owns_none():
    group = HostPoolGroup([*entries({"kv": 4, "swa": 2}), PoolEntry("indexer", source="swa")])
    held = group.allocate({"kv": 2, "swa": 2})
    assert held.ids["indexer"] == held.ids["swa"] == (0, 1)
    assert set(held.owned) == {"kv", "swa"}
    assert group.available() == {"kv": 2, "swa": 0}
    group.release(held)
    assert group.available() == {"kv": 4, "swa": 2}
    group.check()


def test_a_second_release_is_reported_and_changes_nothing():
    group = HostPoolGroup(entries({"kv": 2}))
    first = group.allocate({"kv": 2})
    group.release(first)
    with pytest.raises(kv.SpecError, match="released or reclaimed before"):
        group.release(first)
    assert group.available() == {"kv": 2}
    second = group.allocate({"kv": 2})
    assert sorted(second.ids["kv"]) == [0, 1]
    assert group.allocate({"kv": 2}) == Shortfall({"kv": 2})
    with pytest.raises(kv.SpecError):  # stale, although its blocks are held again
        group.release(first)
    other = HostPoolGroup(entries({"kv": 2}))
    with pytest.raises(kv.SpecError):
        other.release(second)
    assert group.available() == {"kv": 0}
    assert other.available() == {"kv": 2}
    assert group.holds(second)
    assert not group.holds(first)


@pytest.mark.parametrize("request_order", [("swa", "mamba"), ("mamba", "swa")])
@pytest.mark.parametrize("entry_order", [("swa", "mamba"), ("mamba", "swa")])
def test_one_leaf_goes_whatever_the_order_of_the_request(entry_order, request_order):
    """Both leaves have a block in both pools; the pools disagree about which is the older."""
    lru: dict[str, list] = {"swa": [], "mamba": []}
    group = HostPoolGroup(
        PoolEntry(name, HostPool(2), anchor=name == "swa", reclaim=lambda name=name: lru[name])
        for name in entry_order
    )
    a, b = (group.allocate({"swa": 1, "mamba": 1}) for _ in range(2))
    lru["swa"], lru["mamba"] = [a, b], [b, a]
    got = group.allocate(dict.fromkeys(request_order, 1))
    goes, stays = (a, b) if entry_order[0] == "swa" else (b, a)
    assert got.reclaimed == (goes,)
    assert not group.holds(goes)
    assert group.holds(stays)
    assert group.available() == {"swa": 0, "mamba": 0}
    assert got.ids == goes.ids
    with pytest.raises(kv.SpecError):
        group.release(goes)
    group.check()


def test_nobody_goes_for_a_request_that_does_not_fit_even_so():
    leaves: list = []
    group = HostPoolGroup(
        [
            PoolEntry("kv", HostPool(4), anchor=True, reclaim=lambda: leaves),
            PoolEntry("swa", HostPool(2)),
        ]
    )
    leaves += [group.allocate({"kv": 2, "swa": 1}) for _ in range(2)]
    before = books(group)
    assert group.allocate({"kv": 5, "swa": 1}) == Shortfall({"kv": 1})
    assert group.allocate({"kv": 1, "swa": 3}) == Shortfall({"swa": 2})
    assert books(group) == before


def test_only_as_many_go_as_are_needed():
    """The first one chosen is not needed any more once a later one frees both kinds."""
    lru: dict[str, list] = {}
    group = HostPoolGroup(
        PoolEntry(name, HostPool(2), anchor=name == "kv", reclaim=lambda name=name: lru[name])
        for name in ("kv", "swa")
    )
    small, large = group.allocate({"kv": 1}), group.allocate({"kv": 1, "swa": 2})
    lru.update(kv=[small, large], swa=[small, large])
    got = group.allocate({"kv": 1, "swa": 1})
    assert got.reclaimed == (large,)
    assert group.available() == {"kv": 0, "swa": 1}
    group.check()


def test_nothing_to_do_is_another_answer_than_done_and_short():
    group = HostPoolGroup(entries(KV))
    for request in ({}, {"kv": 0, "swa": 0}):
        answer = group.allocate(request)
        assert isinstance(answer, Allocation)
        assert answer.nothing
        group.release(answer)
    assert not group.allocate({"kv": 1}).nothing
    assert isinstance(group.allocate({"kv": 4}), Shortfall)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"kv": 1, "swe": 1, "x": 2}, "no entry 'swe', 'x'; the entries are kv, swa, mamba, idx"),
        ({"kv": -1}, r"request\['kv'\]: wanted an integer of at least 0, got -1"),
        ({"kv": 1.5}, "got 1.5"),
        ({"kv": True}, "got True"),
        ({"kv": 3}, r"request\['kv'\]: wanted a multiple of 2 blocks, got 3"),
        ({"kv": 2, "idx": 1}, "takes the blocks of 'kv', of which 2 are asked, got 1"),
        ({"idx": 1}, "takes the blocks of 'kv', of which 0 are asked, got 1"),
        ([("kv", 1)], "wanted {entry: blocks}"),
    ],
)
def test_requests_that_make_no_sense_are_refused_by_name(request_, says):
    pools = {"kv": HostPool(4, multiple=2), "swa": HostPool(2), "mamba": HostPool(2)}
    group = HostPoolGroup(
        [
            *(PoolEntry(n, pool, anchor=n == "kv") for n, pool in pools.items()),
            PoolEntry("idx", source="kv"),
        ]
    )
    with pytest.raises(kv.SpecError, match=says):
        group.allocate(request_)
    assert group.available() == KV


def test_pools_of_no_blocks_or_of_broken_sizes():
    group = HostPoolGroup(entries({"kv": 0}))
    assert group.allocate({"kv": 2}) == Shortfall({"kv": 2})
    for wrong in (-1, 1.0, None, True):
        with pytest.raises(kv.SpecError, match="num_blocks"):
            HostPool(wrong)
    with pytest.raises(kv.SpecError, match="wanted a multiple of 4, got 6"):
        HostPool(6, multiple=4)


def test_each_entry_counts_its_own_bytes():
    """1 MiB of host memory holds 4, 2 and 1 blocks of 64, 16 and 128 KiB: 416 KiB are used."""
    kib = {"all": 64, "window": 16, "state": 128}
    pools = {name: HostPool(4, size << 10) for name, size in kib.items()}
    group = HostPoolGroup(PoolEntry(n, pool, anchor=n == "all") for n, pool in pools.items())
    group.allocate({"all": 4, "window": 2, "state": 1})
    assert group.used_bytes() == 416 << 10


def test_blocks_come_back_in_any_order_and_are_handed_out_once():
    group = HostPoolGroup(entries({"kv": 64, "swa": 64}))
    held, step = [], 0
    while step < 400:
        step += 1
        answer = group.allocate({"kv": step % 7, "swa": step % 3})
        if isinstance(answer, Allocation):
            held.append(answer)
        if isinstance(answer, Shortfall) or step % 3 == 0:
            group.release(held.pop(step * 5 % len(held)))
        group.check()
    for allocation in held:
        group.release(allocation)
    assert group.available() == {"kv": 64, "swa": 64}


def test_threads_share_a_group():
    group = HostPoolGroup(entries({"kv": 8, "swa": 8}))

    def work():
        for _ in range(300):
            answer = group.allocate({"kv": 3, "swa": 3})
            if isinstance(answer, Allocation):
                group.release(answer)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert group.available() == {"kv": 8, "swa": 8}
    group.check()


def test_entries_of_a_spec_know_layers_drafts_and_sizes():
    layers = [kv.FullAttention(1, 8), kv.SlidingWindow(8, 1, 8), kv.FullAttention(1, 8)]
    draft = kv.CacheSpec.from_layers([kv.FullAttention(1, 8)], 4)
    spec = kv.with_draft(kv.CacheSpec.from_layers(layers, 4), draft, packed=True)
    full, window = kv.tiers.entries_of(spec, {"full": 3}, anchor="full")
    assert (full.layers, full.draft_layers, full.anchor) == ((0, 2, 3), 1, True)
    assert (window.layers, window.draft_layers, window.anchor) == ((1,), 0, False)
    assert (full.pool.num_blocks, full.pool.block_bytes) == (3, spec.group("full").bytes_per_block)
    assert (window.pool.num_blocks, window.pool.block_tokens) == (0, 4)
    with pytest.raises(kv.SpecError, match="no group 'swa'"):
        kv.tiers.entries_of(spec, {"swa": 3}, anchor="full")
