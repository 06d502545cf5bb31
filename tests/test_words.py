"""Words: how the bytes of a group's blocks are counted, and casts that keep every bit."""

import jax
import ml_dtypes
import numpy as np
import pytest

import kvpool as kv
from kvpool.words import words_of
from pallas_kernels.words import compacted, from_words, to_words


def only_group(region, layers=1, block_size=4):
    """The words of a group by itself."""
    spec = kv.CacheSpec.from_layers([region] * layers, block_size=block_size)
    plan = kv.plan(spec, num_blocks={spec.groups[0].name: 2}, max_seqs=1, max_seq_len=block_size)
    return words_of(plan, 0)


@pytest.mark.parametrize(
    ("dtypes", "word"),
    [
        (["float32"], "uint32"),
        (["bfloat16"], "uint16"),
        (["float8_e4m3fn"], "uint8"),
        (["bfloat16", "float32"], "uint16"),
        (["float32", "int8", "float16"], "uint8"),
    ],
)
def test_a_word_is_as_wide_as_the_narrowest_dtype(dtypes, word):
    words = only_group(kv.Region("all", {f"b{i}": ((3,), d) for i, d in enumerate(dtypes)}))
    assert words.word == np.dtype(word)


def test_counts_in_words():
    """k of 5 and v of 3 bfloat16, one token a block: 10 and 6 bytes, padded to 16 each."""
    words = only_group(kv.FullAttention(1, 5, v_head_dim=3), layers=3, block_size=1)
    assert words.group.bytes_per_block == 96
    assert words.block == 48
    assert words.layer == 16
    assert words.starts == (0, 8)
    assert words.slab is None
    found = [(buffer.name, at) for buffer, at in words.buffers(np.int32(2))]
    assert found == [("k", 32), ("v", 40)]


def test_counts_of_a_recurrent_state():
    region = kv.RecurrentState(
        {"conv": ((8192, 3), "bfloat16"), "ssm": ((32, 128, 128), "float32")}
    )
    words = only_group(region, layers=36)
    assert words.group.bytes_per_block == 77_266_944
    assert words.block == 77_266_944 // 2
    assert words.starts == (0, 49_152 // 2)


@pytest.mark.parametrize("word", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int32"]
)
def test_casts_keep_the_bytes(dtype, word):
    dtype, word = np.dtype(getattr(ml_dtypes, dtype, dtype)), np.dtype(word)
    raw = np.random.default_rng(0).integers(0, 256, (3, 2, 4 * dtype.itemsize), np.uint8)
    values = raw.view(dtype)
    if word.itemsize > dtype.itemsize:
        with pytest.raises(ValueError, match=f"at most {dtype.itemsize} bytes.*{word}"):
            to_words(values, 1, word)
        return
    stored = jax.jit(lambda x: to_words(x, 1, word))(values)
    assert stored.shape == (3, 8 * dtype.itemsize // word.itemsize)
    assert np.asarray(stored).tobytes() == raw.tobytes()
    back = jax.jit(lambda x: from_words(x, (2, 4), dtype))(stored)
    assert (back.dtype, back.shape) == (dtype, (3, 2, 4))
    assert np.asarray(back).tobytes() == raw.tobytes()


@pytest.mark.parametrize("keep", [[], [0], [1], [0, 1, 1, 0, 1], [1] * 300, [0] * 7])
def test_what_is_kept_comes_first_and_in_order(keep):
    order, count = jax.jit(compacted)(np.asarray(keep, bool))
    assert np.asarray(order)[: int(count)].tolist() == np.flatnonzero(keep).tolist()
