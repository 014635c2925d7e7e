"""Modelled, not measured: the least a step can move and compute, and how long a step takes.

A step takes as long as its bytes of HBM or its operations, whichever is longer, and then its collectives. Left out are
the start of each operation, the host, and how far compute and exchange overlap.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from specjax.models.config import TransformerConfig
from specjax.planning.hardware import Chip
from specjax.planning.traffic import Traffic

HOP_SECONDS = 1e-6
"""Least time from one chip to the next (jax-ml.github.io/scaling-book, chapter 3)."""
_RINGS: dict[str, tuple[Callable[[int], float], float]] = {
    "all-reduce": (lambda n: 2 * (n - 1) / n, 1.0),
    "all-gather": (lambda n: (n - 1) / n, 0.5),
    "reduce-scatter": (lambda n: n - 1, 0.5),
    "all-to-all": (lambda n: n / 4, 0.5),
    "collective-permute": (lambda n: 1, 0.5),
    "collective-broadcast": (lambda n: 1, 0.5),
}
"""Of n chips in a ring that sends both ways: bytes through a link for each byte of the result, and hops for each chip
(same book, chapter 3)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a step costs one device."""

    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    flops: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(traffic=self.traffic + other.traffic, flops=self.flops + other.flops)

    def __mul__(self, times: float) -> "Work":
        return Work(traffic=self.traffic * times, flops=self.flops * times)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer as one device has it."""

    config: TransformerConfig
    params: Any
    """Shapes of its part of the weights."""
    kv_heads: int
    parts: int
    """Devices that the model is cut over."""

    @property
    def item_bytes(self) -> int:
        """Of a weight."""
        return self.params["embed"].dtype.itemsize

    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params)) * self.item_bytes

    def cache_bytes(self, rows: int, slots: Sequence[int]) -> int:
        """Of keys and values, so many slots of each layer."""
        return 2 * rows * sum(slots) * self.kv_heads * self.config.head_dim * self.item_bytes

    def seen(self, tokens: int) -> list[int]:
        """How many of a text's last `tokens` each layer sees."""
        windows = self.config.sliding_windows or (None,) * self.config.num_layers
        return [tokens if window is None else min(tokens, window) for window in windows]

    def least(self, rows: int, tokens: int, context: int, *, head: bool = True) -> Work:
        """One pass over `tokens` a row that have `context` before them: weights once, what is there of the cache once.

        Args:
          rows: on this device.
          tokens: a row.
          context: tokens in the cache of each row.
          head: whether logits are wanted; they are counted once, in float32, as many as a device has in the end.
        """
        config, hidden = self.config, 4 * rows * tokens * self.config.hidden_size
        logits = 4 * rows * tokens * config.vocab_size / self.parts if head else 0
        layers = sum(leaf.size for leaf in jax.tree.leaves(self.params["layers"]))
        weights = layers + (self.params.get("unembed", self.params["embed"]).size if head else 0)
        query = self.params["layers"][0]["q"].shape[0]
        attention = 4 * rows * tokens * sum(self.seen(context + tokens)) * query
        cached = [max(seen - 1, 0) for seen in self.seen(context + 1)]  # by the first token, which sees itself too
        moved = weights * self.item_bytes + self.cache_bytes(rows, cached) + logits
        traffic = Traffic(num_bytes=moved, collectives=self._exchanged(hidden, logits))
        return Work(traffic=traffic, flops=2 * weights * rows * tokens + attention)

    def _exchanged(self, hidden: float, logits: float) -> dict[str, tuple[float, float]]:
        """Sums of hidden states twice a layer and once for the embedding, and the logits if there are any."""
        if self.parts == 1:
            return {}
        sums = 1 + 2 * self.config.num_layers
        exchanged: dict[str, tuple[float, float]] = {"all-reduce": (sums, sums * hidden)}
        if logits:
            exchanged["all-to-all"] = 1, logits
        return exchanged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and its drafter at one length of text."""

    target: Model
    draft: Model
    context: int

    def read(self, rows: int, tokens: int) -> Work:
        """Both models' passes over a piece of the prompt, for which no logits are needed."""
        passes = (model.least(rows, tokens, self.context, head=False) for model in (self.target, self.draft))
        return sum(passes, Work())

    def plain(self, rows: int) -> Work:
        """A step without speculation."""
        return self.target.least(rows, 1, self.context)

    def verify(self, rows: int, window: int) -> Work:
        """The target's pass over the window, and then the drafter's, which needs no logits."""
        learned = self.draft.least(rows, window + 1, self.context, head=False)
        return self.target.least(rows, window + 1, self.context) + learned

    def drafting(self, rows: int, window: int) -> Work:
        """The drafter's pass for each token."""
        return self.draft.least(rows, 1, self.context) * window

    def step(self, rows: int, window: int) -> Work:
        """A step with a window of drafted tokens; 0 is the plain one."""
        return self.verify(rows, window) + self.drafting(rows, window) if window else self.plain(rows)


def busy_seconds(work: Work, chip: Chip, overhead: float = 1.0) -> float:
    """Modelled time of a step without its collectives, if it moves `overhead` times those bytes."""
    return max(overhead * work.traffic.num_bytes / chip.hbm_bandwidth, work.flops / chip.flops)


def exchange_seconds(traffic: Traffic, chip: Chip, parts: int) -> float:
    """Modelled time of the collectives on chips of which `parts` share each model."""
    total = 0.0
    for kind, (count, num_bytes) in traffic.collectives.items():
        share, hops = _RINGS[kind]
        total += max(num_bytes * share(parts) / chip.link_bandwidth, count * hops * parts * HOP_SECONDS)
    return total


def estimated_bytes(pair: Pair, capacity: int, rows: int, window: int) -> int:
    """HBM of a device without asking the compiler: weights, caches of `capacity` slots and thrice a step's logits."""
    models = (pair.target, pair.draft)
    held = sum(model.num_bytes() + model.cache_bytes(rows, [capacity] * model.config.num_layers) for model in models)
    return held + 3 * 4 * rows * (window + 1) * pair.target.config.vocab_size
