"""The loop that drafters with a law of their own share: sample a window token by token."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.sampling import categorical, law
from specjax.types import Context, Draft, SamplingParams


def draft_chain(
    forward: Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]],
    keys: jax.Array,
    state: Any,
    context: Context,
    sampling: SamplingParams,
) -> tuple[Draft, Any]:
    """Drafts M tokens a row from the law that `forward` yields, transformed exactly like the target's.

    Args:
      forward: `(state, window [B, M], offset, last [B]) -> (logits [B, V], state)`: the law of the token that follows
        `last`, which is the pending token at offset 0 and `window[:, offset - 1]` later.
      keys: `[B, M]` typed keys, one per drafted token.
      state: the first argument of `forward`.
      context: the committed text.
      sampling: the rows' parameters.

    Returns:
      The draft with the law it was sampled from, cut before the first position whose logits define no law; and the
      last state.
    """
    batch, window = keys.shape
    pending = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)[:, 0]
    rows = jnp.arange(batch)

    def step(carry: tuple, column: tuple[jax.Array, jax.Array]) -> tuple[tuple, tuple]:
        (state, text, drafted, last), (offset, key) = carry, column
        logits, state = forward(state, drafted, offset, last)
        seen = context.length + offset
        log_probs, healthy = law(logits[:, None], sampling, dataclasses.replace(context, tokens=text), seen[:, None])
        token = categorical(key, log_probs[:, 0])
        text = text.at[rows, seen].set(token, mode="drop")
        return (state, text, drafted.at[:, offset].set(token), token), (log_probs[:, 0], healthy[:, 0])

    start = state, context.tokens, jnp.zeros((batch, window), jnp.int32), pending
    columns = keys[np.arange(batch), np.arange(window)[:, None]]  # JAX's key-reuse check takes a transpose for a use
    (state, _, tokens, _), (laws, healthy) = lax.scan(step, start, (jnp.arange(window), columns))
    length = jnp.cumprod(healthy.astype(jnp.int32), axis=0).sum(axis=0)
    return Draft(tokens=tokens, length=length, log_probs=laws.swapaxes(0, 1)), state


def match_vocab(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Cuts or pads (with -inf) logits `[..., W]` to the target's `[..., V]`."""
    logits = logits[..., :vocab_size]
    missing = vocab_size - logits.shape[-1]
    return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)
