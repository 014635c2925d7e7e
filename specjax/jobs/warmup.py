"""What comes before a batch of new shapes: compiling, and learning what a step costs."""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.jobs.decoder import Decoder, Rows, begin
from specjax.jobs.keys import row_keys
from specjax.pace import make_pace
from specjax.parallel.launch import agreed
from specjax.types import DecodeState, FinishReason, Pace, SamplingParams

_REPEATS = 3
_SHORT = 64
"""Tokens: enough for a lookup to find something."""
_LONG = 512
"""Tokens of text from which on their number counts."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WarmUp:
    """A batch shape that is ready to be used."""

    compile_time_s: float
    """Seconds of tracing, compiling (or reading from the cache) and a first run."""
    step_times_s: tuple[float, float] | None
    """Seconds of a plain step and of the widest one over half of the buffers; None: not measured."""
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
    _, prompt, length = rows
    keys = row_keys(decoder.sampling.seed, range(len(length)))  # padding rows, which are read here too, share theirs
    windows = decoder.config.window_sizes
    pace = make_pace(len(length), jnp.ones(len(windows))) if decoder.measured_pace else None
    began = clock()
    read = jnp.full_like(length, 2)  # all but the last: one token runs a chunk, which is slow the first time
    state = begin(decoder, (keys, jnp.zeros_like(prompt), read), sampling, pace)
    sampling = decoder.driver.to_devices(sampling)
    state = decoder.driver.decode_steps(
        decoder.params, _rewind(state, _middle(state), 1), sampling, 1, config=decoder.config
    )
    jax.block_until_ready(state)
    compile_time = clock() - began
    if pace is None:
        return WarmUp(compile_time_s=compile_time, step_times_s=None, pace=None)
    costs = agreed(measure_costs(decoder, state, sampling, clock))
    times = (costs @ np.array([1, _middle(state)])).tolist()
    pace = make_pace(len(length), costs)
    return WarmUp(compile_time_s=compile_time, step_times_s=(times[0], times[-1]), pace=pace)


def measure_costs(
    decoder: Decoder, state: DecodeState, sampling: SamplingParams, clock: Callable[[], float]
) -> np.ndarray:
    """`Pace.costs` `[W, 2]` in seconds, for each window: of the fastest of a few steps each.

    Room for w + 1 tokens leaves w to draft. In long buffers the rows are measured once with next to no text and once
    with texts that fill half of them.

    Args:
      decoder: what runs.
      state: a batch of the shape in question; it is donated, and its text does not matter.
      sampling: the batch's parameters, on the devices.
      clock: seconds.
    """
    middle = _middle(state)
    lengths = [_SHORT, middle] if middle >= _LONG else [middle]
    rooms = [window + 1 for window in decoder.config.window_sizes]
    times = np.full((len(lengths), len(rooms)), np.inf)
    for _ in range(_REPEATS):
        for place, (length, room) in zip(np.ndindex(times.shape), itertools.product(lengths, rooms), strict=True):
            state = jax.block_until_ready(_rewind(state, length, room))
            began = clock()
            state = decoder.driver.decode_steps(decoder.params, state, sampling, 1, config=decoder.config)
            jax.block_until_ready(state)
            times[place] = min(times[place], clock() - began)
    return np.stack([times[0], np.maximum(times[-1] - times[0], 0) / middle], axis=1)


def _middle(state: DecodeState) -> int:
    return state.context.tokens.shape[-1] // 2


def _rewind(state: DecodeState, length: int, room: int) -> DecodeState:
    """Every row after a text 0, 0, 0, ... of that length, with room for so many tokens more.

    Lookups find something there, and attention reads what it reads of a usual text; what caches hold costs no time.
    """
    lengths = jnp.full_like(state.context.length, length)
    context = dataclasses.replace(state.context, tokens=jnp.zeros_like(state.context.tokens), length=lengths)
    running = jnp.full_like(state.finish_reason, FinishReason.RUNNING.value)  # as it lies: else it recompiles on a mesh
    return dataclasses.replace(state, context=context, limit=lengths + room, finish_reason=running)
