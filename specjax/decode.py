"""Speculative decoding as one straight line: prefill -> [draft -> verify -> commit]* -> output.

Everything here is un-jitted and pure; `specjax.compiled` holds the jitted versions.

    state = prefill(params, keys, prompt, prompt_length, sampling)
    while any row runs:
        draft   <- drafter.draft          K tokens, fixed window, padded
        verdict <- verify                 ONE target call over [pending, draft], then the acceptance rule
        state   <- commit                 append, roll caches back, stop conditions, counters

The last committed token of a live row is *pending*: it is in no cache yet, and the next target call reads it. So
`cache.length == context.length - 1` after every step, and the first step is like any other.
"""

import dataclasses
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from specjax.drafters.none import NoDrafter
from specjax.loops import run_if
from specjax.pace import Pace, best_window, init_pace, update_pace
from specjax.sampling import law
from specjax.shares import by_rows
from specjax.stats import count_step, init_stats
from specjax.types import (
    Context,
    DecodeState,
    Draft,
    Drafter,
    FinishReason,
    LanguageModel,
    LogProbs,
    Output,
    Params,
    SamplingParams,
    Verdict,
    Verifier,
)
from specjax.verify import ExactMatch
from specjax.window import check_draft, leading, narrow, token_log_probs, widen, with_pending, write


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """What a compiled decoder is made of. Static: equal configs share one program."""

    target: LanguageModel
    drafter: Drafter = dataclasses.field(default_factory=NoDrafter)
    verifier: Verifier = dataclasses.field(default_factory=ExactMatch)
    pad_id: int = 0
    """Fills the token buffer behind each row's text."""
    prefill_chunk: int = 256
    """Prompt tokens per target call while prefilling."""
    windows: tuple[int, ...] | None = None
    """Window sizes that get a program of their own, ascending, from 0 to K; None means (0, K)."""
    log_probs: bool = False
    """Whether `Output.log_probs` is collected."""

    def __post_init__(self) -> None:
        windows, most = self.window_sizes, self.drafter.num_tokens
        if list(windows) != sorted({*windows}) or (windows[:1], windows[-1:]) != ((0,), (most,)):
            raise ValueError(f"expected windows ascending from 0 to num_speculative_tokens = {most}, got {windows}")
        if self.prefill_chunk < 1:
            raise ValueError(f"expected prefill_chunk >= 1, got {self.prefill_chunk}")

    @property
    def window_sizes(self) -> tuple[int, ...]:
        """The static windows, None resolved."""
        return self.windows if self.windows is not None else tuple(sorted({0, self.drafter.num_tokens}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Judged:
    """A verified window, padded to the widest: what the branches of a step have in common."""

    tokens: jax.Array
    """`[B, M + 1]` int32."""
    num_accepted: jax.Array
    """`[B]` int32, drafted tokens that passed."""
    num_emitted: jax.Array
    """`[B]` int32, tokens to append: up to the first stop id, the row's limit, or the first broken law."""
    stopped: jax.Array
    """`[B]` bool, the last of them is a stop id."""
    broken: jax.Array
    """`[B]` bool, the law after the accepted tokens could not be sampled."""
    log_probs: LogProbs | None


jax.tree_util.register_dataclass(_Judged, [field.name for field in dataclasses.fields(_Judged)], [])


def generate(
    params: Params,
    key: jax.Array,
    prompt: jax.Array,
    prompt_length: jax.Array,
    sampling: SamplingParams,
    pace: Pace | None = None,
    *,
    config: DecodeConfig,
    max_new_tokens: int,
) -> Output:
    """Generates up to `max_new_tokens` tokens a row, with the target's exact law.

    Args:
      params: weights of the target and, where it has any, of the drafter.
      key: a typed key, from which row r gets `fold_in(key, r)`, or `[B]` typed keys, one per row and no two alike.
      prompt: `[B, P]` int32, right-padded.
      prompt_length: `[B]` int32, at least 1 (0 marks a padding row, which yields nothing).
      sampling: the rows' parameters; `sampling.max_tokens` may stop a row earlier than `max_new_tokens`.
      pace: costs by which rows decide together, at each step, how many drafted tokens pay; None always speculates.
        Under `shard_map` and `pmap` those of a device group do. Tokens of `Greedy` and `ExactMatch` do not hang on it;
        those that `Rejection` and `Block` sample do, though their law does not.
      config: models and rules.
      max_new_tokens: columns of the output.

    Returns:
      Tokens, lengths, finish reasons and counters of each row.

    References:
      arXiv 2211.17192, arXiv 2302.01318.
    """
    state = prefill(params, key, prompt, prompt_length, sampling, pace, config=config, max_new_tokens=max_new_tokens)
    state = decode_steps(params, state, sampling, config=config)
    return output(state, max_new_tokens=max_new_tokens)


def autoregressive(
    params: Params,
    key: jax.Array,
    prompt: jax.Array,
    prompt_length: jax.Array,
    sampling: SamplingParams,
    *,
    config: DecodeConfig,
    max_new_tokens: int,
) -> Output:
    """`generate` without speculation: the oracle of every test and the baseline of every benchmark.

    Noise is keyed by absolute position, as under `ExactMatch`.
    """
    plain = without_speculation(config)
    return generate(params, key, prompt, prompt_length, sampling, config=plain, max_new_tokens=max_new_tokens)


def without_speculation(config: DecodeConfig) -> DecodeConfig:
    """The same target, decoded plainly with noise keyed by position."""
    return dataclasses.replace(config, drafter=NoDrafter(), verifier=ExactMatch(), windows=None)


def num_running(state: DecodeState, row_axis: str | None = None) -> jax.Array:
    """How many rows have yet to finish, on all devices of the mesh axis that rows are dealt to, if there is one."""
    count = (state.finish_reason == FinishReason.RUNNING).sum(dtype=jnp.int32)
    return count if row_axis is None else lax.psum(count, row_axis)


def prefill(
    params: Params,
    key: jax.Array,
    prompt: jax.Array,
    prompt_length: jax.Array,
    sampling: SamplingParams,
    pace: Pace | None = None,
    *,
    config: DecodeConfig,
    max_new_tokens: int,
) -> DecodeState:
    """Reads all of each prompt but its last token, which stays pending, in chunks of `config.prefill_chunk`.

    The arguments are those of `generate`.
    """
    batch, width = prompt.shape
    chunk = min(config.prefill_chunk, width)
    padded = -(-width // chunk) * chunk
    capacity = max(width + max_new_tokens + config.drafter.num_tokens + 1, padded)
    prompt_length = prompt_length.astype(jnp.int32)
    prompt = jnp.pad(prompt, ((0, 0), (0, capacity - width)))
    prompt = jnp.where(jnp.arange(capacity) < prompt_length[:, None], prompt, config.pad_id).astype(jnp.int32)
    cache = config.target.init_cache(params.target, batch, capacity)
    draft_state = config.drafter.init(params, batch, capacity)

    def read(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        cache, draft_state = carry
        columns = index * chunk + jnp.arange(chunk, dtype=jnp.int32)
        tokens = lax.dynamic_slice_in_dim(prompt, index * chunk, chunk, axis=1)
        positions = jnp.where(columns < prompt_length[:, None] - 1, columns, -1)
        seen, cache = config.target.apply(params.target, tokens, positions, cache)
        return cache, config.drafter.update(params, draft_state, tokens, positions, seen)

    chunks = -(-jnp.maximum(prompt_length.max() - 1, 0) // chunk)
    cache, draft_state = lax.fori_loop(0, chunks, read, (cache, draft_state))
    empty = (prompt_length < 1) | (jnp.minimum(sampling.max_tokens, max_new_tokens) < 1)
    logs = _no_log_probs((batch, capacity))
    return DecodeState(
        context=Context(tokens=prompt, length=prompt_length, prompt_length=prompt_length.copy()),
        limit=prompt_length + jnp.minimum(sampling.max_tokens, max_new_tokens),
        finish_reason=jnp.where(empty, FinishReason.LENGTH, FinishReason.RUNNING).astype(jnp.int32),
        keys=row_keys(key, batch),
        cache=dataclasses.replace(cache, length=jnp.maximum(prompt_length - 1, 0)),
        draft_state=draft_state,
        pace=init_pace(batch, len(config.window_sizes)) if pace is None else pace,
        stats=init_stats(batch, config.drafter.num_tokens),
        log_probs=logs if config.log_probs else None,
    )


def row_keys(key: jax.Array, batch: int) -> jax.Array:
    """`[B]` row keys: `fold_in(key, r)`, or `key` itself if it is one per row already."""
    return key if key.ndim else jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(batch))


def decode_steps(
    params: Params,
    state: DecodeState,
    sampling: SamplingParams,
    num_steps: jax.Array | int = 2**31 - 1,
    least_running: jax.Array | int = 1,
    *,
    config: DecodeConfig,
    row_axis: str | None = None,
) -> DecodeState:
    """Repeats `decode_step` until `num_running` is below `least_running` or `num_steps` have passed, both traced."""

    def proceed(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        return (carry[0] < num_steps) & (num_running(carry[1], row_axis) >= least_running)

    def step(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        return carry[0] + 1, decode_step(params, carry[1], sampling, config=config)

    return lax.while_loop(proceed, step, (jnp.int32(0), state))[1]


def decode_step(params: Params, state: DecodeState, sampling: SamplingParams, *, config: DecodeConfig) -> DecodeState:
    """One round of draft, verify and commit for every live row; done rows stay as they are."""
    state, draft = draft_step(params, state, sampling, config=config)
    return verify_step(params, state, draft, sampling, config=config)


def draft_step(
    params: Params, state: DecodeState, sampling: SamplingParams, *, config: DecodeConfig
) -> tuple[DecodeState, Draft]:
    """The first half of `decode_step`: the draft, and the state with what the drafter had to write for it."""
    draft, draft_state = _draft(params, state, sampling, config)
    return dataclasses.replace(state, draft_state=draft_state), draft


def verify_step(
    params: Params, state: DecodeState, draft: Draft, sampling: SamplingParams, *, config: DecodeConfig
) -> DecodeState:
    """The second half of `decode_step`: one target call, the verdict on the draft, and the commit."""
    window = jnp.searchsorted(jnp.asarray(config.window_sizes), draft.length.max())
    judged = _nothing_judged(len(draft.length), config)
    for index, width in enumerate(config.window_sizes):
        verify = partial(_verify, params, draft=draft, sampling=sampling, config=config, width=width)
        judged, state = run_if(window == index, verify, (judged, state))
    return _commit(state, draft, judged)


def _nothing_judged(batch: int, config: DecodeConfig) -> _Judged:
    columns, count = (batch, config.drafter.num_tokens + 1), jnp.zeros(batch, jnp.int32)
    return _Judged(
        tokens=jnp.zeros(columns, jnp.int32),
        num_accepted=count,
        num_emitted=count,
        stopped=count > 0,
        broken=count > 0,
        log_probs=_no_log_probs(columns) if config.log_probs else None,
    )


def _no_log_probs(shape: tuple[int, int]) -> LogProbs:
    return LogProbs(raw=jnp.zeros(shape, jnp.float32), processed=jnp.zeros(shape, jnp.float32))


def _draft(params: Params, state: DecodeState, sampling: SamplingParams, config: DecodeConfig) -> tuple[Draft, Any]:
    """Asks for drafts, if any could pay, and cuts each to what its row and the best window can use."""
    context, drafter, sizes = state.context, config.drafter, config.window_sizes
    text_length = jnp.where(state.finish_reason == FinishReason.RUNNING, context.length, 0)
    room = jnp.where(text_length > 0, jnp.clip(state.limit - text_length - 1, 0, drafter.num_tokens), 0)
    wanted = jnp.where(best_window(state.pace, text_length, room, None, sizes) > 0, room, 0)

    def propose(carry: tuple[Any, Any]) -> tuple[Draft, Any]:
        keys = config.verifier.draft_keys(state.keys, context.length, drafter.num_tokens)
        draft, draft_state = drafter.draft(params, keys, carry[1], context, sampling, state.cache)
        check_draft(draft, (*context.length.shape, drafter.num_tokens), config.target.vocab_size)
        return draft, draft_state

    shapes, _ = jax.eval_shape(propose, (None, state.draft_state))
    nothing = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    draft, draft_state = run_if((wanted > 0).any(), propose, (nothing, state.draft_state))
    length = jnp.clip(draft.length, 0, wanted)
    promised = length if draft.log_probs is None else wanted  # a sampled draft's own length may hang on its tokens
    length = jnp.minimum(length, best_window(state.pace, text_length, promised, draft.evidence, sizes))
    return dataclasses.replace(draft, length=length), draft_state


def _verify(
    params: Params,
    carry: tuple[_Judged, DecodeState],
    *,
    draft: Draft,
    sampling: SamplingParams,
    config: DecodeConfig,
    width: int,
) -> tuple[_Judged, DecodeState]:
    """One target call over the pending token and `width` drafted ones, and the verdict on them."""
    draft, state = narrow(draft, width), carry[1]
    context, live = state.context, state.finish_reason == FinishReason.RUNNING
    offsets = jnp.arange(width + 1)
    tokens, positions = with_pending(state.context, draft, live)
    seen, cache = config.target.apply(params.target, tokens, positions, state.cache)
    text = dataclasses.replace(context, tokens=write(context.tokens, context.length, draft.tokens, draft.length))
    verdict, num_healthy, logs = by_rows(partial(_judge, config), seen, state.keys, text, draft, sampling)
    num_decided = jnp.minimum(verdict.num_accepted + 1, num_healthy)
    num_emitted, stopped = _emission(state, verdict.tokens, jnp.where(live, num_decided, 0), sampling)
    kept = jnp.where(offsets < num_emitted[:, None], positions, -1)
    draft_state = config.drafter.update(params, state.draft_state, tokens, kept, seen)
    judged = _Judged(
        tokens=widen(verdict.tokens, config.drafter.num_tokens),
        num_accepted=verdict.num_accepted,
        num_emitted=num_emitted,
        stopped=stopped,
        broken=num_decided <= verdict.num_accepted,
        log_probs=jax.tree.map(partial(widen, num_tokens=config.drafter.num_tokens), logs),
    )
    return judged, dataclasses.replace(state, cache=cache, draft_state=draft_state)


def _judge(
    config: DecodeConfig, logits: jax.Array, keys: jax.Array, text: Context, draft: Draft, sampling: SamplingParams
) -> tuple[Verdict, jax.Array, LogProbs | None]:
    """The verdict on drafts, which `text` has behind its length; leading positions `[B]` that have a law; and logs."""
    chex.assert_shape(logits, (len(keys), draft.tokens.shape[1] + 1, config.target.vocab_size))
    log_probs, healthy = law(logits, sampling, text, text.length[:, None] + jnp.arange(logits.shape[1]))
    num_healthy = leading(healthy)
    draft = dataclasses.replace(draft, length=jnp.minimum(draft.length, num_healthy))
    verdict = config.verifier(keys, text.length, draft, log_probs)
    chex.assert_shape([verdict.tokens, verdict.num_accepted], [logits.shape[:2], keys.shape])
    return verdict, num_healthy, token_log_probs(logits, log_probs, verdict) if config.log_probs else None


def _emission(
    state: DecodeState, tokens: jax.Array, num_decided: jax.Array, sampling: SamplingParams
) -> tuple[jax.Array, jax.Array]:
    """How many decided tokens are emitted `[B]`, up to the row's limit and its first stop id; and if that came."""
    decided = jnp.minimum(num_decided, state.limit - state.context.length)
    stops = (tokens[..., None] == sampling.stop_token_ids[:, None]).any(axis=-1)
    stops &= jnp.arange(tokens.shape[1]) < decided[:, None]
    stopped = stops.any(axis=1)
    return jnp.where(stopped, leading(~stops) + 1, decided), stopped


def _commit(state: DecodeState, draft: Draft, judged: _Judged) -> DecodeState:
    """Appends what was emitted, rolls the cache back to it, ends rows and counts."""
    context, live = state.context, state.finish_reason == FinishReason.RUNNING
    emitted = judged.num_emitted
    length = context.length + emitted
    reason = jnp.where(judged.broken, FinishReason.NAN, FinishReason.RUNNING)
    reason = jnp.where(length >= state.limit, FinishReason.LENGTH, reason)
    reason = jnp.where(judged.stopped, FinishReason.STOP, reason)
    logs = state.log_probs
    if logs is not None and judged.log_probs is not None:
        logs = jax.tree.map(lambda old, new: write(old, context.length, new, emitted), logs, judged.log_probs)
    accepted = jnp.minimum(judged.num_accepted, emitted)
    return dataclasses.replace(
        state,
        context=dataclasses.replace(
            context, tokens=write(context.tokens, context.length, judged.tokens, emitted), length=length
        ),
        finish_reason=jnp.where(live, reason, state.finish_reason).astype(jnp.int32),
        cache=dataclasses.replace(state.cache, length=jnp.where(live, length - 1, state.cache.length)),
        pace=update_pace(state.pace, live, draft, judged.num_accepted),
        stats=count_step(state.stats, live, draft.length, accepted, emitted),
        log_probs=logs,
    )


def output(state: DecodeState, *, max_new_tokens: int) -> Output:
    """Each row's output, moved to column 0: `[B, max_new_tokens]`."""
    context = state.context
    columns = context.prompt_length[:, None] + jnp.arange(max_new_tokens)

    def take(buffer: jax.Array) -> jax.Array:
        return jnp.take_along_axis(buffer, columns, axis=1)

    return Output(
        tokens=take(context.tokens),
        length=context.length - context.prompt_length,
        finish_reason=state.finish_reason,
        stats=state.stats,
        log_probs=None if state.log_probs is None else jax.tree.map(take, state.log_probs),
    )
