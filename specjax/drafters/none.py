"""No drafter: plain autoregressive decoding through the same step."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.types import Context, Draft, ModelOutput, Params, SamplingParams


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """Proposes nothing; each step then is one plain step."""

    @property
    def num_tokens(self) -> int:
        """An empty window."""
        return 0

    def init(self, params: Params, batch_size: int, capacity: int) -> None:
        """No state."""
        return

    def draft(
        self, params: Params, keys: jax.Array, state: None, context: Context, sampling: SamplingParams, cache: object
    ) -> tuple[Draft, None]:
        """An empty window for every row."""
        empty = jnp.zeros((*context.length.shape, 0), jnp.int32)
        return Draft(tokens=empty, length=jnp.zeros_like(context.length)), None

    def update(self, params: Params, state: None, tokens: jax.Array, positions: jax.Array, output: ModelOutput) -> None:
        """Nothing to learn."""
        return
