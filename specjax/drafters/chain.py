"""The loop that drafters with a law of their own share: sample a window token by token."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.sampling import categorical, law
from specjax.shares import Share, by_rows
from specjax.types import Context, Draft, ModelOutput, SamplingParams
from specjax.window import leading


def draft_chain(
    forward: Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[ModelOutput, Any]],
    keys: jax.Array,
    state: Any,
    context: Context,
    sampling: SamplingParams,
    *,
    vocab_size: int,
    axis: str | None = None,
) -> tuple[Draft, Any]:
    """Drafts M tokens a row from the law that `forward` yields, transformed exactly like the target's.

    Args:
      forward: `(state, window [B, M], offset, last [B]) -> (output, state)`: of one position, the law of the token that
        follows `last`, which is the pending token at offset 0 and `window[:, offset - 1]` later.
      keys: `[B, M]` typed keys, one per drafted token.
      state: the first argument of `forward`.
      context: the committed text.
      sampling: the rows' parameters.
      vocab_size: the target's width V; the model's logits are cut or padded to it.
      axis: mesh axis over which rows are dealt, for draws as for verdicts: laws stay where they are used (`by_rows`).

    Returns:
      The draft with the law it was sampled from, cut before the first position whose logits define no law; and the
      last state.
    """
    batch, window = keys.shape
    pending = jnp.take_along_axis(context.tokens, jnp.maximum(context.length - 1, 0)[:, None], axis=1)[:, 0]
    rows = jnp.arange(batch)

    def draw(logits: jax.Array, keys: jax.Array, text: Context, sampling: SamplingParams) -> tuple:
        log_probs, healthy = law(match_vocab(logits, vocab_size), sampling, text, text.length[:, None])
        token, log_probs = categorical(keys, log_probs[:, 0]), log_probs[:, 0]
        return token, healthy[:, 0], log_probs if axis is None else Share(log_probs)

    def step(carry: tuple, column: tuple[jax.Array, jax.Array]) -> tuple[tuple, tuple]:
        (state, tokens, drafted, last), (offset, key) = carry, column
        output, state = forward(state, drafted, offset, last)
        text = dataclasses.replace(context, tokens=tokens, length=context.length + offset)
        token, healthy, log_probs = by_rows(draw, output, key, text, sampling, axis=axis)
        tokens = tokens.at[rows, text.length].set(token, mode="drop")
        return (state, tokens, drafted.at[:, offset].set(token), token), (log_probs, healthy)

    start = state, context.tokens, jnp.zeros((batch, window), jnp.int32), pending
    columns = keys[np.arange(batch), np.arange(window)[:, None]]  # JAX's key-reuse check takes a transpose for a use
    (state, _, tokens, _), (laws, healthy) = lax.scan(step, start, (jnp.arange(window, dtype=jnp.int32), columns))
    length = leading(healthy.T)
    return Draft(tokens=tokens, length=length, log_probs=jax.tree.map(lambda law: law.swapaxes(0, 1), laws)), state


def match_vocab(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Cuts or pads (with -inf) logits `[..., W]` to the target's `[..., V]`."""
    logits = logits[..., :vocab_size]
    missing = vocab_size - logits.shape[-1]
    return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)
