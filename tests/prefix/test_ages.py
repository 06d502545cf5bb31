"""What is learned of ages, and which visits are told apart."""

import pytest

from kvpool.prefix.ages import BINS, Ages, Table, bin_of, next_bin
from kvpool.prefix.classes import KINDS, classes_of, goes_on
from kvpool.prefix.visits import Visit


def test_worth_is_the_best_ratio_of_uses_to_waiting():
    table = Table([0.0, 0.5] + [0.0] * (BINS - 2))
    # Ages 0 and 1 to 1.83 fall into the first bins of widths 0.414 and 0.586.
    assert table.worth_at(1) == pytest.approx(0.5 / (0.75 * 0.5858), rel=1e-3)
    assert table.worth_at(0) == pytest.approx(0.5 / (0.4142 + 0.75 * 0.5858), rel=1e-3)
    assert table.worth_at(0) < table.worth_at(1)  # it rises where uses come later
    assert [table.worth_at(number) for number in range(2, BINS)] == [0.0] * (BINS - 2)


def test_chances_come_from_what_was_seen_and_a_prior():
    table = Table([0.0] * BINS)
    table.seen[0], table.used[0] = 30.0, 6.0
    table.solve([0.1] * BINS, 10.0)
    assert table.chances[:2] == [(6 + 0.1 * 10) / (30 + 10), 0.1]


def test_a_class_is_its_parent_times_a_factor():
    table = Table([0.0] * BINS)
    table.seen[:2], table.used[:2] = [40.0, 20.0], [14.0, 0.0]
    table.scale([0.1, 0.05, 0.3] + [0.0] * (BINS - 3), 8.0)
    # The parent's chances would have brought 5 uses, 14 came: (14 + 8) / (5 + 8).
    assert table.chances[:4] == pytest.approx([0.1 * 22 / 13, 0.05 * 22 / 13, 0.3 * 22 / 13, 0.0])


def test_bins_are_half_octaves():
    assert [bin_of(age) for age in (0, 1, 2, 3, 7, 8, 2**40)] == [0, 2, 3, 4, 6, 6, BINS - 1]
    assert next_bin(3) == 5
    assert next_bin(2**40) == 2**40 + 1


def test_classes_by_times_gone_on_new_blocks_and_length():
    assert classes_of(1, 3, 20) == ((), (1,), (1, 2), (1, 2, 5))
    assert classes_of(0, 8, 8)[-1] == classes_of(0, 15, 15)[-1] == (0, 4, 4)
    assert [goes_on(kind) for kind in range(KINDS)] == [1, 2, 2, 1]


def test_ages_count_what_was_used_and_what_was_not():
    ages, first, second = Ages(), Visit(0, 0, 4), Visit(0, 0, 4)
    ages.watch(first)
    ages.watch(second)
    for _ in range(3):
        ages.tick()
    ages.use(first, 0.25)
    assert set(ages._tables) == {(), (0,), (0, 0), (0, 0, 3)}
    for table in ages._tables.values():
        assert (table.seen[:4], table.used[:5]) == ([2, 2, 2, 2], [0, 0, 0, 0, 0.25])
    assert (first.share, first.bin, second.share) == (0.75, 4, 1.0)
