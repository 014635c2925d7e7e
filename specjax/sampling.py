"""From logits to the law that is sampled, once for plain decoding, drafter and verifier; and every random draw.

The law is kept as log-probabilities `[B, T, V]` float32. A token outside the filtered support has probability
exactly zero (-inf). A greedy row's law is one-hot, so verifiers need no special case for it.
"""

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.types import Context, SamplingParams

MASS_TOLERANCE = 1e-6
"""Slack of the top-p and min-p comparisons: eight float32 probabilities of 1/8 reach .5 with four, whatever their
last bit."""


class Role(enum.IntEnum):
    """What a draw decides. Keys of different roles, windows or offsets are never equal."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4


def window_keys(keys: jax.Array, start: jax.Array, num_tokens: int, role: Role) -> jax.Array:
    """Keys `[B, num_tokens]` for the offsets of the window that starts at position `start` `[B]`.

    Window starts never repeat in a row, so noise that has decided anything is never drawn again.
    """
    base = _fold(_fold(keys, jnp.full_like(start, role)), start)
    offsets = jnp.broadcast_to(jnp.arange(num_tokens), (*start.shape, num_tokens))
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(base, offsets)


def window_key(keys: jax.Array, start: jax.Array, offset: jax.Array, role: jax.Array) -> jax.Array:
    """The one key `[B]` of `window_keys` at each row's `offset` and `role` `[B]`."""
    return _fold(_fold(_fold(keys, role), start), offset)


def position_keys(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """Keys `[B, T]` of the target's noise at absolute positions `[B, T]`, whatever drafter or window is in use."""
    base = _fold(keys, jnp.full(keys.shape, Role.TARGET))
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(base, positions)


_fold = jax.vmap(jax.random.fold_in)


def categorical(keys: jax.Array, log_probs: jax.Array) -> jax.Array:
    """Draws ids `[...]` from unnormalised log-probabilities `[..., V]` with one key `[...]` each (Gumbel argmax).

    The noise has full float32 resolution: with 24 bits a vocabulary of 50,000 ties too often, and ties favour low ids.
    No noise is made where every law leaves one id only: it could not change the draw.
    """

    def noise(key: jax.Array) -> jax.Array:
        return jax.random.gumbel(key, log_probs.shape[-1:], log_probs.dtype, mode="high")

    for _ in keys.shape:
        noise = jax.vmap(noise)
    certain = (log_probs > -jnp.inf).sum(axis=-1).max() <= 1
    return lax.cond(certain, most_likely, lambda x: most_likely(x + noise(keys)), log_probs)


def most_likely(values: jax.Array) -> jax.Array:
    """Ids `[...]` int32 of the largest of `[..., V]`; the lowest wins a tie. XLA:CPU is 3 times slower at argmax."""
    ids = jnp.arange(values.shape[-1], dtype=jnp.int32)
    largest = values == values.max(axis=-1, keepdims=True)
    return jnp.minimum(jnp.where(largest, ids, len(ids)).min(axis=-1), len(ids) - 1)


def one_hot_law(ids: jax.Array, vocab_size: int) -> jax.Array:
    """The log-law `[..., V]` float32 that is certain of `ids` `[...]`."""
    return jnp.where(jnp.arange(vocab_size) == ids[..., None], jnp.float32(0), -jnp.inf)


def law(logits: jax.Array, sampling: SamplingParams, context: Context, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The law of the next token at T positions a row.

    Order: logit bias and min_tokens, penalties, temperature, top-k, top-p, min-p. What no row of the batch asks for
    costs nothing, min-p apart.

    Args:
      logits: `[B, T, V]` float32.
      sampling: the rows' parameters.
      context: the text, with the drafted tokens written after its `length`.
      seen: `[B, T]` int32, tokens of that text before each position; consecutive within a row.

    Returns:
      Log-probabilities `[B, T, V]`, and `[B, T]` bool, False where the logits define no law (NaN, +inf, nothing
      allowed): such a position gets the one-hot law of id 0 in place of junk.
    """
    if sampling.logit_bias is not None:
        logits = logits + sampling.logit_bias[:, None]
    early = seen - context.prompt_length[:, None] < sampling.min_tokens[:, None]
    adjusted = early.any() | _penalised(sampling).any()
    logits = lax.cond(adjusted, lambda x: _adjust(x, sampling, context, seen, early), lambda x: x, logits)
    best = most_likely(logits)
    healthy = jnp.isfinite(jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0])
    healthy &= ~jnp.isnan(logits.max(axis=-1))
    certain = one_hot_law(jnp.where(healthy, best, 0), logits.shape[-1]).astype(logits.dtype)
    sampled = (sampling.temperature > 0)[:, None] & healthy

    def sample(x: jax.Array) -> jax.Array:
        safe = jnp.where(healthy[..., None], x, 0.0)
        return jnp.where(sampled[..., None], _sampled_law(safe, sampling), certain)

    return lax.cond(sampled.any(), sample, lambda _: certain, logits), healthy


def _adjust(
    logits: jax.Array, sampling: SamplingParams, context: Context, seen: jax.Array, early: jax.Array
) -> jax.Array:
    """Forbids stop ids at the positions that are too `early` `[B, T]` for them, then applies the penalties."""
    stops = (sampling.stop_token_ids[:, :, None] == jnp.arange(logits.shape[-1])).any(axis=1)
    logits = jnp.where(early[..., None] & stops[:, None], -jnp.inf, logits)
    return _when(_penalised(sampling), lambda x: _penalise(x, sampling, context, seen), logits)


def _when(rows: jax.Array, transform: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return lax.cond(rows.any(), transform, lambda x: x, x)


def _penalised(sampling: SamplingParams) -> jax.Array:
    off = (sampling.repetition_penalty == 1) & (sampling.presence_penalty == 0) & (sampling.frequency_penalty == 0)
    return ~off


def _penalise(logits: jax.Array, sampling: SamplingParams, context: Context, seen: jax.Array) -> jax.Array:
    """Repetition penalty over prompt and output, presence and frequency penalties over the output."""
    everything = _counts(context.tokens, jnp.zeros_like(context.length), seen, logits.shape[-1])
    output = _counts(context.tokens, context.prompt_length, seen, logits.shape[-1])
    repetition = sampling.repetition_penalty[:, None, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(everything > 0, repeated, logits)
    logits = logits - output * sampling.frequency_penalty[:, None, None]
    return logits - (output > 0) * sampling.presence_penalty[:, None, None]


def _counts(tokens: jax.Array, first: jax.Array, seen: jax.Array, vocab_size: int) -> jax.Array:
    """`[B, T, V]`: occurrences of each id among tokens first..seen of each row."""
    columns = jnp.arange(tokens.shape[1])
    rows = jnp.arange(tokens.shape[0])[:, None]
    base = (columns >= first[:, None]) & (columns < seen[:, :1])
    ids = jnp.where(base, tokens, vocab_size)
    counts = jnp.zeros((tokens.shape[0], vocab_size), jnp.float32).at[rows, ids].add(1, mode="drop")
    window = jnp.take_along_axis(tokens, jnp.minimum(seen[:, :-1], tokens.shape[1] - 1), axis=1)
    steps = (window[:, :, None] == jnp.arange(vocab_size)).astype(jnp.float32)
    added = jnp.cumsum(steps, axis=1)
    return counts[:, None] + jnp.concatenate([jnp.zeros_like(counts)[:, None], added], axis=1)


def _sampled_law(logits: jax.Array, sampling: SamplingParams) -> jax.Array:
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1)[:, None, None]
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    scaled = _when(sampling.top_k > 0, lambda x: _top_k(x, sampling.top_k), scaled)
    scaled = _when(sampling.top_p < 1, lambda x: _top_p(x, sampling.top_p), scaled)
    return jax.nn.log_softmax(_min_p(scaled, sampling.min_p))


def _top_k(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    size = jnp.where(top_k > 0, top_k, logits.shape[-1])[:, None]
    size = jnp.minimum(size, jnp.isfinite(logits).sum(axis=-1)).astype(jnp.float32)
    kept = _heaviest(logits, jnp.ones_like(logits), size)
    return jnp.where(kept | (top_k <= 0)[:, None, None], logits, -jnp.inf)


def _top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    mass = jnp.maximum(top_p - MASS_TOLERANCE, 0)[:, None]
    kept = _heaviest(logits, jax.nn.softmax(logits), jnp.broadcast_to(mass, logits.shape[:2]))
    return jnp.where(kept | (top_p >= 1)[:, None, None], logits, -jnp.inf)


def _min_p(logits: jax.Array, min_p: jax.Array) -> jax.Array:
    floor = logits.max(axis=-1, keepdims=True) + jnp.log(min_p)[:, None, None] - MASS_TOLERANCE
    return jnp.where(logits >= floor, logits, -jnp.inf)


def _heaviest(values: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Mask `[..., V]` of the fewest largest values (lowest id first) whose weights reach `target` `[...]`; never empty.

    No sort: the threshold is bisected over the 32 bits of an order-preserving integer code of the values. Equal
    values have equal weights, so ties are settled by counting.
    """
    codes = _ordered_bits(values)

    def reaches(code: jax.Array) -> jax.Array:
        return jnp.where(codes >= code[..., None], weights, 0).sum(axis=-1) >= target

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        enough = reaches(middle)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low, high = codes.min(axis=-1), codes.max(axis=-1)
    threshold = lax.fori_loop(0, 32, halve, (low, high))[0][..., None]
    above, tied = codes > threshold, codes == threshold
    missing = target - jnp.where(above, weights, 0).sum(axis=-1)
    each = jnp.where(tied, weights, 0).max(axis=-1)
    quota = jnp.maximum(jnp.ceil(missing / each), 1).astype(jnp.int32)
    return above | (tied & (jnp.cumsum(tied, axis=-1) <= quota[..., None]))


def _ordered_bits(values: jax.Array) -> jax.Array:
    """int32 codes in the order of the float32 values; -0 and 0 share one."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values).astype(jnp.float32), jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def sampling_params(
    batch_size: int,
    *,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0,
    presence_penalty: float | Sequence[float] = 0.0,
    frequency_penalty: float | Sequence[float] = 0.0,
    min_tokens: int | Sequence[int] = 0,
    max_tokens: int | Sequence[int],
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]] = (),
    logit_bias: jax.Array | Sequence[float] | None = None,
) -> SamplingParams:
    """Builds `SamplingParams` for a batch from Python values: one for all rows, or one per row.

    Args:
      batch_size: rows B.
      temperature: >= 0; 0 is greedy.
      top_k: >= 0; 0 keeps all.
      top_p: in (0, 1].
      min_p: in [0, 1].
      repetition_penalty: > 0.
      presence_penalty: any finite number.
      frequency_penalty: any finite number.
      min_tokens: >= 0, at most `max_tokens`.
      max_tokens: >= 0, output tokens at most.
      stop_token_ids: EOS and stop ids, for all rows or a list per row.
      logit_bias: `[V]` or `[B, V]` float32 added to the logits; see `logit_bias` (the function) for building one.

    Raises:
      ValueError: a value out of range, or a sequence that is not one per row.
    """

    def column(name: str, value: Any, low: float, high: float, dtype: Any, *, open_low: bool = False) -> jax.Array:
        if np.shape(value) not in ((), (batch_size,)):
            raise ValueError(f"expected {name} to be one value or {batch_size} (one per row), got {np.shape(value)}")
        values = np.broadcast_to(np.asarray(value), batch_size).tolist()
        for item in values:
            stored = _stored(item, dtype)
            exact = stored == item or dtype is np.float32
            if not (math.isfinite(stored) and low <= stored <= high and exact) or (open_low and stored == low):
                raise ValueError(f"expected {name} in {'(' if open_low else '['}{low}, {high}], got {item}")
        return jnp.asarray(values, dtype)

    real, whole = np.float32, np.int32
    limit, huge = 2**31 - 1, float("inf")
    params = SamplingParams(
        temperature=column("temperature", temperature, 0, huge, real),
        top_k=column("top_k", top_k, 0, limit, whole),
        top_p=column("top_p", top_p, 0, 1, real, open_low=True),
        min_p=column("min_p", min_p, 0, 1, real),
        repetition_penalty=column("repetition_penalty", repetition_penalty, 0, huge, real, open_low=True),
        presence_penalty=column("presence_penalty", presence_penalty, -huge, huge, real),
        frequency_penalty=column("frequency_penalty", frequency_penalty, -huge, huge, real),
        min_tokens=column("min_tokens", min_tokens, 0, limit, whole),
        max_tokens=column("max_tokens", max_tokens, 0, limit, whole),
        stop_token_ids=_stop_columns(batch_size, stop_token_ids),
        logit_bias=None if logit_bias is None else _bias_rows(batch_size, jnp.asarray(logit_bias, jnp.float32)),
    )
    if (np.asarray(min_tokens) > np.asarray(max_tokens)).any():
        raise ValueError(f"expected min_tokens <= max_tokens, got {min_tokens} and {max_tokens}")
    return params


def _stored(value: float, dtype: Any) -> float:
    """A number as the device will see it; infinite where it is too large for that."""
    try:
        with np.errstate(over="ignore"):
            return float(dtype(value))
    except OverflowError:
        return math.inf


def _stop_columns(batch_size: int, stop_token_ids: Sequence) -> jax.Array:
    """`[B, C]` with C a multiple of 4, padded with -1, so that sets of similar size share a compiled program."""
    ids = stop_token_ids.tolist() if isinstance(stop_token_ids, np.ndarray | jax.Array) else list(stop_token_ids)
    rows = [list(row) for row in ids] if ids and isinstance(ids[0], Sequence) else [ids] * batch_size
    if len(rows) != batch_size:
        raise ValueError(f"expected stop_token_ids for {batch_size} rows, got {len(rows)}")
    if any(item < 0 for row in rows for item in row):
        raise ValueError(f"expected stop_token_ids >= 0, got {rows}")
    width = max(4, -(-max(map(len, rows)) // 4) * 4) if rows else 4
    return jnp.asarray([row + [-1] * (width - len(row)) for row in rows], jnp.int32).reshape(batch_size, width)


def _bias_rows(batch_size: int, bias: jax.Array) -> jax.Array:
    if bias.ndim not in (1, 2) or bias.shape[:-1] not in ((), (batch_size,)):
        raise ValueError(f"expected logit_bias [V] or [{batch_size}, V], got {list(bias.shape)}")
    return jnp.broadcast_to(bias, (batch_size, bias.shape[-1]))


def logit_bias(
    vocab_size: int,
    *,
    bias: dict[int, float] | None = None,
    allowed_token_ids: Sequence[int] | None = None,
    bad_token_ids: Sequence[int] = (),
) -> jax.Array:
    """A `[V]` bias: `bias` added to its ids, ids outside `allowed_token_ids` (if given) and `bad_token_ids` forbidden.

    Raises:
      ValueError: an id outside the vocabulary, a bias that is not a number below +inf, or nothing left to sample.
    """
    bias = bias or {}
    used = [*bias, *(allowed_token_ids or ()), *bad_token_ids]
    if any(not 0 <= item < vocab_size for item in used):
        raise ValueError(f"expected ids in 0..{vocab_size - 1}, got {[i for i in used if not 0 <= i < vocab_size]}")
    if any(math.isnan(value) or value == math.inf for value in bias.values()):
        raise ValueError(f"expected biases below +inf, got {bias}")
    values = [0.0] * vocab_size if allowed_token_ids is None else [-math.inf] * vocab_size
    for item in allowed_token_ids or ():
        values[item] = 0.0
    for item, value in bias.items():
        values[item] += value
    for item in bad_token_ids:
        values[item] = -math.inf
    if max(values) == -math.inf:
        raise ValueError("expected at least one id to stay allowed, got a bias that forbids the whole vocabulary")
    return jnp.asarray(values, jnp.float32)
