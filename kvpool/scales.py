"""Quantising: values as codes of 8 bits with float32 scales, and back, with what that loses.

A scale s covers the last axis of one entry of a buffer, so the vector of one token and head, or in
a region with scales per block the vectors of one head in a whole block. A is the largest finite
magnitude that it covers: per block, of all that was written since the block's first entry, drafts
that were not accepted included. M is the largest code: 127 for int8, 448 for float8_e4m3fn, 57344
for float8_e5m2.

- per token: s = max(A / M, 2^-100);
- per block: s = max(the least power of two of at least A / M, 2^-100), so s < 2 A / M. When A
  outgrows it the codes that are there are scaled down by a power of two and rounded once more.

With x the value written and y = code * s, abs(x - y) is at most

|               | per token, or per block before s has grown | per block, however often s grew |
|---------------|--------------------------------------------|---------------------------------|
| int8          | s / 2                                      | 3/4 s                           |
| float8_e4m3fn | max(2^-4 abs(x), 2^-10 s)                  | 2^-4 abs(x) + 3/4 * 2^-9 s      |
| float8_e5m2   | max(2^-3 abs(x), 2^-17 s)                  | 2^-3 abs(x) + 3/4 * 2^-16 s     |

Left is half a step of the code. Steps are s in int8; in a floating code 2^-3 (e4m3) or 2^-2 (e5m2)
of its power of two, but never below 2^-9 s or 2^-16 s, where it is subnormal. Right, with the last
s: a growth divides int8 codes by 2^d and rounds to the nearest, ties to even. The old error becomes
2^-d of itself in new steps, and rounding adds up to 1/2. For d > 1 that is at most 3/16 + 1/2. For
d = 1 rounding is exact but for odd codes, which no tie has just made: so the old error was at
most 1/2, and 1/4 + 1/2 remain. Dividing is exact for a floating code unless it becomes subnormal,
and then the same holds in steps of 2^-9 s or 2^-16 s.

To that come 2^-20 A for the float32 arithmetic per token (per block it is exact); 2^-11 abs(x) on a
device that rounds float32 to fp8 by way of float16; and the rounding of y to the compute dtype:
2^-24, 2^-8 or 2^-11 of abs(y) for float32, bfloat16 and float16, and for a float16 that is
subnormal up to 2^-25 instead. A value below 2^-126 may count as 0.

A value that is NaN or infinite is read back as NaN, by itself: it has the code NaN, in int8 -128,
and takes no part in A. Zeros are exact, and what is finite never becomes anything else: what would
round beyond the largest value of the compute dtype is read as that value.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from kvpool.regions import Region

LEAST = 2.0**-100  # below it codes times scales would be subnormal, and devices flush those to 0
NOT_FINITE = -128  # the int8 code of NaN; finite values have -127..127

_BIAS, _MANTISSA = 127, 23  # of float32


def largest_code(dtype: np.dtype) -> float:
    """M: 127 for int8, the largest finite value of a floating dtype."""
    return 127.0 if dtype == np.int8 else float(ml_dtypes.finfo(dtype).max)


def largest_magnitude(values: jax.Array) -> jax.Array:
    """f32[...], the largest finite magnitude along the last axis of f32[..., D]; 0 if none."""
    return jnp.max(jnp.where(jnp.isfinite(values), jnp.abs(values), 0), axis=-1)


def token_scale(magnitude: jax.Array, dtype: np.dtype) -> jax.Array:
    """max(A / M, 2^-100) of A f32[...]."""
    return jnp.maximum(magnitude / largest_code(dtype), LEAST)


def block_scale(magnitude: jax.Array, dtype: np.dtype) -> jax.Array:
    """The least power of two of at least A / M and 2^-100, for A f32[...]."""
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    most = np.float32(largest_code(dtype)).view(np.int32)
    fraction = (1 << _MANTISSA) - 1
    above = (bits & fraction) > (most & fraction)
    return jnp.maximum(_power(_BIAS + (bits >> _MANTISSA) - (most >> _MANTISSA) + above), LEAST)


def inverse(scale: jax.Array) -> jax.Array:
    """1 / scale of a power of two, exact whatever a device's division does."""
    return _power(2 * _BIAS - _exponent(scale))


def shrinking(old: jax.Array, new: jax.Array) -> jax.Array:
    """old / new of powers of two, exact; below 2^-126 it is 0, as is every code times it."""
    return _power(_BIAS + _exponent(old) - _exponent(new))


def encode(values: jax.Array, factor: jax.Array, dtype: np.dtype) -> jax.Array:
    """The codes of f32 values times a factor that broadcasts against them."""
    most = largest_code(dtype)
    scaled = jnp.clip(values * factor, -most, most)
    finite = jnp.isfinite(values)
    if dtype == np.int8:
        return jnp.where(finite, jnp.round(scaled), NOT_FINITE).astype(dtype)
    return jnp.where(finite, scaled, jnp.nan).astype(dtype)


def numbers(codes: jax.Array) -> jax.Array:
    """The codes as f32, NaN where the value was not finite."""
    as_float = codes.astype(jnp.float32)
    return jnp.where(codes == NOT_FINITE, jnp.nan, as_float) if codes.dtype == np.int8 else as_float


def decode(codes: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Codes [..., D] times their scales f32[...] in a compute dtype."""
    most = float(ml_dtypes.finfo(dtype).max)
    return jnp.clip(numbers(codes) * scale[..., None], -most, most).astype(dtype)


def quantised(region: Region, values: tuple) -> tuple[jax.Array, ...]:
    """The buffers of a region with a scale for each entry, of what `Region.values` says."""
    payload, scales = [], []
    for value, buffer in zip(values, region.payload, strict=True):
        if buffer.name in region.scale_buffers:
            value = value.astype(jnp.float32)
            scale = token_scale(largest_magnitude(value), buffer.numpy_dtype)
            value = encode(value, 1 / scale[..., None], buffer.numpy_dtype)
            scales.append(scale)
        payload.append(value)
    return (*payload, *scales)


def dequantised(region: Region, stored: dict[str, jax.Array], mask) -> dict[str, jax.Array]:
    """What `Region.values` says of stored {buffer: [R, Lk, ...]}; 0 where not mask bool[R, Lk]."""
    values = {buffer.name: stored[buffer.name] for buffer in region.payload}
    for buffer in region.values:
        scale = region.scale_buffers.get(buffer.name)
        if scale is not None:
            value = decode(values[buffer.name], stored[scale.name], buffer.numpy_dtype)
            shown = mask.reshape(*mask.shape, *(1,) * len(buffer.shape))
            # Behind the product: the scale of a block that was never written may be a NaN.
            values[buffer.name] = jnp.where(shown, value, 0)
    return values


def _exponent(scale):
    return lax.bitcast_convert_type(scale, jnp.int32) >> _MANTISSA


def _power(exponent):
    """2^(exponent - 127); 0 below the normal numbers, 2^127 above them."""
    bits = jnp.clip(exponent, 0, 2 * _BIAS) << _MANTISSA
    return lax.bitcast_convert_type(bits, jnp.float32)
