"""Simulated acceptance: what the system would do with a drafter that is right so often. Its texts mean nothing.

A coin, and not the target, decides what is kept, so this is **not lossless**. It lies apart from the verifiers, no
name on a command line leads to it but `scripts/benchmark.py --synthetic-acceptance`, and every output says so.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.jobs.decoder import Decoder
from specjax.sampling import Role, categorical, window_key, window_keys
from specjax.types import Context, Draft, Drafter, ModelOutput, Params, SamplingParams, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticDrafter:
    """Another drafter at its own cost, its windows always full: what it lacks is filled with the pending token."""

    drafter: Drafter

    @property
    def num_tokens(self) -> int:
        """The other drafter's window."""
        return self.drafter.num_tokens

    def init(self, params: Params, batch_size: int, capacity: int) -> Any:
        """The other drafter's state."""
        return self.drafter.init(params, batch_size, capacity)

    def draft(
        self, params: Params, keys: jax.Array, state: Any, context: Context, sampling: SamplingParams, cache: Any
    ) -> tuple[Draft, Any]:
        """The other drafter's draft as a deterministic proposal, filled up."""
        draft, state = self.drafter.draft(params, keys, state, context, sampling, cache)
        pending = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        proposed = jnp.arange(self.num_tokens) < draft.length[:, None]
        full = jnp.full_like(draft.length, self.num_tokens)
        return Draft(tokens=jnp.where(proposed, draft.tokens, pending), length=full), state

    def update(self, params: Params, state: Any, tokens: jax.Array, positions: jax.Array, output: ModelOutput) -> Any:
        """The other drafter learns as ever."""
        return self.drafter.update(params, state, tokens, positions, output)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticVerifier:
    """Keeps each drafted token with chance `rate`, up to the first that fails; the token behind is the target's."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"expected a synthetic acceptance in 0..1, got {self.rate}")

    def draft_keys(self, keys: jax.Array, start: jax.Array, num_tokens: int) -> jax.Array:
        """Keys `[B, num_tokens]` of the drafter's draws."""
        return window_keys(keys, start, num_tokens, Role.DRAFT)

    def __call__(self, keys: jax.Array, start: jax.Array, draft: Draft, log_probs: jax.Array) -> Verdict:
        """Judges a draft without looking at it. See `Verifier.__call__`."""
        window = draft.tokens.shape[1]
        coins = window_keys(keys, start, window, Role.ACCEPT)
        passed = jax.vmap(jax.vmap(jax.random.uniform))(coins) < self.rate
        passed &= jnp.arange(window) < draft.length[:, None]
        num_accepted = jnp.cumprod(passed.astype(jnp.int32), axis=1).sum(axis=1)
        law = jnp.take_along_axis(log_probs, num_accepted[:, None, None], axis=1)[:, 0]
        final = categorical(window_key(keys, start, num_accepted, jnp.full_like(num_accepted, Role.BONUS)), law)
        at_end = jnp.arange(window + 1) == num_accepted[:, None]
        tokens = jnp.where(at_end, final[:, None], jnp.pad(draft.tokens, ((0, 0), (0, 1))))
        return Verdict(tokens=tokens, num_accepted=num_accepted)


def with_synthetic_acceptance(decoder: Decoder, rate: float) -> Decoder:
    """The decoder with windows always full and coins for verdicts, which no end of text cuts short."""
    config = dataclasses.replace(
        decoder.config,
        drafter=SyntheticDrafter(drafter=decoder.config.drafter),
        verifier=SyntheticVerifier(rate=rate),
    )
    return dataclasses.replace(decoder, config=config, sampling=dataclasses.replace(decoder.sampling, ignore_eos=True))
