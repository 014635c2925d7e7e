"""Acceptance rules. Each keeps the target's law exactly; the mathematics is in small pure functions that tests drive.

A window of M drafted tokens x_1..x_M comes with the target's laws p_1..p_{M+1} and, unless the proposal was
deterministic, the laws q_1..q_M it was sampled from. Rows may have drafted fewer than M.

References:
  Rejection: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
  Block: Sun et al., arXiv 2403.10444.
  Shared randomness: Daliri, Musco, Suresh, arXiv 2408.07978.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.sampling import Role, categorical, most_likely, position_keys, window_key, window_keys
from specjax.types import Draft, Verdict
from specjax.window import leading


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Token by token: keep x_i with chance min(1, p_i / q_i); at the first failure draw from norm((p_i - q_i)+)."""

    def draft_keys(self, keys: jax.Array, start: jax.Array, num_tokens: int) -> jax.Array:
        """Keys `[B, num_tokens]` of the drafter's draws, apart from every key used here."""
        return window_keys(keys, start, num_tokens, Role.DRAFT)

    def chances(self, draft: Draft, log_probs: jax.Array) -> jax.Array:
        """Chances `[B, M]` that the coin of each drafted token passes, given the tokens before it."""
        return acceptance(*_at_drafts(draft, log_probs))

    def count(self, passed: jax.Array) -> jax.Array:
        """Accepted tokens `[B]` of coins `[B, M]`: those before the first failure."""
        return leading(passed)

    def leftover(self, draft: Draft, log_probs: jax.Array, num_accepted: jax.Array) -> jax.Array:
        """The law `[B, V]` of the token that replaces drafted token `num_accepted` `[B]`."""
        return residual(jnp.exp(_row(log_probs, num_accepted)), _draft_row(draft, num_accepted, log_probs.shape[-1]))

    def __call__(self, keys: jax.Array, start: jax.Array, draft: Draft, log_probs: jax.Array) -> Verdict:
        """Judges a draft. See `Verifier.__call__`."""
        return _toss(self, keys, start, draft, log_probs)


@dataclasses.dataclass(frozen=True)
class Block:
    """The window as a whole: of all prefixes that pass their coin the longest is kept. Expects no fewer tokens."""

    def draft_keys(self, keys: jax.Array, start: jax.Array, num_tokens: int) -> jax.Array:
        """Keys `[B, num_tokens]` of the drafter's draws, apart from every key used here."""
        return window_keys(keys, start, num_tokens, Role.DRAFT)

    def chances(self, draft: Draft, log_probs: jax.Array) -> jax.Array:
        """Chances `[B, M]` that the coin of each prefix of the draft passes."""
        joint = self._joint(draft, log_probs)
        return block_acceptance(joint, _excess(draft, log_probs, joint), draft.length)

    def count(self, passed: jax.Array) -> jax.Array:
        """Accepted tokens `[B]` of coins `[B, M]`: the longest prefix that passed."""
        return jnp.where(passed, jnp.arange(1, passed.shape[1] + 1, dtype=jnp.int32), 0).max(axis=1, initial=0)

    def leftover(self, draft: Draft, log_probs: jax.Array, num_accepted: jax.Array) -> jax.Array:
        """The law `[B, V]` of the token that replaces drafted token `num_accepted` `[B]`."""
        joint = jnp.pad(self._joint(draft, log_probs), ((0, 0), (1, 0)), constant_values=1)
        kept = jnp.take_along_axis(joint, num_accepted[:, None], axis=1)
        drafted = _draft_row(draft, num_accepted, log_probs.shape[-1])
        return residual(jnp.exp(_row(log_probs, num_accepted)), drafted, kept)

    def __call__(self, keys: jax.Array, start: jax.Array, draft: Draft, log_probs: jax.Array) -> Verdict:
        """Judges a draft. See `Verifier.__call__`."""
        return _toss(self, keys, start, draft, log_probs)

    def _joint(self, draft: Draft, log_probs: jax.Array) -> jax.Array:
        p, q = _at_drafts(draft, log_probs)
        return joint_ratios(p, q)


@dataclasses.dataclass(frozen=True)
class ExactMatch:
    """Draws the target's own token with noise keyed by position and keeps drafts that equal it.

    The output is a function of target and key alone: that of `autoregressive`, for any drafter, window and batch.
    """

    def draft_keys(self, keys: jax.Array, start: jax.Array, num_tokens: int) -> jax.Array:
        """Keys `[B, num_tokens]`: the target's own, so that a sampling drafter shares its Gumbel noise."""
        return position_keys(keys, start[:, None] + jnp.arange(num_tokens))

    def __call__(self, keys: jax.Array, start: jax.Array, draft: Draft, log_probs: jax.Array) -> Verdict:
        """Judges a draft. See `Verifier.__call__`."""
        positions = start[:, None] + jnp.arange(log_probs.shape[1])
        return _match(draft, categorical(position_keys(keys, positions), log_probs), log_probs.shape[-1])


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Keeps drafts that equal the most likely token. For rows at temperature 0; it draws nothing."""

    def draft_keys(self, keys: jax.Array, start: jax.Array, num_tokens: int) -> jax.Array:
        """Keys `[B, num_tokens]` of the drafter's draws."""
        return window_keys(keys, start, num_tokens, Role.DRAFT)

    def __call__(self, keys: jax.Array, start: jax.Array, draft: Draft, log_probs: jax.Array) -> Verdict:
        """Judges a draft. See `Verifier.__call__`."""
        return _match(draft, most_likely(log_probs), log_probs.shape[-1])


def residual(p: jax.Array, q: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    """Law `[..., V]` after a rejection, norm((scale p - q)+); p itself where nothing is left (p == q)."""
    leftover = jnp.maximum(scale * p - q, 0)
    total = leftover.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, leftover / jnp.where(total > 0, total, 1), p)


def acceptance(p: jax.Array, q: jax.Array) -> jax.Array:
    """Chance that rejection keeps a token of probabilities p and q (same shape): min(1, p / q), 0 where q is 0."""
    return jnp.where(q > 0, jnp.minimum(p / jnp.where(q > 0, q, 1), 1), 0)


def joint_ratios(p: jax.Array, q: jax.Array) -> jax.Array:
    """P_i = min(1, P_{i-1} p_i / q_i) over the last axis, P_0 = 1, from the drafted tokens' `[..., M]` p and q."""
    joint, columns = jnp.ones(p.shape[:-1], p.dtype), []
    for index in range(p.shape[-1]):
        ratio = jnp.where(q[..., index] > 0, p[..., index] / jnp.where(q[..., index] > 0, q[..., index], 1), 0)
        joint = jnp.minimum(1, joint * ratio)
        columns.append(joint)
    return jnp.stack(columns, axis=-1) if columns else p


def block_acceptance(joint: jax.Array, excess: jax.Array, length: jax.Array) -> jax.Array:
    """Chance `[B, M]` that the prefix of i tokens passes its coin in block verification.

    Args:
      joint: `[B, M]`, P_1..P_M.
      excess: `[B, M - 1]`, Z_1..Z_{M-1}: the mass of (P_i p_{i+1} - q_{i+1})+.
      length: `[B]` int32, drafted tokens; the last one passes with P_length.
    """
    total = excess + 1 - joint[:, :-1]
    inner = jnp.where(total > 0, excess / jnp.where(total > 0, total, 1), 1)
    inner = jnp.concatenate([inner, joint[:, -1:]], axis=1)
    last = jnp.arange(1, joint.shape[1] + 1) == length[:, None]
    return jnp.where(last, joint, inner)


def _excess(draft: Draft, log_probs: jax.Array, joint: jax.Array) -> jax.Array:
    """Z `[B, M - 1]`; for a deterministic draft all of P_i p_{i+1} but what is on the drafted token."""
    if draft.log_probs is None:
        return joint[:, :-1] * (1 - _at_drafts(draft, log_probs)[0][:, 1:])
    p, q = jnp.exp(log_probs[:, 1:-1]), jnp.exp(draft.log_probs[:, 1:])
    return jnp.maximum(joint[:, :-1, None] * p - q, 0).sum(axis=-1)


def _toss(rule: Rejection | Block, keys: jax.Array, start: jax.Array, draft: Draft, log_probs: jax.Array) -> Verdict:
    """Tosses a coin for each drafted token, and draws the recovered or the bonus token behind the accepted ones."""
    coins = _uniform(window_keys(keys, start, draft.tokens.shape[1], Role.ACCEPT))
    passed = (coins < rule.chances(draft, log_probs)) & _proposed(draft, log_probs.shape[-1])
    num_accepted = rule.count(passed)
    rejected = num_accepted < draft.length
    leftover = jnp.log(rule.leftover(draft, log_probs, num_accepted))
    final_law = jnp.where(rejected[:, None], leftover, _row(log_probs, num_accepted))
    role = jnp.where(rejected, Role.RESIDUAL, Role.BONUS)
    final = categorical(window_key(keys, start, num_accepted, role), final_law)
    at_end = jnp.arange(log_probs.shape[1]) == num_accepted[:, None]
    tokens = jnp.where(at_end, final[:, None], jnp.pad(draft.tokens, ((0, 0), (0, 1))))
    return Verdict(tokens=tokens, num_accepted=num_accepted)


def _match(draft: Draft, tokens: jax.Array, vocab_size: int) -> Verdict:
    agreed = (draft.tokens == tokens[:, :-1]) & _proposed(draft, vocab_size)
    return Verdict(tokens=tokens, num_accepted=leading(agreed))


def _uniform(keys: jax.Array) -> jax.Array:
    return between(jax.vmap(jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32)))(keys))


def between(bits: jax.Array) -> jax.Array:
    """Random uint32 -> uniform float32 between 0 and 1, both excluded.

    `jax.random.uniform` has 23 bits: once in 2^23 it is 0, which would accept a token however unlikely it is.
    """
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)


def _proposed(draft: Draft, vocab_size: int) -> jax.Array:
    """`[B, M]` bool: really drafted, and an id of the target's vocabulary."""
    inside = jnp.arange(draft.tokens.shape[1]) < draft.length[:, None]
    return inside & (draft.tokens >= 0) & (draft.tokens < vocab_size)


def _at_drafts(draft: Draft, log_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """p and q `[B, M]` of the drafted tokens; q is 1 for a deterministic proposal, p is 0 for what is no proposal."""
    ids = jnp.clip(draft.tokens, 0, log_probs.shape[-1] - 1)[..., None]
    p = jnp.exp(jnp.take_along_axis(log_probs[:, :-1], ids, axis=-1)[..., 0])
    p = jnp.where(_proposed(draft, log_probs.shape[-1]), p, 0)
    if draft.log_probs is None:
        return p, jnp.ones_like(p)
    return p, jnp.exp(jnp.take_along_axis(draft.log_probs, ids, axis=-1)[..., 0])


def _row(log_probs: jax.Array, index: jax.Array) -> jax.Array:
    """Row `index` `[B]` of `[B, T, V]`."""
    return jnp.take_along_axis(log_probs, index[:, None, None], axis=1)[:, 0]


def _draft_row(draft: Draft, index: jax.Array, vocab_size: int) -> jax.Array:
    """q `[B, V]` at `index` `[B]`; where the index is past the window the value is not used."""
    if not draft.tokens.shape[1]:
        return jnp.zeros((draft.tokens.shape[0], vocab_size), jnp.float32)
    index = jnp.minimum(index, draft.tokens.shape[1] - 1)
    if draft.log_probs is None:
        ids = jnp.take_along_axis(draft.tokens, index[:, None], axis=1)[:, 0]
        return jax.nn.one_hot(ids, vocab_size, dtype=jnp.float32)
    return jnp.exp(_row(draft.log_probs, index))
