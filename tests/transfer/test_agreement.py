"""What both sides of a transfer must have alike, and what not."""

import pytest

import kvpool as kv
from kvpool.transfer import Agreement, Disagreement, Shards
from kvpool.transfer.agreement import agreement

STATE = kv.RecurrentState({"s": ((4,), "float32")})
SMALL = kv.CacheSpec.from_layers(
    [kv.FullAttention(1, 4), kv.SlidingWindow(8, 1, 4), STATE], block_size=4
)


def test_sides_that_differ_are_told_everything_that_differs():
    ours = agreement(SMALL, Shards(1), Shards(1))
    assert ours.settle(Agreement.from_dict(ours.to_dict())) == 1
    other = kv.CacheSpec.from_layers(
        [kv.FullAttention(1, 4), kv.SlidingWindow(9, 1, 4), STATE], block_size=4
    )
    with pytest.raises(Disagreement) as caught:
        ours.settle(agreement(other, Shards(1), Shards(1)))
    message = str(caught.value)
    assert "group window8: window 8; k [1, 4] bfloat16" in message
    assert "here, nothing there" in message
    assert "group window9: nothing here, window 9; k [1, 4]" in message
    assert f"spec: {ours.facts['spec']} here" in message
    with pytest.raises(Disagreement, match="receiver's shards: 1 x 1 here, 1 x 2 there"):
        ours.settle(agreement(SMALL, Shards(1), Shards(1, 2)))


@pytest.mark.parametrize(
    ("here", "there", "settled"), [((1, 1), (1, 3), 1), ((1, 3), (2, 4), 3), ((1, 1), (2, 3), None)]
)
def test_the_newest_version_that_both_speak(here, there, settled):
    ours, theirs = Agreement(here, {"spec": "a"}), Agreement(there, {"spec": "a"})
    assert ours.digest == theirs.digest
    if settled:
        assert ours.settle(theirs) == theirs.settle(ours) == settled
    else:
        with pytest.raises(Disagreement, match="versions: 1 to 1 here, 2 to 3 there"):
            ours.settle(theirs)


@pytest.mark.parametrize(
    "data", [None, [], {}, {"versions": [1]}, {"versions": [1, True], "facts": {}},
             {"versions": [1, 1], "facts": {"a": 1}}, {"versions": [1, 1], "facts": []}],
)  # fmt: skip
def test_an_agreement_that_is_none_is_refused(data):
    with pytest.raises(kv.SpecError, match="agreement: wanted"):
        Agreement.from_dict(data)


def test_pooling_need_not_agree():
    one = Shards(1)
    for pooling in ("shared", "elastic"):  # shared memory names the size of every group's blocks
        other = kv.CacheSpec.from_layers(SMALL.layers, SMALL.block_size, pooling)
        assert [g.block_size for g in other.groups] == [g.block_size for g in SMALL.groups]
        assert agreement(SMALL, one, one).settle(agreement(other, one, one)) == 1
        longer = kv.CacheSpec.from_layers(SMALL.layers, 8, pooling)
        with pytest.raises(
            Disagreement, match=r"group full: .* 4 tokens a block.*8 tokens a block"
        ):
            agreement(SMALL, one, one).settle(agreement(longer, one, one))


def test_the_form_in_which_specs_are_written_need_not_agree(monkeypatch):
    """As while one side runs a newer release already."""
    ours, written = agreement(SMALL, Shards(1), Shards(1)), SMALL.to_dict()
    monkeypatch.setattr(kv.CacheSpec, "to_dict", lambda _: {**written, "schema_version": 99})
    theirs = agreement(SMALL, Shards(1), Shards(1))
    assert ours.settle(theirs) == 1
    assert ours.digest == theirs.digest
