"""Random state by derivation: a seed for every place where randomness is used, so that none is ever stored."""

import hashlib

_SEED_BITS = 63


def derive_seed(purpose: str, *numbers: int) -> int:
    """Return a seed in [0, 2**63) that depends on every argument and on nothing else.

    Seeds for other purposes or other numbers are unrelated; the function is part of what a digest depends on,
    so it may never change.

    Args:
        purpose: What the randomness is for, e.g. `"shard"` or `"sample"`.
        numbers: The run's seed first, then the place: epoch, step, shard or sample.
    """
    text = ":".join([purpose, *map(str, numbers)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
