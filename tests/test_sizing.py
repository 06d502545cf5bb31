"""What the project promises of its memory use, on the real geometry of the presets."""

import pathlib
import sys
import time

import numpy as np
import pytest

import kvpool as kv
from kvpool.needs import needed_bytes, row_blocks

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import sizing  # noqa: E402


def test_all_presets_plan_in_two_seconds():
    begin = time.perf_counter()
    for name in kv.preset_names():
        kv.plan(kv.preset(name), 80 << 30, max_seqs=64, max_seq_len=1 << 17)
    assert time.perf_counter() - begin < 2
    assert len(kv.preset_names()) >= 51


LONG = [8192, 32768, 131072]


@pytest.mark.parametrize("name", kv.preset_names())
def test_a_request_holds_little_more_than_it_needs(name):
    spec = kv.preset(name, block_size=16)
    assert (sizing.efficiency(spec, LONG) >= 0.99).all()
    assert (sizing.efficiency(spec, np.arange(1, 9000)) <= 1).all()


def test_a_window_that_is_no_multiple_of_its_block_wants_shorter_ones():
    layers = [kv.FullAttention(4, 192, 128)] * 9 + [kv.SlidingWindow(129, 8, 192, 128)] * 39
    spec = kv.CacheSpec.from_layers(layers)
    assert row_blocks(spec.groups, LONG, writing=True).tolist()[1] == [9, 9, 9]
    assert sizing.efficiency(spec, LONG).round(4).tolist() == [0.9862, 0.9962, 0.999]
    short = kv.with_window_blocks(spec)
    assert sizing.efficiency(short, LONG).round(4).tolist() == [0.9935, 0.9982, 0.9995]


@pytest.mark.parametrize("name", sizing.PEAKS)
def test_the_peak_of_a_prefill_in_steps(name):
    least, _ = sizing.PEAKS[name]
    spec = kv.preset(name, block_size=16)
    tail, plain = (
        sizing.prefill_efficiency(spec, 8192, sizing.STEP, tail_only) for tail_only in (True, False)
    )
    assert plain < least <= tail


@pytest.mark.parametrize("name", sizing.REQUESTS)
def test_requests_admitted_until_one_is_refused(name):
    least, _ = sizing.REQUESTS[name]
    assert sizing.requests_that_fit(kv.preset(name, block_size=16), 16 << 30, 1 << 15) >= least


def test_what_is_needed_is_counted_by_hand():
    """Gemma-3-27B at 8,192: 52 windows of 1,024 and 10 layers with everything, 8 KiB each."""
    spec = kv.preset("gemma3-27b")
    assert int(needed_bytes(spec.groups, [8192]).sum()) == (52 * 1024 + 10 * 8192) * 8192
    assert row_blocks(spec.groups, [8192]).tolist() == [[64], [512]]
