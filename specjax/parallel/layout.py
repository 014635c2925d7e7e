"""How a transformer's tensors are cut over devices, in one table, and what is added so that they divide.

Column-parallel q, k, v, gate and up, row-parallel o and down, vocabulary-parallel embedding and head (arXiv
1909.08053). What does not divide is made to, once, when params are placed:

    vocabulary, inner columns   padded with zeros
    query heads                 each KV head's group padded with zero heads (their columns of o are zero too)
    KV heads                    repeated, each next to its copies, so that a device has the KV heads of its query heads

Zeros add nothing to a sum, and logits of padded ids are cut off before the law is taken: results do not change.
"""

import math

import numpy as np

from specjax.models.config import TransformerConfig

_CUTS: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", None),
    "unembed": ("vocab", None),
    "q": ("query", None),
    "k": ("value", None),
    "v": ("value", None),
    "o": (None, "query"),
    "gate": ("inner", None),
    "up": ("inner", None),
    "down": (None, "inner"),
}
"""What is cut along each dimension of a matrix; a bias is cut like the rows of its matrix. Norms stay whole."""


def cuts(name: str, ndim: int) -> tuple[str | None, ...]:
    """What is cut along each dimension of the param `name`: a key of `sources`, or None where it stays whole."""
    return _CUTS.get(name.removesuffix("_bias"), (None,))[:ndim]


def sources(config: TransformerConfig, parts: int) -> dict[str, np.ndarray | None]:
    """Where the indices of each kind of dimension come from, so that they divide by `parts`.

    Args:
      config: the architecture.
      parts: devices of the model axis.

    Returns:
      By kind: indices, -1 for zeros; or None where the dimension divides as it is.
    """
    group, heads = config.num_heads // config.num_kv_heads, config.num_kv_heads
    wide = _round_up(group, parts // math.gcd(heads, parts))
    query = np.pad(np.arange(heads * group).reshape(heads, group), ((0, 0), (0, wide - group)), constant_values=-1)
    value = np.repeat(np.arange(heads), math.lcm(heads, parts) // heads)
    lines = {
        "vocab": _padded(config.vocab_size, parts),
        "inner": _padded(config.intermediate_size, parts),
        "query": _columns(query.ravel(), config.head_dim),
        "value": _columns(value, config.head_dim),
    }
    same = {"vocab": config.vocab_size, "inner": config.intermediate_size}
    same |= {"query": config.num_heads * config.head_dim, "value": heads * config.head_dim}
    return {kind: None if len(line) == same[kind] else line for kind, line in lines.items()}


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(size: int, parts: int) -> np.ndarray:
    return np.pad(np.arange(size), (0, _round_up(size, parts) - size), constant_values=-1)


def _columns(heads: np.ndarray, width: int) -> np.ndarray:
    """Rows of each head in turn."""
    rows = heads[:, None] * width + np.arange(width)
    return np.where(heads[:, None] < 0, -1, rows).ravel()
