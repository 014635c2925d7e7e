"""The target's exact law of a few tokens, over all V^n texts: the yardstick of the checks."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.sampling import law, sampling_params
from specjax.testing.compiling import compiled
from specjax.types import Context, LanguageModel

Model = Callable[[jax.Array], jax.Array]
"""Texts `[B, M]` -> logits `[B, M + 1, V]` of what follows each of their prefixes, the empty one first."""

_PADDING = 16
"""Texts are padded to a multiple of this many tokens, so that prompts of all lengths share a program."""


@functools.cache
def _law() -> Callable[..., tuple[jax.Array, jax.Array]]:
    return compiled(law)


def every_text(vocab_size: int, num_tokens: int) -> np.ndarray:
    """All texts `[V^n, n]` int32, in lexicographic order."""
    return np.indices((vocab_size,) * num_tokens, np.int32).reshape(num_tokens, vocab_size**num_tokens).T


def processed_laws(model: Model, texts: Any, prompt: Sequence[int], sampling: Mapping[str, Any]) -> jax.Array:
    """Log-laws `[B, M + 1, V]` along texts `[B, M]` that follow a prompt, transformed by the shipped `sampling.law`.

    Args:
      model: its logits.
      texts: int32.
      prompt: what penalties count before the text.
      sampling: arguments of `sampling_params`; the temperature is 1 unless it is among them.
    """
    texts = jnp.asarray(texts, jnp.int32)
    batch, width = texts.shape
    length = jnp.full(batch, len(prompt), jnp.int32)
    context = Context(tokens=_after(prompt, texts), length=length, prompt_length=length)
    rows = sampling_params(batch, **{"temperature": 1.0, "max_tokens": 2**30} | dict(sampling))
    log_probs, healthy = _law()(model(texts), rows, context, length[:, None] + jnp.arange(width + 1))
    if not healthy.all():
        raise ValueError("expected logits with a finite maximum everywhere, got a law that cannot be sampled")
    return log_probs


def reader(target: LanguageModel) -> Callable[[Any, jax.Array, jax.Array], jax.Array]:
    """A compiled `(params, tokens [B, N], positions [B, N]) -> logits [B, N, V]`: one forward pass with no past."""

    def read(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return target.apply(params, tokens, positions, target.init_cache(params, *tokens.shape))[0].logits

    return compiled(read)


def continuation(read: Callable[..., jax.Array], params: Any, prompt: Sequence[int]) -> Model:
    """A language model after a prompt, from its `reader`."""

    def logits(texts: jax.Array) -> jax.Array:
        tokens, length = _after(prompt, texts), len(prompt) + texts.shape[1]
        columns = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return read(params, tokens, jnp.where(columns < length, columns, -1))[:, len(prompt) - 1 : length]

    return logits


def _after(prompt: Sequence[int], texts: jax.Array) -> jax.Array:
    tokens = jnp.broadcast_to(jnp.asarray(prompt, jnp.int32), (texts.shape[0], len(prompt)))
    return jnp.pad(
        jnp.concatenate([tokens, texts], axis=1), ((0, 0), (0, -(tokens.shape[1] + texts.shape[1]) % _PADDING))
    )


def prefix_laws(log_probs: Any) -> list[np.ndarray]:
    """The law after each prefix of n = 0..M tokens, `[V] * (n + 1)` float64, from those `[V^M, M + 1, V]` along every
    text."""
    probs = np.exp(np.asarray(log_probs, np.float64))
    _, width, size = probs.shape
    return [probs[:: size ** (width - 1 - n), n].reshape((size,) * (n + 1)) for n in range(width)]


def joint_law(laws: Sequence[np.ndarray]) -> np.ndarray:
    """The joint law `[V] * n` of n tokens from the law after each prefix of fewer."""
    joint = np.ones(())
    for law_after in laws:
        joint = joint[..., None] * law_after
    return joint


def text_law(model: Model, vocab_size: int, num_tokens: int, prompt: Sequence[int], **sampling: Any) -> np.ndarray:
    """The joint law `[V] * num_tokens` float64 of what follows a prompt.

    Args:
      model: the target's logits after the prompt; see `continuation`.
      vocab_size: V.
      num_tokens: n; V^n numbers are computed.
      prompt: what the penalties count.
      **sampling: arguments of `sampling_params`; the temperature is 1 unless it is among them.
    """
    texts = every_text(vocab_size, num_tokens - 1)
    return joint_law(prefix_laws(processed_laws(model, texts, prompt, sampling)))


def closed_form(
    vocab_size: int, scale: int, step: int, shift: int, modulus: int, *, width: int | None = None, gaps: bool = False
) -> Model:
    """A model that depends on the whole text c: p(x | c) proportional to 1 + ((scale enc(c) + step x + shift) mod m).

    enc(()) = 0 and enc(c x) = enc(c) (V + 1) + x + 1.

    Args:
      vocab_size: V, tokens that are possible.
      scale: a number of the formula.
      step: another.
      shift: another.
      modulus: m.
      width: of the logits, at least V.
      gaps: after each text one token, id enc(c) mod V, is impossible.
    """

    def logits(texts: jax.Array) -> jax.Array:
        codes = [np.zeros(len(texts), np.int64)]
        for column in np.asarray(texts).T:
            codes.append(codes[-1] * (vocab_size + 1) + column + 1)
        code, token = np.stack(codes, axis=1)[..., None], np.arange(width or vocab_size)
        weights = 1.0 + (scale * code + step * token + shift) % modulus
        possible = (token < vocab_size) & ~(gaps & (token == code % vocab_size))
        return jnp.asarray(np.log(weights, out=np.full(weights.shape, -math.inf), where=possible))

    return logits


def context_free(probs: Sequence[float]) -> Model:
    """A model whose law `[V]` never changes."""

    def logits(texts: jax.Array) -> jax.Array:
        values = np.log(probs, out=np.full(len(probs), -math.inf), where=np.asarray(probs) > 0)
        return jnp.broadcast_to(jnp.asarray(values), (texts.shape[0], texts.shape[1] + 1, len(probs)))

    return logits
