"""Prompt lookup: propose what most often followed the text's own ending. No model, all on device."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.pace import GRADES
from specjax.types import Context, Draft, ModelOutput, Params, SamplingParams

_BALLOTS = 1 << 12
"""Counts kept for a row. Token ids that are equal modulo their number share a count, which only ever decides between
equal matches. It hangs on nothing else: were it the buffer's width, a longer neighbour would change a row's drafts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGramDrafter:
    """Deterministic drafts from the row's own text (prompt lookup decoding).

    The longest suffix of `prompt_lookup_max` down to `prompt_lookup_min` tokens that occurred before wins; among its
    occurrences those that the most frequent token follows; of these the ones whose match reaches furthest back (up to
    4 tokens, so that it matters where `prompt_lookup_max` is less); and of these the most recent. A continuation that
    runs into the end of the text goes on from its own beginning, so a loop of any period is proposed for the whole
    window. Nothing is proposed where nothing matched.
    """

    num_tokens: int
    prompt_lookup_max: int = 4
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
        tokens, length, matched = jax.vmap(self._lookup)(context.tokens, context.length)
        return Draft(tokens=tokens, length=length, evidence=jnp.clip(matched - 1, 0, GRADES - 1)), None

    def update(self, params: Params, state: None, tokens: jax.Array, positions: jax.Array, output: ModelOutput) -> None:
        """Nothing to learn: the text is in the context."""
        return

    def _lookup(self, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One row: `[N]` tokens and its length -> `[M]` proposal, how many are valid, and how far the match reaches."""
        follow = jnp.arange(tokens.shape[0])  # a candidate match ends just before this column
        matched, running = jnp.zeros_like(follow), follow < length
        for size in range(1, max(self.prompt_lookup_max, GRADES) + 1):
            running &= (follow >= size) & (jnp.roll(tokens, size) == tokens[length - size]) & (length > size)
            matched += running
        rank = jnp.minimum(matched, self.prompt_lookup_max)
        best = (rank == rank.max()) & (matched > 0)
        ballots = tokens % _BALLOTS
        votes = jnp.zeros(_BALLOTS, jnp.int32).at[ballots].add(best)[ballots]
        reach = jnp.where(best & (votes == jnp.where(best, votes, 0).max()), matched, 0)
        start = jnp.where(best & (reach == reach.max()), follow, 0).max()
        period = jnp.maximum(length - start, 1)
        proposal = tokens[start + jnp.arange(self.num_tokens) % period]
        found = rank.max() >= self.prompt_lookup_min
        return proposal, jnp.where(found, self.num_tokens, 0), matched[start]
