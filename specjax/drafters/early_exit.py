"""The target's own first layers as drafter (LayerSkip, arXiv 2404.16710)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.drafters.chain import draft_chain
from specjax.models.transformer import Transformer
from specjax.types import Context, Draft, KVCache, ModelOutput, Params, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyExitDrafter:
    """First `exit_layer` layers, then the target's final norm and head. Reads the target's cache and never writes it.

    Each drafted token runs the whole window so far through the early layers: for a few tokens that costs what one
    costs (the weights' bytes), and it leaves no state to copy or roll back.
    """

    target: Transformer
    exit_layer: int
    num_tokens: int

    def __post_init__(self) -> None:
        layers = self.target.config.num_layers
        if not 1 <= self.exit_layer <= layers or self.num_tokens < 1:
            raise ValueError(
                f"expected exit_layer in 1..{layers} and num_tokens >= 1, got {self.exit_layer} and {self.num_tokens}"
            )

    def init(self, params: Params, batch_size: int, capacity: int) -> None:
        """No state: the target's cache holds the early layers' keys and values."""
        return

    def draft(
        self, params: Params, keys: jax.Array, state: None, context: Context, sampling: SamplingParams, cache: KVCache
    ) -> tuple[Draft, None]:
        """Samples the window from the early exit's law. See `Drafter.draft`.

        Raises:
          ValueError: the cache is that of another target.
        """
        layers = self.target.config.num_layers
        if not isinstance(cache, KVCache) or len(cache.keys) != layers:
            raise ValueError(
                f"expected the cache of the drafter's own target ({layers} layers), got another: give DecodeConfig the "
                "same target"
            )
        offsets = jnp.arange(self.num_tokens, dtype=jnp.int32)
        first = context.length[:, None] - 1  # -1 in an empty row, which has no use for a draft
        pending = jnp.take_along_axis(context.tokens, jnp.maximum(first, 0), axis=1)

        def forward(state: None, window: jax.Array, offset: jax.Array, last: jax.Array) -> tuple[ModelOutput, None]:
            tokens = jnp.concatenate([pending, window[:, :-1]], axis=1)
            positions = jnp.where((offsets <= offset) & (first >= 0), first + offsets, -1)
            hidden, _ = self.target.hidden_states(params.target, tokens, positions, cache, num_layers=self.exit_layer)
            return self.target.unembed(params.target, hidden[-1][:, offset, None]), None

        width, axis = self.target.vocab_size, self.target.axis
        return draft_chain(forward, keys, state, context, sampling, vocab_size=width, axis=axis)

    def update(self, params: Params, state: None, tokens: jax.Array, positions: jax.Array, output: ModelOutput) -> None:
        """Nothing to do: the target has just rewritten those slots."""
        return
