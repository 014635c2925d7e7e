"""Strategies that put many cases into the rows of one batch: rows are independent, so one program tests them all."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.testing.models import Script
from specjax.types import Context, Draft, Drafter, ModelOutput, Params, SamplingParams, Verdict
from specjax.verify import Block, ExactMatch, Greedy, Rejection


@dataclasses.dataclass(frozen=True)
class EachRow:
    """Row r is judged by rule r modulo their number; batches hold a multiple of it."""

    rules: tuple[Any, ...] = (Greedy(), ExactMatch(), Rejection(), Block())

    def draft_keys(self, keys: jax.Array, start: jax.Array, num_tokens: int) -> jax.Array:
        """The keys of the row's own rule."""
        return self._deal(lambda rule, *data: rule.draft_keys(*data, num_tokens), keys, start)

    def __call__(self, keys: jax.Array, start: jax.Array, draft: Draft, log_probs: jax.Array) -> Verdict:
        """The verdict of the row's own rule."""
        return self._deal(lambda rule, *data: rule(*data), keys, start, draft, log_probs)

    def _deal(self, judge: Callable[..., Any], *data: Any) -> Any:
        """Hands each rule its rows of the data, and puts the answers back in order."""
        count, batch = len(self.rules), len(jax.tree.leaves(data)[0])
        if batch % count:
            raise ValueError(f"expected a multiple of {count} rows, one of each rule, got {batch}")
        hands = [jax.tree.map(lambda x, first=first: _every(x, first, count), data) for first in range(count)]
        answers = [judge(rule, *hand) for rule, hand in zip(self.rules, hands, strict=True)]
        return jax.tree.map(lambda *parts: _interleaved(parts), *answers)


def _every(x: jax.Array, first: int, step: int) -> jax.Array:
    """Rows `first`, `first + step`, ...; keys by a gather, since JAX's key-reuse check takes a slice for a use."""
    return x[np.arange(first, len(x), step)] if _are_keys(x) else x[first::step]


def _interleaved(parts: Sequence[jax.Array]) -> jax.Array:
    """The opposite of `_every`."""
    if _are_keys(parts[0]):
        return jnp.concatenate(parts)[np.arange(len(parts) * len(parts[0])).reshape(len(parts), -1).T.ravel()]
    return jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])


def _are_keys(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@dataclasses.dataclass(frozen=True)
class Limited:
    """Another drafter whose row r proposes `Params.draft["limit"][r]` tokens at most: each row has a K of its own."""

    drafter: Drafter

    @property
    def num_tokens(self) -> int:
        """The widest window."""
        return self.drafter.num_tokens

    def init(self, params: Params, batch_size: int, capacity: int) -> Any:
        """The other's."""
        return self.drafter.init(_inner(params), batch_size, capacity)

    def draft(
        self, params: Params, keys: jax.Array, state: Any, context: Context, sampling: SamplingParams, cache: Any
    ) -> tuple[Draft, Any]:
        """The other's draft, cut."""
        draft, state = self.drafter.draft(_inner(params), keys, state, context, sampling, cache)
        return dataclasses.replace(draft, length=jnp.minimum(draft.length, params.draft["limit"])), state

    def update(self, params: Params, state: Any, tokens: jax.Array, positions: jax.Array, output: ModelOutput) -> Any:
        """The other's."""
        return self.drafter.update(_inner(params), state, tokens, positions, output)


def limited_params(params: Params, limit: Any) -> Params:
    """The params of a `Limited` drafter: the other's, and each row's `limit` `[B]`."""
    return dataclasses.replace(params, draft={"draft": params.draft, "limit": jnp.asarray(limit, jnp.int32)})


def _inner(params: Params) -> Params:
    return dataclasses.replace(params, draft=params.draft["draft"])


def take_rows(params: Params, index: Any) -> Params:
    """Params for rows `index` of a batch: what `Script` and `Limited` hold for each row follows its row."""
    return dataclasses.replace(params, draft=_take(params.draft, index))


def _take(draft: Any, index: Any) -> Any:
    if isinstance(draft, Script):
        return jax.tree.map(lambda x: x[index], draft)
    if isinstance(draft, dict) and set(draft) == {"draft", "limit"}:
        return {"draft": _take(draft["draft"], index), "limit": draft["limit"][index]}
    return draft
