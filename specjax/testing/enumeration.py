"""The exact joint law of K + 1 tokens, through every draft, coin and draw of one window of the shipped verifiers.

A rule of coins is driven through its pure functions (`CoinRule`), of which its `__call__` is made; a test holds the
shipped call to what this module makes of them. A rule that keeps what equals the target's own draw is driven through
its `__call__`, with laws that leave each draw no choice. What a window emits is continued by the target; the joint law
must then be the target's, and nothing is left to chance.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.sampling import one_hot_law
from specjax.testing.laws import Model, every_text, joint_law, prefix_laws, processed_laws
from specjax.types import Draft, Verifier
from specjax.verify import ExactMatch, Greedy


@runtime_checkable
class CoinRule(Protocol):
    """A rule that tosses one independent coin for each drafted token; `Rejection` and `Block` are such."""

    def chances(self, draft: Draft, log_probs: jax.Array) -> jax.Array:
        """Chances `[B, M]` that the coins pass."""
        ...

    def count(self, passed: jax.Array) -> jax.Array:
        """Accepted tokens `[B]` of coins `[B, M]`."""
        ...

    def leftover(self, draft: Draft, log_probs: jax.Array, num_accepted: jax.Array) -> jax.Array:
        """The law `[B, V]` (not necessarily normalised) of the token that replaces drafted token `num_accepted`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """One window in all its V^M drafts, one a row."""

    draft: Draft
    """`[V^M, M]`, in lexicographic order."""
    log_probs: jax.Array
    """`[V^M, M + 1, V]`, the target's laws."""
    chance: np.ndarray
    """`[V^M, M]`, of each drafted token after those before it."""
    case: np.ndarray
    """`[V^M]`, the row's law: all rows are parts of one, or every deterministic draft has its own."""

    @property
    def inside(self) -> np.ndarray:
        """`[V^M, M]` bool, really drafted."""
        return np.arange(self.chance.shape[1]) < np.asarray(self.draft.length)[:, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcomes:
    """All that a window can end in."""

    weight: np.ndarray
    """`[R]`, the chance of each."""
    tokens: np.ndarray
    """`[R, M + 1]`, emitted up to index `num_accepted`."""
    num_accepted: np.ndarray
    """`[R]`."""
    case: np.ndarray
    """`[R]`, as in `Window`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact:
    """What a rule does to the target's law, for each case of a window."""

    joint: np.ndarray
    """`[cases] + [V] * (M + 1)`, the law of the next M + 1 tokens."""
    target: np.ndarray
    """`[V] * (M + 1)`, what it should be."""
    accepted: np.ndarray
    """`[cases]`, E[accepted tokens]."""

    @property
    def error(self) -> float:
        """The largest difference of two probabilities."""
        return float(np.abs(self.joint - self.target).max())

    @property
    def total_variation(self) -> float:
        """Of the worst case."""
        apart = np.abs(self.joint - self.target)
        return float(apart.reshape(len(apart), -1).sum(axis=1).max() / 2)


def sampled_window(
    target: Model,
    drafter: Model,
    *,
    vocab_size: int,
    num_tokens: int,
    length: int | None = None,
    prompt: Sequence[int] = (0,),
    sampling: Mapping[str, Any] | None = None,
) -> Window:
    """A window whose draft is sampled from the drafter's law, transformed like the target's.

    Args:
      target: its logits.
      drafter: its logits.
      vocab_size: V.
      num_tokens: M.
      length: drafted tokens, if fewer; any junk stands in the rest of the window.
      prompt: what the penalties count.
      sampling: arguments of `sampling_params`; the temperature is 1 unless it is among them.
    """
    texts = every_text(vocab_size, num_tokens)
    laws, drafted = (processed_laws(model, texts, prompt, sampling or {}) for model in (target, drafter))
    length = num_tokens if length is None else length
    draft = Draft(
        tokens=jnp.asarray(texts), length=jnp.full(len(texts), length, jnp.int32), log_probs=drafted[:, :num_tokens]
    )
    own = np.take_along_axis(np.exp(np.asarray(draft.log_probs, np.float64)), texts[..., None], axis=-1)[..., 0]
    chance = np.where(np.arange(num_tokens) < length, own, 1 / vocab_size)
    return Window(draft=draft, log_probs=laws, chance=chance, case=np.zeros(len(texts), int))


def fixed_windows(
    target: Model,
    *,
    vocab_size: int,
    num_tokens: int,
    prompt: Sequence[int] = (0,),
    sampling: Mapping[str, Any] | None = None,
) -> Window:
    """Every deterministic draft of M tokens, each a case of its own. The arguments are those of `sampled_window`."""
    texts = every_text(vocab_size, num_tokens)
    draft = Draft(tokens=jnp.asarray(texts), length=jnp.full(len(texts), num_tokens, jnp.int32))
    laws = processed_laws(target, texts, prompt, sampling or {})
    return Window(draft=draft, log_probs=laws, chance=np.ones(texts.shape), case=np.arange(len(texts)))


def enumerable(verifier: Verifier) -> bool:
    """Whether `exact` knows how to drive a verifier."""
    return isinstance(verifier, CoinRule | ExactMatch | Greedy)


def exact(verifier: Any, window: Window) -> Exact:
    """The joint law and E[accepted] of a window under a verifier.

    Raises:
      ValueError: a verifier that is neither a `CoinRule` nor an `ExactMatch` or `Greedy`; a `Greedy` one with laws that
        are not certain, since it draws nothing.
    """
    if not enumerable(verifier):
        raise ValueError(
            f"expected a verifier with chances, count and leftover, or an ExactMatch or Greedy, got {verifier}: "
            "only sampling can test it (check_verifier)"
        )
    if isinstance(verifier, Greedy) and np.isfinite(window.log_probs).sum(axis=-1).max() > 1:
        raise ValueError("expected laws at temperature 0 for a Greedy verifier, got some that leave a choice")
    found = _coin_outcomes(verifier, window) if isinstance(verifier, CoinRule) else _match_outcomes(verifier, window)
    laws, cases = prefix_laws(window.log_probs), window.case.max() + 1
    accepted = np.bincount(found.case, weights=found.weight * found.num_accepted, minlength=cases)
    return Exact(joint=_continued(found, laws, cases), target=joint_law(laws), accepted=accepted)


def _continued(found: Outcomes, laws: list[np.ndarray], cases: int) -> np.ndarray:
    """The joint law `[cases] + [V] * (M + 1)` of what was emitted and what the target adds to it."""
    joint = np.zeros(cases)
    for index, law_after in enumerate(laws):
        emitted = np.zeros((cases, *law_after.shape))
        ends = found.num_accepted == index
        place = (found.case[ends], *found.tokens[ends, : index + 1].T)
        np.add.at(emitted, place, found.weight[ends])
        joint = joint[..., None] * law_after + emitted
    return joint


# ---- Rules of coins ----


def _coin_outcomes(rule: CoinRule, window: Window) -> Outcomes:
    """Every draft, every number of accepted tokens, every token behind them."""
    stops = _stop_law(rule, window)
    batch, width = stops.shape
    ends = np.stack([_end_law(rule, window, index) for index in range(width)], axis=1)
    size, places = ends.shape[-1], np.arange(width)
    tokens = np.zeros((batch, width, size, width), int)
    tokens[..., :-1] = np.asarray(window.draft.tokens)[:, None, None]
    tokens[:, places, :, places] = np.arange(size)
    weight = (window.chance.prod(axis=1)[:, None] * stops)[..., None] * ends
    return Outcomes(
        weight=weight.ravel(),
        tokens=tokens.reshape(-1, width),
        num_accepted=np.broadcast_to(places[:, None], weight.shape).ravel(),
        case=np.repeat(window.case, width * size),
    )


def _stop_law(rule: CoinRule, window: Window) -> np.ndarray:
    """`[B, M + 1]`, the chance of each number of accepted tokens, from all 2^M sides that the coins can show."""
    chances = np.asarray(rule.chances(window.draft, window.log_probs), np.float64) * window.inside
    sides = np.array(list(itertools.product([False, True], repeat=chances.shape[1])), bool)
    kept = np.asarray(rule.count(jnp.asarray(sides)))
    law = np.zeros((len(chances), chances.shape[1] + 1))
    for side, count in zip(sides, kept, strict=True):
        law[:, count] += np.where(side, chances, 1 - chances).prod(axis=1)
    return law


def _end_law(rule: CoinRule, window: Window, index: int) -> np.ndarray:
    """`[B, V]`, of the token behind `index` accepted ones: the leftover, or the target's own law behind all."""
    own = np.exp(np.asarray(window.log_probs[:, index], np.float64))
    if index == window.chance.shape[1]:
        return own
    rejected = jnp.full(len(own), index, jnp.int32)
    left = np.asarray(rule.leftover(window.draft, window.log_probs, rejected), np.float64)
    return np.where(window.inside[:, index, None], left / left.sum(axis=-1, keepdims=True), own)


# ---- Rules that keep what equals the target's own draw ----


def _match_outcomes(rule: Any, window: Window) -> Outcomes:
    """Every draft with every draw of the target; the rule gets laws that are certain of the draws."""
    batch, width, size = window.log_probs.shape
    draws = every_text(size, width)
    rows, drawn = np.repeat(np.arange(batch), len(draws)), np.tile(draws, (batch, 1))
    keys, start = jax.random.split(jax.random.key(0), len(rows)), jnp.zeros(len(rows), jnp.int32)
    draft = jax.tree.map(lambda x: x[rows], window.draft)
    with jax.disable_jit():  # nothing to compile anew for each window
        verdict = rule(keys, start, draft, one_hot_law(jnp.asarray(drawn), size))
    return Outcomes(
        weight=_draw_chances(window, draws).ravel(),
        tokens=np.asarray(verdict.tokens),
        num_accepted=np.asarray(verdict.num_accepted),
        case=window.case[rows],
    )


def _draw_chances(window: Window, draws: np.ndarray) -> np.ndarray:
    """`[B, D]`, of each draft together with each text `[D, M + 1]` that the target draws along it."""
    laws = np.exp(np.asarray(window.log_probs, np.float64))
    pairs = laws[:, :-1] * window.chance[..., None]
    if window.draft.log_probs is not None:
        together = shared_noise(laws[:, :-1], np.exp(np.asarray(window.draft.log_probs, np.float64)))
        tokens = np.asarray(window.draft.tokens)[..., None, None]
        pairs = np.where(window.inside[..., None], np.take_along_axis(together, tokens, axis=-1)[..., 0], pairs)
    factors = [pairs[:, index, draws[:, index]] for index in range(pairs.shape[1])]
    return np.prod([*factors, laws[:, -1, draws[:, -1]]], axis=0)


def shared_noise(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Joint law `[..., V, V]` of the pair argmax(log p + g), argmax(log q + g) under one Gumbel vector g.

    For i != j it is p_i q_j times the integral of dr / A(r)^2 from q_i / p_i to q_j / p_j, if that is the larger, with
    A(r) = sum_k max(p_k r, q_k), which is linear between neighbouring ratios; for i = j it is q_i / A(q_i / p_i).

    References:
      arXiv 2408.07978, where the diagonal is.
    """
    ratio = np.divide(q, p, out=np.full(p.shape, np.inf), where=p > 0)
    ends = np.sort(ratio, axis=-1)
    starts = np.concatenate([np.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1)
    reached = ends[..., None, :] <= ratio[..., None]
    integral = (_segments(p, q, starts, ends)[..., None, :] * reached).sum(axis=-1)
    apart = np.maximum(integral[..., None, :] - integral[..., None], 0) * p[..., None] * q[..., None, :]
    scale = np.maximum(p[..., None, :] * q[..., None], q[..., None, :] * p[..., None]).sum(axis=-1)
    same = np.divide(p * q, scale, out=np.zeros(p.shape), where=p * q > 0)
    return np.where(np.eye(p.shape[-1], dtype=bool), same[..., None], apart)


def _segments(p: np.ndarray, q: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Integrals of dr / A(r)^2 over segments on which A is linear; the last one may have no end."""

    def total(r: np.ndarray) -> np.ndarray:
        return np.maximum(p[..., None, :] * r[..., None], q[..., None, :]).sum(axis=-1)

    endless, empty = np.isinf(ends), np.isinf(starts)
    low, high = np.where(empty, 0, starts), np.where(endless, 0, ends)
    whole = np.where(empty, 0, 1 / (total(low) * p.sum(axis=-1, keepdims=True)))
    return np.where(endless, whole, (high - low) / (total(low) * total(high)))
