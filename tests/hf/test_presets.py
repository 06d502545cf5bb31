"""Presets: all there, quickly, and by name."""

import time

import pytest

import kvpool as kv


def test_all_presets_plan_in_two_seconds():
    start = time.perf_counter()
    for name in kv.preset_names():
        spec = kv.preset(name)
        plan = kv.plan(spec, 64 * 2**30, max_seqs=16, max_seq_len=131072, max_step_tokens=2048)
        assert plan.total_bytes <= 64 * 2**30
    assert time.perf_counter() - start < 2
    assert len(kv.preset_names()) == 51


def test_a_preset_survives_storing():
    for name in ("gemma3n-e2b", "hy4-preview", "deepseek-v4-flash-fp8"):
        spec = kv.preset(name)
        assert kv.CacheSpec.from_dict(spec.to_dict()) == spec


def test_block_size():
    assert {group.block_size for group in kv.preset("gemma3-27b", block_size=32).groups} == {32}
    sizes = [group.block_size for group in kv.preset("deepseek-v4-pro", block_size=16).groups]
    assert sizes == [16, 128, 16, 16, 8, 16, 8]


def test_an_unknown_name_hears_those_that_come_near():
    with pytest.raises(kv.SpecError, match="no preset 'gemma3-28b'; there are gemma3-27b, "):
        kv.preset("gemma3-28b")
    with pytest.raises(kv.SpecError, match=r"there are gemma2-2b, .*llama-3\.1-8b"):
        kv.preset("xyz")
