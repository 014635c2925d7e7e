"""One text read through the target more than once: a token at a time, as plain decoding does, and in verify windows."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from specjax.report.divergence import Scores
from specjax.report.goodness_of_fit import places
from specjax.sampling import law, position_keys
from specjax.types import Context, LanguageModel, SamplingParams

CHUNK = 32
"""Output tokens read at once: `[B, CHUNK, V]` logits and laws are held for two readings."""


@struct.dataclass(kw_only=True)
class Reading:
    """What the target says at C output tokens a row."""

    logits: jax.Array
    """`[B, C, V]`."""
    log_probs: jax.Array
    """`[B, C, V]`, the processed law."""


@struct.dataclass(kw_only=True)
class Deviation:
    """How far a reading in windows is from the plain one, at each of `[B, C]` places."""

    exists: jax.Array
    """bool: the row has an output token here."""
    logits: jax.Array
    """Largest difference of two logits of one id."""
    magnitude: jax.Array
    """Largest plain logit, by absolute value."""
    total_variation: jax.Array
    """Between the processed laws."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """C output tokens of a batch, read every way."""

    first: int
    """Index of the first of them among each row's output tokens."""
    plain: Reading
    """Read a token at a time."""
    deviations: dict[int, Deviation]
    """By tokens in a window, on the host."""

    def holds(self, index: int) -> bool:
        """Whether output token `index` is among them."""
        return self.first <= index < self.first + CHUNK


def replay(
    params: Any,
    cache: Any,
    context: Context,
    sampling: SamplingParams,
    *,
    target: LanguageModel,
    widths: Sequence[int],
) -> Iterator[Chunk]:
    """Reads the output tokens of a text chunk by chunk, every way against a cache of its own.

    Args:
      params: the target's weights.
      cache: stands for the prompts without their last token, as after `prefill`.
      context: prompts with their output behind them.
      sampling: the rows' parameters.
      target: the model.
      widths: tokens in a verify window (K + 1).
    """
    caches = {width: jax.tree.map(jnp.copy, cache) for width in (1, *widths)}
    longest = int((context.length - context.prompt_length).max())
    for first in range(0, longest, CHUNK):
        plain, caches[1] = _read(params, caches[1], context, sampling, first, target=target, width=1)
        deviations = {}
        for width in widths:
            other, caches[width] = _read(params, caches[width], context, sampling, first, target=target, width=width)
            deviations[width] = jax.tree.map(np.asarray, _deviation(plain, other, context, first))
        yield Chunk(first=first, plain=plain, deviations=deviations)


@partial(jax.jit, static_argnames=("target", "width"), donate_argnames=("cache",))
def _read(
    params: Any,
    cache: Any,
    context: Context,
    sampling: SamplingParams,
    first: jax.Array | int,
    *,
    target: LanguageModel,
    width: int,
) -> tuple[Reading, Any]:
    """Feeds the tokens that the output tokens from `first` on are drawn after, `width` in each call."""
    begin = context.prompt_length[:, None] - 1 + first

    def call(cache: Any, offsets: jax.Array) -> tuple[Any, Reading]:
        columns = begin + offsets
        real = columns < context.length[:, None] - 1
        tokens = jnp.take_along_axis(context.tokens, jnp.where(real, columns, 0), axis=1)
        cache = dataclasses.replace(cache, length=jnp.where(real[:, 0], columns[:, 0], cache.length))
        output, cache = target.apply(params, tokens, jnp.where(real, columns, -1), cache)
        log_probs, _ = law(output.logits, sampling, context, columns + 1)
        return cache, Reading(logits=output.logits, log_probs=log_probs)

    calls = -(-CHUNK // width)
    cache, seen = lax.scan(call, cache, jnp.arange(calls * width).reshape(calls, width))
    batch = len(context.length)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(batch, -1, x.shape[-1])[:, :CHUNK], seen), cache


@jax.jit
def _deviation(plain: Reading, other: Reading, context: Context, first: jax.Array | int) -> Deviation:
    """Equal infinities do not differ; NaN makes a difference NaN."""
    difference = jnp.where(plain.logits == other.logits, 0, jnp.abs(plain.logits - other.logits))
    return Deviation(
        exists=first + jnp.arange(CHUNK) < (context.length - context.prompt_length)[:, None],
        logits=difference.max(axis=-1),
        magnitude=jnp.where(jnp.isfinite(plain.logits), jnp.abs(plain.logits), 0).max(axis=-1),
        total_variation=jnp.abs(jnp.exp(plain.log_probs) - jnp.exp(other.log_probs)).sum(axis=-1) / 2,
    )


def places_in(chunk: Chunk, keys: jax.Array, context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Where each output token of a chunk falls in the law of plain decoding (`goodness_of_fit.places`).

    Args:
      chunk: what was read.
      keys: `[B]` row keys.
      context: what was replayed.

    Returns:
      `[B, C]` places, NaN for a token that its law forbids; and `[B, C]` bool, the row has an output token here.
    """
    places, exists = _places(chunk.plain.log_probs, keys, context, chunk.first)
    return np.array(places), np.array(exists)


@jax.jit
def _places(
    log_probs: jax.Array, keys: jax.Array, context: Context, first: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    offsets = first + jnp.arange(CHUNK)
    columns = jnp.minimum(context.prompt_length[:, None] + offsets, context.tokens.shape[1] - 1)
    keys = jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, 2**31 - 1), first))(keys)
    draws = jax.vmap(lambda key: jax.random.uniform(key, (CHUNK,)))(keys)
    tokens = jnp.take_along_axis(context.tokens, columns, axis=1)
    return places(draws, tokens, log_probs), offsets < (context.length - context.prompt_length)[:, None]


def scores_at(
    chunk: Chunk, row: int, index: int, *, keys: jax.Array, context: Context, sampling: SamplingParams
) -> Scores:
    """What plain decoding compared for output token `index` of a row, with noise keyed by position.

    Args:
      chunk: the one that holds this token.
      row: of the batch.
      index: among the row's output tokens.
      keys: `[B]` row keys.
      context: what was replayed.
      sampling: the rows' parameters.
    """
    place = index - chunk.first
    logits, kept = chunk.plain.logits[row, place], chunk.plain.log_probs[row, place] > -jnp.inf
    key, context, sampling = jax.tree.map(lambda x: x[row : row + 1], (keys, context, sampling))
    log_probs, noise = _unfiltered(logits, key, context, sampling, index)
    greedy = float(sampling.temperature[0]) == 0
    return Scores(
        logits=np.asarray(logits),
        log_probs=np.asarray(log_probs),
        noise=np.zeros_like(noise) if greedy else np.asarray(noise),
        kept=np.ones_like(kept) if greedy else np.asarray(kept),
        temperature=1.0 if greedy else float(sampling.temperature[0]),
        top_k=int(sampling.top_k[0]),
        top_p=float(sampling.top_p[0]),
        min_p=float(sampling.min_p[0]),
    )


@jax.jit
def _unfiltered(
    logits: jax.Array, key: jax.Array, context: Context, sampling: SamplingParams, index: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities `[V]` before any filter, at temperature 1 for a greedy row; and the target's noise `[V]`."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1)
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    off = {name: jnp.full_like(getattr(sampling, name), value) for name, value in off.items()}
    seen = context.prompt_length[:, None] + index
    sampling = dataclasses.replace(sampling, temperature=temperature, **off)
    log_probs, _ = law(logits[None, None], sampling, context, seen)
    noise = jax.random.gumbel(position_keys(key, seen)[0, 0], logits.shape, log_probs.dtype, mode="high")
    return log_probs[0, 0], noise
