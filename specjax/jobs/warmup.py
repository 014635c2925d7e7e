"""What comes before a batch of new shapes: compiling, and learning what a step costs."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.jobs.decoder import Decoder, Rows, begin
from specjax.pace import make_pace
from specjax.parallel.launch import agreed
from specjax.types import DecodeState, FinishReason, Pace, SamplingParams

_REPEATS = 3


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WarmUp:
    """A batch shape that is ready to be used."""

    compile_time_s: float
    """Seconds of tracing, compiling (or reading from the cache) and a first run."""
    step_times_s: tuple[float, float] | None
    """Seconds of a plain step and of a speculative one; None: not measured."""
    pace: Pace | None
    """What the shape's batches begin with."""


def warm_up(decoder: Decoder, rows: Rows, sampling: SamplingParams, clock: Callable[[], float]) -> WarmUp:
    """Compiles the two programs of a batch and, if the decoder paces itself by them, times its steps.

    Args:
      decoder: what is to run.
      rows: a batch of the shape in question; its text does not matter.
      sampling: the batch's parameters.
      clock: seconds.
    """
    keys, prompt, length = rows
    windows = decoder.config.window_sizes
    pace = make_pace(len(length), jnp.ones(len(windows))) if decoder.measured_pace else None
    began = clock()
    read = jnp.full_like(length, 2)  # all but the last: one token runs a chunk, which is slow the first time
    state = begin(decoder, (keys, jnp.zeros_like(prompt), read), sampling, pace)
    sampling = decoder.driver.to_devices(sampling)
    state = decoder.driver.decode_steps(decoder.params, _rewind(state, 1), sampling, 1, config=decoder.config)
    jax.block_until_ready(state)
    compile_time = clock() - began
    if pace is None:
        return WarmUp(compile_time_s=compile_time, step_times_s=None, pace=None)
    times = agreed(time_steps(decoder, state, sampling, clock))
    return WarmUp(compile_time_s=compile_time, step_times_s=times, pace=make_pace(len(length), jnp.asarray(times)))


def time_steps(
    decoder: Decoder, state: DecodeState, sampling: SamplingParams, clock: Callable[[], float]
) -> tuple[float, float]:
    """The fastest of a few steps each: with room for one token, which leaves none to draft, and with room for all.

    Args:
      decoder: what runs.
      state: a batch of the shape in question; it is donated, and its text does not matter.
      sampling: the batch's parameters, on the devices.
      clock: seconds.
    """
    times: dict[int, list[float]] = {1: [], decoder.config.drafter.num_tokens + 1: []}
    for _ in range(_REPEATS):
        for room, seen in times.items():
            state = jax.block_until_ready(_rewind(state, room))
            began = clock()
            state = decoder.driver.decode_steps(decoder.params, state, sampling, 1, config=decoder.config)
            jax.block_until_ready(state)
            seen.append(clock() - began)
    plain, speculative = map(min, times.values())
    return plain, speculative


def _rewind(state: DecodeState, room: int) -> DecodeState:
    """Every row in the middle of its buffer, after the text 0, 0, 0, ..., with room for so many tokens more.

    Lookups find something there, and attention reads what it reads of a usual text; what caches hold costs no time.
    """
    length = jnp.full_like(state.context.length, state.context.tokens.shape[-1] // 2)
    context = dataclasses.replace(state.context, tokens=jnp.zeros_like(state.context.tokens), length=length)
    running = jnp.full_like(state.finish_reason, FinishReason.RUNNING.value)  # as it lies: else it recompiles on a mesh
    return dataclasses.replace(state, context=context, limit=length + room, finish_reason=running)
