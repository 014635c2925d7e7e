"""Models and drafters with known laws, for tests of a decoder. They follow the protocols of `specjax.types` only.

Every class is frozen and holds no arrays, like the real ones. What the protocols call meaningless is made harmful here:
the output at padding is certain of the last token, and unwritten slots of a cache spoil the law of whoever sees them.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.types import Context, Draft, KVCache, ModelOutput, Params, SamplingParams

# ---- Targets ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableModel:
    """A Markov chain: the params are its `[V, V]` logits, indexed by the last token."""

    vocab_size: int
    max_positions: int = 1 << 20

    def init_cache(self, params: jax.Array, batch_size: int, capacity: int) -> KVCache:
        """Nothing to remember."""
        return KVCache(keys=(), values=(), length=jnp.zeros(batch_size, jnp.int32))

    def apply(
        self, params: jax.Array, tokens: jax.Array, positions: jax.Array, cache: KVCache
    ) -> tuple[ModelOutput, KVCache]:
        """One row of the table for each token."""
        real = (positions >= 0) & (tokens >= 0) & (tokens < self.vocab_size)
        logits = params[jnp.where(real, tokens, 0)].astype(jnp.float32)
        return ModelOutput(logits=_spoil(logits, real)), cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryModel:
    """The law depends on every token so far and its place, through a hash of what the cache holds.

    The params are a `[1]` uint32 salt (`history_params`). All arithmetic is exact, so logits never depend on the batch
    or on how text is cut into calls, and any slip in the handling of the cache shows up as another text.
    """

    vocab_size: int
    max_positions: int = 1 << 20
    scale: float = 4.0
    """Logits are uniform in [0, scale)."""

    def init_cache(self, params: jax.Array, batch_size: int, capacity: int) -> KVCache:
        """One layer: a slot's key is its token, its value its position; -1 before it is written."""
        empty = jnp.full((batch_size, 1, capacity, 1), -1, jnp.int32)
        return KVCache(keys=(empty,), values=(empty,), length=jnp.zeros(batch_size, jnp.int32))

    def apply(
        self, params: jax.Array, tokens: jax.Array, positions: jax.Array, cache: KVCache
    ) -> tuple[ModelOutput, KVCache]:
        """Writes the tokens to the slots of their positions; the query at position t sees slots 0..t."""
        rows, capacity = jnp.arange(len(tokens))[:, None], cache.keys[0].shape[2]
        slots = jnp.where(positions < 0, capacity, positions)
        keys = cache.keys[0].at[rows, 0, slots, 0].set(tokens, mode="drop")
        values = cache.values[0].at[rows, 0, slots, 0].set(positions, mode="drop")
        visible = jnp.arange(capacity) <= positions[:, :, None]
        marks = _mark(keys[:, 0, :, 0].astype(jnp.uint32), values[:, 0, :, 0].astype(jnp.uint32))
        digest = jnp.sum(jnp.where(visible, marks[:, None, :], jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
        noise = _scramble(params + digest[..., None] + _scramble(jnp.arange(self.vocab_size, dtype=jnp.uint32)))
        logits = _unit(noise) * jnp.float32(self.scale)
        return ModelOutput(logits=_spoil(logits, positions >= 0)), dataclasses.replace(
            cache, keys=(keys,), values=(values,)
        )

    def logits_after(self, params: Any, tokens: Sequence[int]) -> np.ndarray:
        """The same logits `[V]` float32 after one text, in NumPy and without a cache."""
        text = np.array(tokens, np.uint32)
        digest = np.sum(_mark(text, np.arange(len(text), dtype=np.uint32)), dtype=np.uint32)
        noise = _scramble(np.asarray(params) + digest + _scramble(np.arange(self.vocab_size, dtype=np.uint32)))
        return _unit(noise) * np.float32(self.scale)


def history_params(salt: int) -> jax.Array:
    """Params of a `HistoryModel`; another salt is another language."""
    return jnp.array([salt], jnp.uint32)


def _spoil(logits: jax.Array, real: jax.Array) -> jax.Array:
    wrong = jnp.where(jnp.arange(logits.shape[-1]) == logits.shape[-1] - 1, 100.0, 0.0)
    return jnp.where(real[..., None], logits, wrong)


def _mark(token: Any, position: Any) -> Any:
    return _scramble(token + _scramble(position + np.uint32(1)))


def _scramble(bits: Any) -> Any:
    for multiplier in (0x9E3779B1, 0x85EBCA77):
        bits = bits * np.uint32(multiplier)
        bits = bits ^ (bits >> np.uint32(15))
    return bits


def _unit(bits: Any) -> Any:
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


# ---- Drafters ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stateless(abc.ABC):
    """A drafter that remembers nothing; what it proposes is in `propose`."""

    num_tokens: int

    def init(self, params: Params, batch_size: int, capacity: int) -> tuple[()]:
        """No state."""
        return ()

    def draft(
        self, params: Params, keys: jax.Array, state: tuple[()], context: Context, sampling: SamplingParams, cache: Any
    ) -> tuple[Draft, tuple[()]]:
        """The proposal, and no state."""
        return self.propose(params, keys, context, sampling), state

    @abc.abstractmethod
    def propose(self, params: Params, keys: jax.Array, context: Context, sampling: SamplingParams) -> Draft:
        """The proposal."""

    def update(
        self, params: Params, state: tuple[()], tokens: jax.Array, positions: jax.Array, output: ModelOutput
    ) -> tuple[()]:
        """Learns nothing."""
        return state


@struct.dataclass(kw_only=True)
class Script:
    """What a `ScriptedDrafter` proposes when a row's text has n tokens."""

    tokens: jax.Array
    """`[B, N, M]` int32."""
    length: jax.Array
    """`[B, N]` int32."""
    log_probs: jax.Array | None = None
    """`[B, N, M, V]` float32, or None for deterministic proposals."""


def script_of(text: Any, num_tokens: int, *, filler: int = -1) -> Script:
    """The script that proposes what follows in `text` `[B, N]`, as far as that goes; `filler` stands beyond."""
    text = np.asarray(text, np.int32)
    size = text.shape[1]
    index = np.arange(size)[:, None] + np.arange(num_tokens)
    tokens = np.where(index < size, text[:, np.minimum(index, size - 1)], np.int32(filler))
    length = np.broadcast_to(np.minimum(size - np.arange(size), num_tokens).astype(np.int32), text.shape)
    return Script(tokens=jnp.asarray(tokens), length=jnp.asarray(length))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptedDrafter(_Stateless):
    """Proposes what the `Script` in `Params.draft` says for the row and the length of its text; past it, nothing."""

    def propose(self, params: Params, keys: jax.Array, context: Context, sampling: SamplingParams) -> Draft:
        """Looks the proposal up."""
        script, rows = params.draft, jnp.arange(len(context.length))
        size = script.length.shape[1]
        column = jnp.minimum(context.length, size - 1)
        length = jnp.where(context.length < size, script.length[rows, column], 0)
        log_probs = None if script.log_probs is None else script.log_probs[rows, column]
        return Draft(tokens=script.tokens[rows, column], length=length, log_probs=log_probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleDrafter(_Stateless):
    """Proposes the greedy path of a `TableModel` target, from its plain logits: always accepted at temperature 0."""

    def propose(self, params: Params, keys: jax.Array, context: Context, sampling: SamplingParams) -> Draft:
        """Follows the argmax."""
        return _deterministic(context, self.num_tokens, lambda token: jnp.argmax(params.target[token], axis=-1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContraryDrafter(_Stateless):
    """Proposes the least likely token of a `TableModel` target (the highest id among equals): never its argmax."""

    def propose(self, params: Params, keys: jax.Array, context: Context, sampling: SamplingParams) -> Draft:
        """Follows the argmin, counted from the last id."""
        backwards, last = params.target[:, ::-1], params.target.shape[-1] - 1
        return _deterministic(context, self.num_tokens, lambda token: last - jnp.argmin(backwards[token], axis=-1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableDrafter(_Stateless):
    """Samples from the `[V, V]` logits in `Params.draft`, at the row's temperature and with no other transform."""

    def propose(self, params: Params, keys: jax.Array, context: Context, sampling: SamplingParams) -> Draft:
        """Draws with the given keys and reports the law it drew from."""
        return _sampled(params.draft, keys, context, sampling)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfDrafter(_Stateless):
    """Samples from the table of a `TableModel` target, at the row's temperature and with no other transform."""

    def propose(self, params: Params, keys: jax.Array, context: Context, sampling: SamplingParams) -> Draft:
        """Draws with the given keys and reports the law it drew from."""
        return _sampled(params.target, keys, context, sampling)


def _deterministic(context: Context, num_tokens: int, follow: Callable[[jax.Array], jax.Array]) -> Draft:
    def step(token: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        token = follow(token).astype(jnp.int32)
        return token, token

    _, tokens = jax.lax.scan(step, _pending(context), None, length=num_tokens)
    return _full_draft(tokens, None)


def _sampled(table: jax.Array, keys: jax.Array, context: Context, sampling: SamplingParams) -> Draft:
    def step(token: jax.Array, column: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        log_probs = tempered_log_probs(table[token], sampling.temperature)
        token = jax.vmap(functools.partial(jax.random.categorical, mode="high"))(column, log_probs).astype(jnp.int32)
        return token, (token, log_probs)

    batch, window = keys.shape
    columns = keys[np.arange(batch), np.arange(window)[:, None]]  # JAX's key-reuse check takes a transpose for a use
    _, (tokens, log_probs) = jax.lax.scan(step, _pending(context), columns)
    return _full_draft(tokens, jnp.swapaxes(log_probs, 0, 1))


def tempered_log_probs(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Log-law `[B, V]` float32 of logits at a temperature `[B]`; 0 is all on the argmax."""
    logits, cold = logits.astype(jnp.float32), temperature[:, None] == 0
    best = jnp.where(jnp.arange(logits.shape[-1]) == jnp.argmax(logits, axis=-1)[:, None], 0.0, -jnp.inf)
    return jnp.where(cold, best, jax.nn.log_softmax(logits / jnp.where(cold, 1.0, temperature[:, None])))


def _full_draft(tokens: jax.Array, log_probs: jax.Array | None) -> Draft:
    window, batch = tokens.shape
    return Draft(tokens=tokens.T, length=jnp.full(batch, window, jnp.int32), log_probs=log_probs)


def _pending(context: Context) -> jax.Array:
    return jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)[:, 0]
