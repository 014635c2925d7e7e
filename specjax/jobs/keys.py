"""A row's key comes from the seed and the row's id alone: not from its place, its batch or its neighbours."""

import hashlib
import json
from collections.abc import Sequence

import jax
import numpy as np


def row_keys(seed: int, ids: Sequence[str | int]) -> jax.Array:
    """`[B]` typed keys: the seed's key, folded with the first 64 bits of the SHA-256 of each id written as JSON.

    32 bits would not do: among 100,000 ids two would be expected to share a key.
    """
    digests = b"".join(hashlib.sha256(json.dumps(name).encode()).digest()[:8] for name in ids)
    return _fold(np.uint32(seed), np.frombuffer(digests, ">u4").astype(np.uint32).reshape(-1, 2))


@jax.jit
def _fold(seed: jax.Array, halves: jax.Array) -> jax.Array:
    key, fold = jax.random.key(seed), jax.random.fold_in
    return jax.vmap(lambda half: fold(fold(key, half[0]), half[1]))(halves)
