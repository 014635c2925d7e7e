"""Prompt lookup: propose what followed the last occurrence of the text's own ending. No model, all on device."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.types import Context, Draft, ModelOutput, Params, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGramDrafter:
    """Deterministic drafts from the row's own text (prompt lookup decoding).

    The longest suffix of `prompt_lookup_max` down to `prompt_lookup_min` tokens that occurred before wins; among its
    occurrences the most recent. Nothing is proposed where nothing matched.
    """

    num_tokens: int
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(f"expected num_tokens >= 1 and 1 <= prompt_lookup_min <= prompt_lookup_max, got {self}")

    def init(self, params: Params, batch_size: int, capacity: int) -> None:
        """No state: the committed text is all it needs."""
        return

    def draft(
        self, params: Params, keys: jax.Array, state: None, context: Context, sampling: SamplingParams, cache: object
    ) -> tuple[Draft, None]:
        """Looks the suffix up. See `Drafter.draft`."""
        tokens, length = jax.vmap(self._lookup)(context.tokens, context.length)
        return Draft(tokens=tokens, length=length), None

    def update(self, params: Params, state: None, tokens: jax.Array, positions: jax.Array, output: ModelOutput) -> None:
        """Nothing to learn: the text is in the context."""
        return

    def _lookup(self, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One row: `[N]` tokens and its length -> `[M]` proposal and how many of them are valid."""
        columns = jnp.arange(tokens.shape[0])
        ends = columns[1:]  # a candidate match ends just before this column, which holds what followed
        matched = jnp.zeros_like(ends)
        running = ends < length
        for size in range(1, self.prompt_lookup_max + 1):
            running &= (ends >= size) & (jnp.roll(tokens, size)[1:] == tokens[length - size]) & (length > size)
            matched = jnp.where(running, size, matched)
        matched = jnp.where(matched >= self.prompt_lookup_min, matched, 0)
        longest = matched.max()
        start = jnp.where(matched == longest, ends, 0).max()
        follow = start + jnp.arange(self.num_tokens)
        proposal = tokens[jnp.minimum(follow, tokens.shape[0] - 1)]
        count = jnp.where(longest > 0, jnp.minimum(length - start, self.num_tokens), 0)
        return proposal, count
