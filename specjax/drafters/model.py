"""A smaller language model as drafter (arXiv 2211.17192, 2302.01318)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafters.chain import draft_chain
from specjax.types import Context, Draft, LanguageModel, ModelOutput, Params, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDrafter:
    """Any `LanguageModel` with the target's tokenizer; its weights are `Params.draft`.

    Its own cache stands for the same text as the target's after every step: `update` runs the committed window
    through it once more, which also fills the slot of a last draft token that was accepted.
    """

    model: LanguageModel
    num_tokens: int
    vocab_size: int
    """The target's width V; the model's may differ by padding, and no id beyond either is proposed."""
    axis: str | None = None
    """Mesh axis that the target is cut over, whether or not the model is: its devices share the draws."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"expected num_tokens >= 1, got {self.num_tokens}; NoDrafter drafts nothing")

    def init(self, params: Params, batch_size: int, capacity: int) -> Any:
        """The model's empty cache."""
        return self.model.init_cache(params.draft, batch_size, capacity)

    def draft(
        self, params: Params, keys: jax.Array, state: Any, context: Context, sampling: SamplingParams, cache: Any
    ) -> tuple[Draft, Any]:
        """Samples the window token by token from the model's law, processed like the target's."""

        def forward(state: Any, window: jax.Array, offset: jax.Array, last: jax.Array) -> tuple[ModelOutput, Any]:
            positions = jnp.where(context.length > 0, context.length - 1 + offset, -1)
            return self.model.apply(params.draft, last[:, None], positions[:, None], state)

        return draft_chain(forward, keys, state, context, sampling, vocab_size=self.vocab_size, axis=self.axis)

    def update(self, params: Params, state: Any, tokens: jax.Array, positions: jax.Array, output: ModelOutput) -> Any:
        """Feeds what the target has committed. See `Drafter.update`."""
        _, state = self.model.apply(params.draft, tokens, positions, state)
        return dataclasses.replace(state, length=jnp.maximum(state.length, positions.max(axis=1) + 1))
