"""DeepSeek-V4: a window and a compressed past in one layer, told apart by tags.

    swa            the last tokens as they are, one shared head for key and value
    csa            one entry for 4 tokens, of which an indexer picks some
    hca            one entry for 128 tokens, all read
    indexer        the indexer's own key for 4 tokens
    *_state        what a compressor still needs of the tokens that its next entry is made of

A compressor weighs the projections of a token by a softmax over those of its entry, so it keeps
both per token, in float32. Entries of 128 tokens stand alone. Those of 4 also draw on the 4 tokens
before, through a second projection: 8 tokens, twice the size.
"""

from kvpool.hf.fields import Fields
from kvpool.hf.payloads import indexer, is_fp8
from kvpool.regions import Region

NOPE_SCALES = 8  # bytes: one power of two for every 64 of the 448, and one byte of padding


def entry(f: Fields) -> dict:
    """The buffers of a compressed entry, and of a token of the window.

    16 bits: `head_dim` values, the rotary ones at the end. fp8: the values without rotary
    positions in fp8, the rotary ones in 16 bits, the scales as bytes; 448 + 128 + 8 = 584 bytes.
    """
    size, rope = f.need("head_dim", "qk_rope_head_dim")
    if not is_fp8(f):
        return {"entry": ((size,), f.dtype)}
    return {
        "latent": ((size - rope,), f.dtype),
        "rope": ((rope,), f.model_dtype),
        "scale": ((NOPE_SCALES,), "uint8"),
    }


def window(f: Fields) -> Region:
    """The last `sliding_window` tokens."""
    return Region(("window", f.need("sliding_window")), entry(f))


def compressor(tokens: int, size: int) -> Region:
    """What a compressor keeps of the last `tokens` tokens: projection and weight, float32."""
    return Region(("window", tokens), {"kv": ((size,), "float32"), "score": ((size,), "float32")})


def swa(f: Fields) -> dict:
    """A layer with nothing but the window; draft layers are like this too."""
    return {"swa": window(f)}


def csa(f: Fields) -> dict:
    """A layer with entries of 4 tokens and an indexer."""
    ratio = _rate(f, "compressed_sparse_attention", 4)
    size, index = f.need("head_dim", "index_head_dim")
    return {
        "swa": window(f),
        "csa": Region("all", entry(f), ratio),
        "csa_state": compressor(2 * ratio, 2 * size),
        "indexer": indexer(f, ratio),
        "indexer_state": compressor(2 * ratio, 2 * index),
    }


def hca(f: Fields) -> dict:
    """A layer with entries of 128 tokens."""
    ratio = _rate(f, "heavily_compressed_attention", 128)
    return {
        "swa": window(f),
        "hca": Region("all", entry(f), ratio),
        "hca_state": compressor(ratio, f.need("head_dim")),
    }


def _rate(f: Fields, kind: str, default: int) -> int:
    """Tokens of an entry: transformers' class takes these where `compress_rates` says no other."""
    return (f.get("compress_rates") or {}).get(kind, default)
