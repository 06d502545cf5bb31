"""Where prompts are told to stop."""

import pytest

from kvpool.prefix.snapshots import FAR, Auto, Every, PromptEnd


@pytest.mark.parametrize(
    ("prompt", "hit", "known", "stops"),
    [
        (31, 0, 0, (16,)),
        (32, 0, 0, (16,)),  # a repetition has one token to compute
        (33, 0, 0, (32,)),
        (100, 0, 48, (48, 96)),  # where it left another, and its end
        (100, 48, 48, (96,)),
        (100, 96, 96, ()),
        (15, 0, 0, ()),
        (0, 0, 0, ()),
    ],
)
def test_prompt_end_and_branch(prompt, hit, known, stops):
    assert PromptEnd(16).stops(prompt, hit, known) == stops


def test_every_so_many_tokens():
    assert Every(32, 16).stops(100, 0, 0) == (32, 64, 96)
    assert Every(32, 16).stops(97, 32, 48) == (64, 96)
    assert Every(32, 16).stops(96, 32, 48) == (64,)
    for tokens in (0, -16, 24):
        with pytest.raises(
            ValueError, match=f"tokens: wanted a multiple of the unit, 16, got {tokens}"
        ):
            Every(tokens, 16)


def test_auto_takes_one_two_units_before_the_end_while_memory_is_free():
    policy = Auto(16, 100, 1000)
    assert policy.stops(161, 0, 0) == (128, 160)
    assert policy.stops(161, 0, 48) == (48, 128, 160)
    assert policy.stops(161, 144, 144) == (160,)
    assert policy.stops(33, 0, 0) == (32,)


def test_auto_learns_under_pressure_where_prompts_leave_each_other():
    policy = Auto(16, 100, 100)
    assert policy.stops(161, 0, 0, 0, True) == (160,)
    for _ in range(50):  # each leaves the last three units before its end
        policy.stops(161, 112, 112, 3, True)
    assert policy.stops(161, 0, 0, 0, True) == (112, 160)
    dear = Auto(16, 100, 10_000)  # the same, but a snapshot costs a hundred blocks
    for _ in range(50):
        dear.stops(161, 112, 112, 3, True)
    assert dear.stops(161, 0, 0, 0, True) == (160,)


def test_auto_does_not_count_what_only_begins_alike():
    policy = Auto(16, 100, 100)
    for _ in range(50):
        policy.stops(161, 16, 16, 3, True)  # one unit in common, and three more of the other
    for _ in range(50):
        policy.stops(161, 112, 112, FAR, True)  # far before the other's end
    assert policy.stops(161, 0, 0, 0, True) == (160,)
