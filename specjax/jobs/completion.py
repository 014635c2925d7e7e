"""Completing prompts: batches of fixed shapes, timed without their compilation, trimmed at stop strings."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np

from specjax.compiled import pad_prompts
from specjax.io.text import TextStream
from specjax.jobs.decoder import Decoder, Rows, begin
from specjax.jobs.keys import row_keys
from specjax.jobs.prompts import Prompt
from specjax.jobs.warmup import WarmUp, warm_up
from specjax.report.metrics import Timeline, cut_stats, cut_timeline, no_stats
from specjax.types import Context, DecodeState, DecodeStats, FinishReason, LogProbs, Pace, SamplingParams

_ALL_STEPS = 2**31 - 1


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
    """What making these shapes ready took; 0 if they had been seen before."""
    step_times_s: tuple[float, float] | None
    """Seconds of a plain step and of a speculative one over half of the buffers; None: not measured."""
    pace: Pace | None
    """What the rows began with."""


def complete(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    *,
    batch_size: int = 1,
    on_text: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Batch]:
    """Completes prompts in order, a batch at a time; each row's tokens depend on its own prompt, id and the seed only.

    (Tokens that `Rejection` or `Block` samples under a measured pace depend on step times and neighbours too.)

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
    sampling = decoder.sampling.rows(batch_size, decoder.eos_ids)
    ready: dict[int, WarmUp] = {}
    for first in range(0, len(prompts), batch_size):
        chunk = prompts[first : first + batch_size]
        rows = batch_rows(decoder, chunk, batch_size)
        width, compile_time = rows[1].shape[1], 0.0
        if width not in ready:
            ready[width] = warm_up(decoder, rows, sampling, clock)
            compile_time = ready[width].compile_time_s
        warm, began = ready[width], clock()
        texts = [RowText(decoder, prompt, began, on_text) for prompt in chunk]
        _decode(decoder, begin(decoder, rows, sampling, warm.pace), sampling, texts, stepwise, clock)
        yield Batch(
            completions=tuple(text.finish(stepwise) for text in texts),
            seconds=clock() - began,
            compile_time_s=compile_time,
            step_times_s=warm.step_times_s,
            pace=warm.pace,
        )


def _check_prompts(decoder: Decoder, prompts: Sequence[Prompt]) -> None:
    most, new = decoder.config.target.max_positions, decoder.sampling.max_new_tokens
    for prompt in prompts:
        if len(prompt.token_ids) + new > most:
            raise ValueError(
                f"prompt {prompt.id!r}: expected its tokens and max_new_tokens within the target's {most} positions, "
                f"got {len(prompt.token_ids)} and {new}"
            )


def batch_rows(decoder: Decoder, prompts: Sequence[Prompt], batch_size: int) -> Rows:
    """A full batch; rows beyond the prompts have length 0. A row's key comes from the seed and its prompt's id."""
    missing = batch_size - len(prompts)
    tokens, length = pad_prompts([*(prompt.token_ids for prompt in prompts), *[(0,)] * missing])
    keys = row_keys(decoder.sampling.seed, [prompt.id for prompt in prompts] + [0] * missing)
    return keys, tokens, jnp.where(jnp.arange(batch_size) < len(prompts), length, 0)


def _decode(
    decoder: Decoder,
    state: DecodeState,
    sampling: SamplingParams,
    texts: Sequence["RowText"],
    stepwise: bool,
    clock: Callable[[], float],
) -> None:
    """Runs a batch to its end, telling each text what its row holds after every call."""
    driver, num_steps, running = decoder.driver, 1, True
    sampling = driver.to_devices(sampling)
    while running:
        state = driver.decode_steps(decoder.params, state, sampling, num_steps, config=decoder.config)
        jax.block_until_ready(state)
        now = clock()
        seen = driver.to_host((state.context, state.finish_reason, state.stats, state.log_probs))
        reasons = seen[1]
        for index, text in enumerate(texts):
            reasons[index] = text.observe(now, jax.tree.map(itemgetter(index), seen))
        state = dataclasses.replace(state, finish_reason=driver.to_devices(reasons))
        num_steps, running = 1 if stepwise else _ALL_STEPS, (reasons == FinishReason.RUNNING).any()


class RowText:
    """What has come for one prompt so far."""

    def __init__(self, decoder: Decoder, prompt: Prompt, start: float, on_text: Callable[[str], None] | None) -> None:
        self._prompt, self._start, self._on_text = prompt, start, on_text
        self._stream = TextStream(decoder.tokenizer, decoder.sampling.stop)
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._emissions: list[tuple[float, int]] = []
        self._history = [no_stats(decoder.config.drafter.num_tokens)]
        self._reason = FinishReason.RUNNING
        self._log_probs: LogProbs | None = None

    def observe(self, now: float, seen: tuple[Context, np.ndarray, DecodeStats, LogProbs | None]) -> FinishReason:
        """Takes in what a row of the decoder holds now; says why the text has ended, if it has."""
        context, reason, stats, log_probs = seen
        output = slice(context.prompt_length, context.length)
        new = context.tokens[output][len(self._ids) :].tolist()
        if new:
            self._emissions.append((now, len(new)))
        self._ids += new
        self._history.append(stats)
        self._log_probs = jax.tree.map(itemgetter(output), log_probs)
        self._say(self._stream.push(new))
        self._reason = FinishReason(reason) if self._stream.match is None else FinishReason.STOP
        return self._reason

    def finish(self, stepwise: bool) -> Completion:
        """The completion, cut at its stop string."""
        self._say(self._stream.finish())
        match = self._stream.match
        kept = len(self._ids) if match is None else match.num_ids
        return Completion(
            prompt=self._prompt,
            text="".join(self._pieces),
            token_ids=tuple(self._ids[:kept]),
            finish_reason=self._reason.name.lower(),
            stats=self._history[-1] if match is None else cut_stats(self._history, kept),
            timeline=cut_timeline(Timeline(start=self._start, emissions=tuple(self._emissions)), kept),
            stepwise=stepwise,
            log_probs=jax.tree.map(itemgetter(slice(kept)), self._log_probs),
        )

    def _say(self, text: str) -> None:
        self._pieces.append(text)
        if self._on_text is not None and text:
            self._on_text(text)
