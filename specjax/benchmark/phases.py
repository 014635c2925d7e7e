"""Where the time of a batch goes: the steps of the decoder, halved, with a look at the clock after each half."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from specjax.compiled import draft_step, verify_step
from specjax.jobs.completion import Batch, batch_rows
from specjax.jobs.decoder import Decoder, begin
from specjax.report.metrics import ratio
from specjax.types import DecodeState, FinishReason, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phases:
    """Seconds of each part of a run that waited for the device after every part; add runs with `total_phases`."""

    prefill_time_s: float = 0.0
    draft_time_s: float = 0.0
    verify_time_s: float = 0.0
    """Target calls, verdicts and commits, and what the drafter learns from them."""
    other_time_s: float = 0.0
    """What the host did in between."""
    num_batch_steps: int = 0
    """Steps of the decoder; each serves every row of a batch that is not done."""
    step_gaps_s: float = 0.0
    """From the first to the last step's end."""
    num_step_gaps: int = 0

    @property
    def draft_step_s(self) -> float | None:
        """Mean drafting time of a step."""
        return ratio(self.draft_time_s, self.num_batch_steps)

    @property
    def verify_step_s(self) -> float | None:
        """Mean verification time of a step."""
        return ratio(self.verify_time_s, self.num_batch_steps)


def total_phases(runs: Sequence[Phases]) -> Phases:
    """The sum of several runs."""
    names = [field.name for field in dataclasses.fields(Phases)]
    return Phases(**{name: sum(getattr(run, name) for run in runs) for name in names})


def time_phases(
    decoder: Decoder, batch: Batch, *, batch_size: int, clock: Callable[[], float] = time.perf_counter
) -> Phases:
    """Decodes a batch once more, to the same tokens, and times the halves of each step.

    Args:
      decoder: what completed the batch; without stop strings, which the host would have to look for.
      batch: what `complete` yielded.
      batch_size: rows it was decoded in.
      clock: seconds.
    """
    rows = batch_rows(decoder, [completion.prompt for completion in batch.completions], batch_size)
    sampling = decoder.sampling.rows(batch_size, decoder.eos_ids)
    _halves(decoder, begin(decoder, rows, sampling, batch.pace), sampling, clock)  # compiles
    began = clock()
    state = jax.block_until_ready(begin(decoder, rows, sampling, batch.pace))
    prefilled = clock()
    drafting, verifying, ends = 0.0, 0.0, []
    while (np.asarray(state.finish_reason) == FinishReason.RUNNING).any():
        state, draft_time, verify_time = _halves(decoder, state, sampling, clock)
        drafting, verifying = drafting + draft_time, verifying + verify_time
        ends.append(clock())
    end = clock()
    drafting = drafting if decoder.config.drafter.num_tokens else 0.0  # nothing but the launch of an empty program
    return Phases(
        prefill_time_s=prefilled - began,
        draft_time_s=drafting,
        verify_time_s=verifying,
        other_time_s=end - prefilled - drafting - verifying,
        num_batch_steps=len(ends),
        step_gaps_s=ends[-1] - ends[0] if ends else 0.0,
        num_step_gaps=max(len(ends) - 1, 0),
    )


def _halves(
    decoder: Decoder, state: DecodeState, sampling: SamplingParams, clock: Callable[[], float]
) -> tuple[DecodeState, float, float]:
    """A step, and the seconds of its drafting and of its verification."""
    began = clock()
    state, draft = jax.block_until_ready(draft_step(decoder.params, state, sampling, config=decoder.config))
    drafted = clock()
    state = jax.block_until_ready(verify_step(decoder.params, state, draft, sampling, config=decoder.config))
    return state, drafted - began, clock() - drafted
