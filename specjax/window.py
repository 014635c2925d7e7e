"""Windows: what one step reads and judges, the pending token and the draft, and the token buffer that it ends up in."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.shares import Share
from specjax.types import Context, Draft, LogProbs, Verdict


def check_draft(draft: Draft, shape: tuple[int, ...], vocab_size: int) -> None:
    """Refuses what a drafter may not return, while tracing.

    Args:
      draft: what it returned.
      shape: `(B, M)`.
      vocab_size: the target's.

    Raises:
      ValueError: arrays of other shapes or kinds.
    """
    laws = None if draft.log_probs is None or isinstance(draft.log_probs, Share) else draft.log_probs.shape
    columns = {"tokens": (draft.tokens, shape), "length": (draft.length, shape[:1])}
    columns |= {} if draft.evidence is None else {"evidence": (draft.evidence, shape[:1])}
    right = all(ids.shape == size and jnp.issubdtype(ids.dtype, jnp.integer) for ids, size in columns.values())
    if not right or laws not in (None, (*shape, vocab_size)):
        got = ", ".join(f"{name} {ids.dtype}{ids.shape}" for name, (ids, _) in columns.items())
        raise ValueError(
            f"expected a draft with integer tokens {shape}, length {shape[:1]} and evidence {shape[:1]} or None, and "
            f"log_probs {(*shape, vocab_size)} or None, got {got} and {laws}"
        )


def narrow(draft: Draft, width: int) -> Draft:
    """The first `width` columns of a draft whose rows are no longer than that."""
    laws = jax.tree.map(lambda law: law[:, :width], draft.log_probs)
    return dataclasses.replace(draft, tokens=draft.tokens[:, :width], log_probs=laws)


def widen(columns: jax.Array, num_tokens: int) -> jax.Array:
    """`[B, T]` -> `[B, num_tokens + 1]`, filled up with zeros: the shape of the widest window."""
    return jnp.pad(columns, ((0, 0), (0, num_tokens + 1 - columns.shape[1])))


def with_pending(context: Context, draft: Draft, live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The pending token and the draft `[B, M + 1]`, and their positions; -1 past the draft and in done rows."""
    last = jnp.maximum(context.length - 1, 0)[:, None]
    offsets = jnp.arange(draft.tokens.shape[1] + 1, dtype=jnp.int32)
    drafted = jnp.where(offsets[:-1] < draft.length[:, None], draft.tokens, 0)
    tokens = jnp.concatenate([jnp.take_along_axis(context.tokens, last, axis=1), drafted], axis=1)
    valid = (offsets <= draft.length[:, None]) & live[:, None]
    return tokens, jnp.where(valid, last + offsets, -1)


def leading(flags: jax.Array) -> jax.Array:
    """`[B]` int32: how many of `[B, T]` are True before the first False."""
    return jnp.cumprod(flags.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def token_log_probs(logits: jax.Array, log_probs: jax.Array, verdict: Verdict) -> LogProbs:
    """Raw and processed log-probabilities `[B, M + 1]` of the verdict's tokens."""
    ids = jnp.clip(verdict.tokens, 0, log_probs.shape[-1] - 1)[..., None]
    chosen, processed = (jnp.take_along_axis(scores, ids, axis=-1)[..., 0] for scores in (logits, log_probs))
    return LogProbs(raw=chosen - jax.nn.logsumexp(logits, axis=-1), processed=processed)


def write(buffer: jax.Array, start: jax.Array, values: jax.Array, count: jax.Array) -> jax.Array:
    """Writes the first `count` `[B]` of `values` `[B, T]` into `[B, N]` from column `start` `[B]` on."""
    offsets = jnp.arange(values.shape[1])
    columns = jnp.where(offsets < count[:, None], start[:, None] + offsets, buffer.shape[1])
    return buffer.at[jnp.arange(buffer.shape[0])[:, None], columns].set(values.astype(buffer.dtype), mode="drop")
