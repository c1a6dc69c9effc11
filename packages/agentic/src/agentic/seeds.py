"""Seeds that are functions of what they are for, and of nothing else."""

import hashlib
import operator

SEED_BYTES = 8


def derive_seed(seed: int, *parts: int | str) -> int:
    """A 64-bit seed for a named use of another seed: the same in every process, machine and release.

    It is BLAKE2b with an 8-byte digest, read little-endian, over one field for `seed` and each part in turn:
    a tag ("i" or "s"), the length of the value in bytes as 4 bytes little-endian, and the value (an integer
    in decimal, a string in UTF-8). So ("a", "bc") and ("ab", "c") differ, and so do 1 and "1".

    Args:
        seed: any integer.
        parts: what the seed is for, e.g. (group ordinal, member, turn).

    Returns:
        0 <= seed < 2**64.
    """
    digest = hashlib.blake2b(digest_size=SEED_BYTES)
    for part in (seed, *parts):
        value = part.encode() if isinstance(part, str) else str(operator.index(part)).encode()
        digest.update(b"s" if isinstance(part, str) else b"i")
        digest.update(len(value).to_bytes(4, "little"))
        digest.update(value)
    return int.from_bytes(digest.digest(), "little")
