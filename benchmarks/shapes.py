"""Named shapes of the caches of real models, over which the kernels are measured and tested.

Heads, head sizes, windows and layer counts are those of the published configurations; a model's
layers that keep the same share a block, as `kvpool.Group` lays it out.
"""

import dataclasses
import functools

import kvpool as kv
from kvpool import words


def words_of(group: kv.Group) -> words.Words:
    """The words of a group with an array of its own."""
    return words.Words(group, words.narrowest([group]), array=0, slab=None)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One group of a model: `layers` layers that keep `region`."""

    name: str
    region: kv.Region
    layers: int
    block_size: int = 16

    @functools.cached_property
    def group(self):
        """The `kvpool.Group` of these layers."""
        layers = [self.region] * self.layers
        return kv.CacheSpec.from_layers(layers, block_size=self.block_size).groups[0]

    @property
    def word(self):
        """The dtype of the block array."""
        return words_of(self.group).word

    @property
    def width(self) -> int:
        """Words of a block."""
        return words_of(self.group).block

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in a block."""
        return self.group.buffer_offsets[-1]

    def at_most(self, layers: int) -> "Shape":
        """The same of fewer layers."""
        return dataclasses.replace(self, layers=min(layers, self.layers))


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large the moves are."""

    pool_bytes: int = 1 << 32  # of a block array: many times any L2
    call_bytes: int = 1 << 26  # read by a call that may choose how much
    tokens: int = 8192  # of a prefill step
    decode_rows: int = 256
    read_rows: int = 32
    most_layers: int = 1 << 30
    total_bytes: int = 1 << 29  # moved by all calls of a program, more than any L2
    least_calls: int = 8
    most_calls: int = 64

    @classmethod
    def tiny(cls) -> "Scale":
        """Small enough for a CPU or an interpreter; every branch is still taken."""
        return cls(1, 1 << 16, 24, 5, 2, 2, 1, 2, 2)

    def shape(self, shape: Shape) -> Shape:
        return shape.at_most(self.most_layers)

    def blocks(self, shape: Shape) -> int:
        """N of the block array."""
        return max(6, self.pool_bytes // shape.group.bytes_per_block)

    def count(self, shape: Shape, size: int, most: int) -> int:
        """Things of `size` bytes that one call moves: at least 1, at most `most` and N."""
        return max(1, min(self.call_bytes // size, most, self.blocks(shape)))


def _state(conv: tuple[int, int], ssm: tuple[int, int, int] | None = None) -> kv.Region:
    buffers = {"conv": (conv, "bfloat16")}
    return kv.RecurrentState({**buffers, "ssm": (ssm, "float32")} if ssm else buffers)


_SCALED = {"dtype": "float8_e4m3fn", "scales": "token"}

SHAPES = (
    Shape("gemma3-27b full", kv.FullAttention(16, 128), 10),
    Shape("gemma3-27b window", kv.SlidingWindow(1024, 16, 128), 52),
    Shape("gemma3-1b window", kv.SlidingWindow(512, 1, 256), 22),
    Shape("gemma4-26b full", kv.FullAttention(2, 512), 5),
    Shape("gpt-oss-120b full", kv.FullAttention(8, 64), 18),
    Shape("gpt-oss-120b window", kv.SlidingWindow(128, 8, 64), 18),
    Shape("gpt-oss-120b on 8 devices", kv.FullAttention(1, 64), 18),
    Shape("one layer, one head of 64", kv.FullAttention(1, 64), 1, block_size=8),
    Shape("phi-2", kv.FullAttention(32, 80), 32),
    Shape("phi-3-mini", kv.FullAttention(32, 96), 32),
    Shape("llama-4-scout chunk", kv.ChunkedLocal(8192, 8, 128), 36),
    Shape("llama-3.1-8b fp8, scales", kv.FullAttention(8, 128, **_SCALED), 32),
    Shape("mimo-v2-flash full", kv.FullAttention(4, 192, 128), 9),
    Shape("mimo-v2-flash window", kv.SlidingWindow(128, 8, 192, 128), 39),
    Shape("qwen3-next full", kv.FullAttention(2, 256), 12),
    Shape("deepseek-v3 latent", kv.LatentAttention(512, 64), 61),
    Shape("deepseek-v3.2 entry", kv.Region("all", {"entry": ((576,), "bfloat16")}), 61),
    Shape("deepseek-v4 csa fp8", kv.Compressed(4, 584, "uint8"), 30, block_size=64),
    Shape("deepseek-v4 indexer fp8", kv.Compressed(4, 132, "uint8"), 30, block_size=64),
    Shape("deepseek-v4 hca", kv.Compressed(128, 512), 31),
    Shape("qwen3-next state", _state((8192, 3), (32, 128, 128)), 36),
    Shape("qwen3.5-397b state", _state((12288, 3), (64, 128, 128)), 45),
    Shape("nemotron-h-8b state", _state((10240, 3), (128, 64, 128)), 24),
    Shape("lfm2-1.2b state", _state((2048, 2)), 10),
)
