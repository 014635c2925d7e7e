"""Completing prompts: batches of fixed shapes, timed without their compilation, trimmed at stop strings."""

import dataclasses
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax.compiled import bucket, decode_steps, pad_prompts, prefill
from specjax.decode import DecodeConfig, without_speculation
from specjax.io.text import TextStream
from specjax.io.tokenizer import Tokenizer
from specjax.jobs.model import load_model
from specjax.jobs.prompts import Prompt
from specjax.jobs.settings import Sampling, Settings
from specjax.report.metrics import Timeline, cut_stats, cut_timeline, no_stats
from specjax.types import DecodeState, DecodeStats, FinishReason, LogProbs, Params, SamplingParams

ALL_STEPS = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Decoder:
    """Everything that completes prompts: weights, rules and vocabulary."""

    params: Params
    config: DecodeConfig
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    sampling: Sampling


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """What became of one prompt. Ids, log-probabilities, counters and times all end at a stop string."""

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """`stop` (EOS or stop string), `length` or `nan`."""
    stats: DecodeStats
    """The row's counters, on the host."""
    timeline: Timeline
    stepwise: bool
    """Whether each emission of the timeline is one step."""
    log_probs: LogProbs | None
    """`[tokens]` each, if `DecodeConfig.log_probs` asks for them."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Completions that were decoded together."""

    completions: tuple[Completion, ...]
    seconds: float
    """From the start of the prefill to the last token, compilation excluded."""
    compile_time_s: float
    """Tracing, compiling and a first run of these shapes; 0 if they had been seen before."""


def build_decoder(settings: Settings) -> Decoder:
    """Loads what the settings name.

    Raises:
      ValueError: a model that cannot be loaded, or a drafter that does not fit it.
    """
    target = load_model(settings.model, dtype=settings.dtype)
    drafter, draft_params = settings.drafter.build(target, settings.dtype)
    config = DecodeConfig(
        target=target.model, drafter=drafter, verifier=settings.verifier, log_probs=settings.logprobs
    )
    return Decoder(
        params=Params(target=target.params, draft=draft_params),
        config=config,
        tokenizer=target.tokenizer,
        eos_ids=target.eos_ids,
        sampling=settings.sampling,
    )


def plain_decoder(decoder: Decoder) -> Decoder:
    """The same without speculation: the baseline of a comparison."""
    params = Params(target=decoder.params.target)
    return dataclasses.replace(decoder, params=params, config=without_speculation(decoder.config))


def complete(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    *,
    batch_size: int = 1,
    on_text: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Batch]:
    """Completes prompts in order, a batch at a time; each row's tokens depend on its own prompt, id and the seed only.

    Args:
      decoder: what `build_decoder` made.
      prompts: encoded ones.
      batch_size: rows decoded together; a short last batch is filled up with rows that do nothing.
      on_text: called with each piece of text as it becomes certain. Then, and where there are stop strings, the host
        looks at every step; otherwise only at the first and the last.
      clock: seconds.

    Raises:
      ValueError: a prompt that does not fit the target; nothing has been decoded then.
    """
    _check_prompts(decoder, prompts)
    stepwise = on_text is not None or bool(decoder.sampling.stop)
    rows = decoder.sampling.rows(batch_size, decoder.eos_ids)
    seen: set[int] = set()
    for start in range(0, len(prompts), batch_size):
        chunk = prompts[start : start + batch_size]
        arrays = _arrays(decoder, chunk, batch_size)
        width = arrays[1].shape[1]
        compile_time = 0.0 if width in seen else _warm_up(decoder, arrays, rows, clock)
        seen.add(width)
        began = clock()
        texts = [_Row(decoder, prompt, began, on_text) for prompt in chunk]
        _decode(decoder, arrays, rows, texts, stepwise, clock)
        completions = tuple(text.finish(stepwise) for text in texts)
        yield Batch(completions=completions, seconds=clock() - began, compile_time_s=compile_time)


def _check_prompts(decoder: Decoder, prompts: Sequence[Prompt]) -> None:
    most, new = decoder.config.target.max_positions, decoder.sampling.max_new_tokens
    for prompt in prompts:
        if len(prompt.token_ids) + new > most:
            raise ValueError(
                f"prompt {prompt.id!r}: expected its tokens and max_new_tokens within the target's {most} positions, "
                f"got {len(prompt.token_ids)} and {new}"
            )


def _arrays(decoder: Decoder, prompts: Sequence[Prompt], batch_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys `[B]`, ids `[B, P]` and lengths `[B]`; rows beyond the prompts have length 0."""
    missing = batch_size - len(prompts)
    ids, lengths = pad_prompts([*(prompt.token_ids for prompt in prompts), *[(0,)] * missing])
    names = [zlib.crc32(repr(prompt.id).encode()) for prompt in prompts] + [0] * missing
    key = jax.random.key(decoder.sampling.seed)
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.asarray(names, jnp.uint32))
    return keys, ids, jnp.where(jnp.arange(batch_size) < len(prompts), lengths, 0)


def _warm_up(
    decoder: Decoder,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    rows: SamplingParams,
    clock: Callable[[], float],
) -> float:
    """Compiles for these shapes by decoding one token of one-token prompts; returns the seconds it took."""
    began = clock()
    keys, ids, lengths = arrays
    once = rows.replace(max_tokens=jnp.ones_like(rows.max_tokens))
    state = _prefill(decoder, (keys, ids, jnp.ones_like(lengths)), once)
    jax.block_until_ready(decode_steps(decoder.params, state, once, 1, config=decoder.config))
    return clock() - began


def _prefill(
    decoder: Decoder, arrays: tuple[jax.Array, jax.Array, jax.Array], rows: SamplingParams
) -> DecodeState:
    width = bucket(decoder.sampling.max_new_tokens)
    return prefill(decoder.params, *arrays, rows, config=decoder.config, max_new_tokens=width)


def _decode(
    decoder: Decoder,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    rows: SamplingParams,
    texts: Sequence["_Row"],
    stepwise: bool,
    clock: Callable[[], float],
) -> None:
    """Runs a batch to its end, showing the rows what has come after each call."""
    state, num_steps, running = _prefill(decoder, arrays, rows), 1, True
    while running:
        state = decode_steps(decoder.params, state, rows, num_steps, config=decoder.config)
        jax.block_until_ready(state)
        now = clock()
        seen = jax.device_get(_visible(state))
        reasons = np.array(seen.finish_reason)
        for index, text in enumerate(texts):
            reasons[index] = text.observe(now, jax.tree.map(lambda rows, index=index: rows[index], seen))
        state = state.replace(finish_reason=jnp.asarray(reasons))
        running, num_steps = (reasons == FinishReason.RUNNING).any(), 1 if stepwise else ALL_STEPS
