"""Keys: what prompts look like as bytes, and the digest of every beginning of one.

A key is a cryptographic digest of the key before it and of one unit of tokens, and begins at that
of a namespace: equal keys mean equal tokens, under the same spec, model and salt, in every process.
"""

import hashlib
import json

import numpy as np

TOKEN_BYTES = 4
KEY_BYTES = 16
Salt = None | str | bytes | int | tuple
_INT32 = np.iinfo(np.int32)


def token_bytes(tokens) -> bytes:
    """Tokens as little-endian int32, four bytes each.

    Args:
      tokens: a sequence or array of integers, [T], each within int32.

    Raises:
      ValueError: naming what was given.
    """
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError) as error:
        raise ValueError(f"tokens: wanted integers [T], got {tokens!r:.80}") from error
    if array.size == 0 and not hasattr(tokens, "dtype"):  # numpy calls an empty list float
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"tokens: wanted integers [T], got {array.dtype}{list(array.shape)}")
    if array.size and (array.max() > _INT32.max or array.min() < _INT32.min):
        raise ValueError(f"tokens: wanted int32, got {array.min()} to {array.max()}")
    return array.astype("<i4").tobytes()


def checked_salt(salt: Salt) -> Salt:
    """The salt itself.

    Raises:
      ValueError: unless it is None, a str, bytes, an int or a tuple of such.
    """
    # The exact types: a bool or float would equal an int, and share its prefixes.
    if type(salt) not in (type(None), str, bytes, int, tuple):
        raise ValueError(
            "salt: wanted None, a str, bytes, an int or a tuple of those, "
            f"got {type(salt).__name__}"
        )
    if isinstance(salt, tuple):
        for part in salt:
            checked_salt(part)
    return salt


def namespace(spec, model: str, salt) -> bytes:
    """The key of zero tokens, KEY_BYTES long.

    Args:
      spec: a CacheSpec; its digest covers the dtypes and block sizes.
      model: whose cache this is; a spec does not say which weights.
      salt: as `checked_salt` takes it.
    """
    text = json.dumps(["kvpool prefix", spec.digest, model, _framed(salt)])
    return digest(text.encode())


def digest(data: bytes) -> bytes:
    """A key; of the key of a beginning and one unit of tokens, that of the beginning with both."""
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()


def _framed(salt):
    """JSON that no two salts have in common."""
    if isinstance(salt, tuple):
        return ["tuple", *map(_framed, salt)]
    return [type(salt).__name__, salt.hex() if isinstance(salt, bytes) else salt]
