"""Derived seeds: each use of random numbers gets a seed of its own, so that no generator state has to be stored."""

import hashlib

_SEED_BITS = 63


def derive_seed(purpose: str, *numbers: int) -> int:
    """Return a seed in [0, 2**63) that depends on every argument and on nothing else.

    Different arguments give unrelated seeds. Digests depend on this function, so its results may never change.
    `numbers` are the run's seed, then the position: epoch, step, shard or sample.
    """
    text = ":".join([purpose, *map(str, numbers)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
