"""Checks of a drafter with a target of any vocabulary, by where each token falls in its law (`places`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.decode import DecodeConfig
from specjax.report.goodness_of_fit import combined, places, uniformity
from specjax.sampling import law
from specjax.testing import report
from specjax.testing.compiling import compiled
from specjax.testing.report import Finding
from specjax.types import Params

Data = tuple[Any, ...]
"""Prompts `[B, P]`, their lengths `[B]` and the rows' `SamplingParams`."""


def check_drafts(
    name: str, config: DecodeConfig, params: Params, data: Data, rows: int, key: jax.Array
) -> Iterator[Finding]:
    """Drafted tokens follow the laws that are reported with them, at each place of the window.

    A length that depends on a token's own draw, or a law saved before the last transform, shows here with fewer rows
    than in the output. Deterministic drafts report no laws: there is nothing to find. Sampled ones that are all empty
    fail: nothing was seen of them.

    Args:
      name: of the case.
      config: a decoder.
      params: its weights.
      data: prompts, lengths and parameters of B rows.
      rows: how many first drafts to draw, at least.
      key: typed key.
    """

    def first_drafts(params: Params, key: jax.Array, *data: Any) -> tuple[jax.Array | None, jax.Array]:
        state = decode.prefill(params, key, *data, config=config, max_new_tokens=config.drafter.num_tokens + 1)
        keys = config.verifier.draft_keys(state.keys, state.context.length, config.drafter.num_tokens)
        draft, _ = config.drafter.draft(params, keys, state.draft_state, state.context, data[-1], state.cache)
        if draft.log_probs is None:
            return None, draft.length
        return places(_draws(key, draft.tokens.shape), draft.tokens, draft.log_probs), draft.length

    found, length = _collect(first_drafts, params, data, rows, key)
    if found is not None:
        inside = np.arange(found.shape[1]) < length[:, None]
        if inside.any():
            yield _uniform("drafts", name, found, inside)
        else:
            yield report.drafts(f"{name}, first drafts", 0, 0)


def check_output(
    name: str, config: DecodeConfig, params: Params, data: Data, rows: int, key: jax.Array, rules: Sequence[str] = ("",)
) -> Iterator[Finding]:
    """Output tokens follow the target's laws along the text that they are part of, one finding for each rule.

    And there were drafts, or nothing was verified.

    Args:
      name: of the case.
      config: a decoder.
      params: its weights.
      data: prompts, lengths and parameters of B rows; without stop ids, or the lengths of texts would tell.
      rows: how many texts to draw, at least.
      key: typed key.
      rules: names of the rules that judge row r modulo their number.
    """
    new = config.drafter.num_tokens + 2

    def texts(params: Params, key: jax.Array, *data: Any) -> tuple[jax.Array, ...]:
        state = decode.prefill(params, key, *data, config=config, max_new_tokens=new)
        state = decode.decode_steps(params, state, data[-1], config=config)
        context, draws = state.context, _draws(key, (len(state.context.length), new))
        found = _text_places(config, params, context, data[-1], draws)
        return found, context.length - context.prompt_length, state.stats.drafted, state.stats.accepted

    found, length, drafted, accepted = _collect(texts, params, data, rows, key)
    for index, rule in enumerate(rules):
        own = found[index :: len(rules)], length[index :: len(rules)]
        yield _uniform("output", f"{name}, {rule}".removesuffix(", "), own[0], np.arange(new) < own[1][:, None])
    yield report.drafts(name, int(drafted.sum()), int(accepted.sum()))


def _text_places(config: DecodeConfig, params: Params, context: Any, sampling: Any, draws: jax.Array) -> jax.Array:
    """`[B, new]`, of each output token in the law that one forward pass over the whole text gives."""
    tokens = context.tokens
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    positions = jnp.where(columns < context.length[:, None], columns, -1)
    cache = config.target.init_cache(params.target, *tokens.shape)
    output, _ = config.target.apply(params.target, tokens, positions, cache)
    log_probs, _ = law(output.logits, sampling, context, columns + 1)
    own = context.prompt_length[:, None] + jnp.arange(draws.shape[1])
    laws = jnp.take_along_axis(log_probs, (own - 1)[..., None], axis=1)
    return places(draws, jnp.take_along_axis(tokens, own, axis=1), laws)


def _draws(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(key, 2**31 - 1), shape)


def _collect(function: Callable[..., Any], params: Params, data: Data, rows: int, key: jax.Array) -> Any:
    """Calls a compiled function under as many keys as it takes, and joins what it returns."""
    call, size = compiled(function, level=1), len(data[0])
    parts = [
        jax.tree.map(np.asarray, call(params, jax.random.fold_in(key, index), *data))
        for index in range(-(-rows // size))
    ]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def _uniform(check: str, name: str, found: np.ndarray, inside: np.ndarray) -> Finding:
    """One finding about places `[N, T]`, column by column and together."""
    values = {f"token {index + 1}": found[inside[:, index], index] for index in range(found.shape[1])}
    values = {place: uniformity(own) for place, own in values.items() if len(own) >= _LEAST}
    values["all tokens"] = uniformity(found[inside])
    worst = min(values, key=values.__getitem__)
    return report.p_value(check, name, combined(values.values()), int(inside.sum()), worst)


_LEAST = 1000
"""Tokens that make a sample."""


def checked_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `sampling_params` for checks of the law: temperature 1 unless they say otherwise.

    Raises:
      ValueError: they limit or stop texts, whose lengths would then tell something about their tokens.
    """
    refused = {"stop_token_ids", "min_tokens", "max_tokens"} & set(sampling)
    if refused:
        raise ValueError(f"expected sampling options that leave lengths alone, got {sorted(refused)}")
    return {"temperature": 1.0} | dict(sampling)
