"""Known ways to break losslessness, each a small patch of specjax that some check must reject."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from specjax import cache, decode, verify
from specjax.cache import scatter
from specjax.drafters.model import ModelDrafter
from specjax.models import attention, transformer
from specjax.sampling import Role, law, window_key
from specjax.types import Draft
from specjax.verify import Block, Rejection

Patch = tuple[Any, str, Callable[[Any], Any]]
"""Where: an owner and the name of its attribute; and what takes the place of the original, made from it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutation:
    """A fault and the check that should see it."""

    name: str
    expected: str
    patches: tuple[Patch, ...]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Breaks specjax inside the block. Programs that were compiled before keep running as they are."""
        with contextlib.ExitStack() as stack:
            for owner, name, make in self.patches:
                original = getattr(owner, name)
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, make(original))
            yield


def _value(replacement: Any) -> Callable[[Any], Any]:
    return lambda original: replacement


# ---- Acceptance rules ----


def _uncapped_last_ratio(original: Any) -> Any:
    def chances(self: Block, draft: Draft, log_probs: jax.Array) -> jax.Array:
        p, q = verify._at_drafts(draft, log_probs)
        product = jnp.where(q > 0, p / jnp.where(q > 0, q, 1), 0).prod(axis=1)
        return original(self, draft, log_probs).at[:, -1].set(jnp.minimum(product, 1))

    return chances


def _threshold(original: Any) -> Any:
    return lambda p, q: (original(p, q) > 0.9).astype(p.dtype)


def _lenient(original: Any) -> Any:
    return lambda p, q: jnp.minimum(original(p, q) / 0.9, 1)


def _softmax(p: jax.Array, q: jax.Array, scale: Any = 1.0) -> jax.Array:
    return jax.nn.softmax(jnp.maximum(scale * p - q, 0), axis=-1)


def _next_row(original: Any) -> Any:
    def leftover(self: Any, draft: Draft, log_probs: jax.Array, num_accepted: jax.Array) -> jax.Array:
        return original(self, draft, jnp.roll(log_probs, -1, axis=1), num_accepted)

    return leftover


def _bonus_of_the_row_before(original: Any) -> Any:
    def toss(rule: Any, keys: Any, start: Any, draft: Draft, log_probs: jax.Array) -> Any:
        return original(rule, keys, start, draft, log_probs.at[:, -1].set(log_probs[:, -2]))

    return toss


# ---- Keys ----


def _draft_by_coin(self: Any, keys: jax.Array, start: jax.Array, num_tokens: int) -> jax.Array:
    return verify.window_keys(keys, start, num_tokens, Role.ACCEPT)


def _residual_by(role: Role) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def other_key(keys: jax.Array, start: jax.Array, offset: jax.Array, own: jax.Array) -> jax.Array:
            return original(keys, start, offset, jnp.where(own == Role.RESIDUAL, role, own))

        return other_key

    return make


def _keys_by_position(original: Any) -> Any:
    def window_keys(keys: jax.Array, start: jax.Array, num_tokens: int, role: Role) -> jax.Array:
        own, zeros = jnp.full_like(start, role), jnp.zeros_like(start)
        columns = [window_key(keys, zeros, start + offset, own) for offset in range(num_tokens)]
        return jnp.stack(columns, axis=1) if columns else original(keys, start, 0, role)

    return window_keys


def _key_by_position(original: Any) -> Any:
    return lambda keys, start, offset, role: original(keys, jnp.zeros_like(start), start + offset, role)


# ---- Drafts ----


def _reports(**changes: float) -> Callable[[Any], Any]:
    """Drafts are drawn as before, but the law that is reported lacks a transform."""

    def make(original: Any) -> Any:
        def draft(
            self: ModelDrafter, params: Any, keys: Any, state: Any, context: Any, sampling: Any, cache: Any
        ) -> Any:
            drawn, after = original(self, params, keys, state, context, sampling, cache)
            offsets = jnp.arange(self.num_tokens)
            positions = context.length[:, None] + offsets
            text = context.tokens.at[jnp.arange(len(positions))[:, None], positions].set(drawn.tokens, mode="drop")
            tokens = jnp.take_along_axis(text, positions - 1, axis=1)
            output, _ = self.model.apply(params.draft, tokens, positions - 1, state)
            other = {name: jnp.full_like(getattr(sampling, name), value) for name, value in changes.items()}
            text = dataclasses.replace(context, tokens=text)
            log_probs, _ = law(output.logits, dataclasses.replace(sampling, **other), text, positions)
            return dataclasses.replace(drawn, log_probs=log_probs), after

        return draft

    return make


def _peeking_length(original: Any) -> Any:
    def draft(self: Any, *data: Any) -> Any:
        drawn, after = original(self, *data)
        chosen = jnp.take_along_axis(drawn.log_probs, drawn.tokens[..., None], axis=-1)[..., 0]
        sure = jnp.cumprod((chosen > jnp.log(0.3)).astype(jnp.int32), axis=1).sum(axis=1)
        return dataclasses.replace(drawn, length=jnp.minimum(drawn.length, sure)), after

    return draft


# ---- Cache, mask, rows, stop ids, padding ----


def _lost_last_token(original: Any) -> Any:
    def append(kept: Any, entries: Any, positions: jax.Array, hidden: jax.Array) -> Any:
        last = (positions == positions.max(axis=1, keepdims=True)) & (positions.shape[1] > 1)
        return original(kept, entries, jnp.where(last, -1, positions), hidden)

    return append


def _sees_the_next(original: Any) -> Any:
    def visible(positions: jax.Array, slots: jax.Array, end: jax.Array, window: int | None) -> jax.Array:
        return original(jnp.where(positions < 0, positions, positions + 1), slots, end, window)

    return visible


def _row_before(original: Any) -> Any:
    def law_before(*data: Any) -> Any:
        log_probs, healthy = original(*data)
        return jnp.roll(log_probs, 1, axis=1), healthy

    return law_before


def _only_last_stops(original: Any) -> Any:
    def emission(state: Any, tokens: jax.Array, num_decided: jax.Array, sampling: Any) -> tuple[jax.Array, jax.Array]:
        decided = jnp.minimum(num_decided, state.limit - state.context.length)
        last = jnp.take_along_axis(tokens, jnp.maximum(decided - 1, 0)[:, None], axis=1)
        return decided, (last == sampling.stop_token_ids).any(axis=1) & (decided > 0)

    return emission


def _padding_is_written(original: Any) -> Any:
    return lambda buffers, new, positions: scatter(buffers, new, jnp.maximum(positions, 0))


MUTATIONS: tuple[Mutation, ...] = tuple(
    Mutation(name=name, expected=expected, patches=patches)
    for name, expected, patches in (
        ("block: uncapped last ratio", "enumeration", ((Block, "chances", _uncapped_last_ratio),)),
        ("block: first failure instead of last pass", "enumeration", ((Block, "count", _value(Rejection.count)),)),
        ("block: residual without P_tau", "enumeration", ((Block, "leftover", _value(Rejection.leftover)),)),
        ("residual from p", "enumeration", ((verify, "residual", _value(lambda p, q, scale=1.0: p)),)),
        ("softmax of the positive part", "enumeration", ((verify, "residual", _value(_softmax)),)),
        ("accepted where p / q > .9", "enumeration", ((verify, "acceptance", _threshold),)),
        ("coins of .9", "enumeration", ((verify, "acceptance", _lenient),)),
        ("bonus: the law of the row before", "distribution", ((verify, "_toss", _bonus_of_the_row_before),)),
        ("temperature on p but not on q", "drafts", ((ModelDrafter, "draft", _reports(temperature=1.0)),)),
        ("q saved before top-p", "drafts", ((ModelDrafter, "draft", _reports(top_p=1.0)),)),
        (
            "one key for draft and coin",
            "distribution",
            ((Rejection, "draft_keys", _value(_draft_by_coin)), (Block, "draft_keys", _value(_draft_by_coin))),
        ),
        ("one key for coin and residual", "distribution", ((verify, "window_key", _residual_by(Role.ACCEPT)),)),
        ("one key for draft and residual", "distribution", ((verify, "window_key", _residual_by(Role.DRAFT)),)),
        (
            "row after the rejected one",
            "enumeration",
            ((Rejection, "leftover", _next_row), (Block, "leftover", _next_row)),
        ),
        ("a length that peeks at the token", "drafts", ((ModelDrafter, "draft", _peeking_length),)),
        (
            "block: noise keyed by position alone",
            "distribution",
            ((verify, "window_keys", _keys_by_position), (verify, "window_key", _key_by_position)),
        ),
        ("cache: a window's last token is not written", "tokens", ((cache, "append", _lost_last_token),)),
        (
            "mask: the next token is seen",
            "tokens",
            ((attention, "_visible", _sees_the_next), (transformer, "_layer", _value(transformer._run_layer))),
        ),
        ("off by one: the law of the row before", "tokens", ((decode, "law", _row_before),)),
        ("EOS: only a window's last token can stop", "tokens", ((decode, "_emission", _only_last_stops),)),
        (
            "padding: written to slot 0",
            "tokens",
            ((cache, "scatter", _padding_is_written), (cache, "write_slices", _padding_is_written)),
        ),
    )
)
"""The fourteen of `algorithms.md` 4.6, variants apart, and six of our own: bonus, cache, mask, off by one, EOS and
padding."""
