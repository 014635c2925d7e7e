"""Continuous batching: a fixed number of slots; a prompt takes one as soon as a row is done, while the others go on."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np

from specjax.compiled import decode_steps, insert
from specjax.jobs.completion import Completion, RowText, batch_rows
from specjax.jobs.decoder import Decoder, begin
from specjax.jobs.prompts import Prompt
from specjax.jobs.settings import Sampling
from specjax.jobs.warmup import time_steps
from specjax.pace import make_pace
from specjax.slots import Slots, empty_slots
from specjax.types import FinishReason, Pace, SamplingParams

MAX_STEPS = 32
"""Steps after which the host looks at the rows even if none is done."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt and how to complete it."""

    prompt: Prompt
    """With its ids."""
    sampling: Sampling
    """`max_new_tokens` at most that of the decoder, which is what the buffers have room for."""


class SlotBatch:
    """Slots of one size, which grow to the bucket of the longest prompt so far.

    One program decodes them all, whatever is in them; one more per bucket of prompts reads a prompt and puts it into a
    slot. A row's tokens depend on its prompt, its id, its parameters and the decoder, never on the rest.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_slots: int,
        *,
        max_steps: int = MAX_STEPS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._decoder, self._max_steps, self._clock = decoder, max_steps, clock
        self._texts: list[RowText | None] = [None] * num_slots
        self._stepwise = [False] * num_slots
        self._slots: Slots | None = None
        self._pace: Pace | None = None
        self._programs: set[tuple[int, ...]] = set()
        self._more, self._idle_since = True, clock()
        self.compile_time_s = 0.0
        """Seconds of tracing, compiling (or reading from the cache), first runs and measured steps."""
        self.host_time_s = 0.0
        """Seconds between the end of a call of the decoding program and the start of the next, compilation apart: at
        least what the device waits for the host, since it may be reading prompts meanwhile."""
        self.num_calls = 0
        """Calls of the decoding program."""

    def complete(
        self, requests: Iterable[Request], stop: Callable[[], bool] = lambda: False
    ) -> Iterator[list[Completion]]:
        """Completes requests, each as soon as a slot is free, and yields those that are done while the rest goes on.

        Args:
          requests: taken up in order. Those of similar length in a row waste least.
          stop: asked between two calls of the device. Once it says yes nothing more is decoded; what is not done is
            dropped.
        """
        waiting, finished = iter(requests), []
        while not stop() and self._fill(waiting):
            self._advance()
            yield finished
            finished = self._collect()
        yield finished

    def _fill(self, waiting: Iterator[Request]) -> bool:
        """Puts requests into free slots; says whether any slot is taken."""
        for slot, text in enumerate(self._texts):
            if text is None:
                request = next(waiting, None)
                self._more = request is not None
                if request is not None:
                    self._start(slot, request)
        return any(text is not None for text in self._texts)

    def _start(self, slot: int, request: Request) -> None:
        began, decoder = self._clock(), dataclasses.replace(self._decoder, sampling=request.sampling)
        rows = batch_rows(decoder, [request.prompt], 1)
        sampling = _parameters(dataclasses.replace(request.sampling, seed=0), decoder.eos_ids)
        row = Slots(state=begin(self._decoder, rows, sampling, self._pace), sampling=sampling)
        slots = self._slots
        if slots is None or _columns(row) > _columns(slots):
            slots = self._grow(row)
        self._slots = insert(slots, row, slot, config=decoder.config)
        self._texts[slot] = RowText(decoder, request.prompt, began, None)
        self._stepwise[slot] = bool(request.sampling.stop)
        self._count_compilation(began, (_columns(row), _columns(slots)))

    def _grow(self, row: Slots) -> Slots:
        """Slots with buffers as long as those of `row`, and what they held so far."""
        decoder, old = self._decoder, self._slots
        slots = empty_slots(row, len(self._texts))
        if old is not None:
            slots = insert(slots, old, 0, config=decoder.config)
        elif decoder.measured_pace:
            times = jnp.asarray(time_steps(decoder, slots.state, slots.sampling, self._clock))
            self._pace = make_pace(1, times)
            slots = empty_slots(_with_pace(row, self._pace), len(self._texts))
        state = decode_steps(decoder.params, slots.state, slots.sampling, 0, config=decoder.config)
        return dataclasses.replace(slots, state=state)

    def _count_compilation(self, began: float, program: tuple[int, ...]) -> None:
        """Keeps the first run of a program, from `began` on, apart from the host's time."""
        if program not in self._programs:
            self._programs.add(program)
            jax.block_until_ready(self._slots)
            seconds = self._clock() - began
            self.compile_time_s += seconds
            self._idle_since += seconds

    def _advance(self) -> None:
        """Starts a call that ends when a row is done, for which a request may wait, or after some steps."""
        slots, running = self._taken(), sum(text is not None for text in self._texts)
        num_steps = 1 if any(self._stepwise) else self._max_steps
        least = running if self._more else 1
        config = self._decoder.config
        state = decode_steps(self._decoder.params, slots.state, slots.sampling, num_steps, least, config=config)
        self._slots = dataclasses.replace(slots, state=state)
        self.host_time_s += self._clock() - self._idle_since
        self.num_calls += 1

    def _collect(self) -> list[Completion]:
        """Waits for the call to end and takes what is done out of the slots."""
        slots = jax.block_until_ready(self._taken())
        now = self._idle_since = self._clock()
        state, finished = slots.state, []
        seen = jax.tree.map(np.array, (state.context, state.finish_reason, state.stats, state.log_probs))
        reasons = seen[1]
        for slot, text in enumerate(self._texts):
            if text is not None:
                reasons[slot] = text.observe(now, jax.tree.map(itemgetter(slot), seen))
                if reasons[slot] != FinishReason.RUNNING:
                    finished.append(text.finish(self._stepwise[slot]))
                    self._texts[slot], self._stepwise[slot] = None, False
        self._slots = dataclasses.replace(
            slots, state=dataclasses.replace(state, finish_reason=jax.device_put(reasons))
        )
        return finished

    def _taken(self) -> Slots:
        if self._slots is None:
            raise ValueError("expected a request in a slot, got none")
        return self._slots


def _columns(slots: Slots) -> int:
    return slots.state.context.tokens.shape[1]


def _with_pace(row: Slots, pace: Pace) -> Slots:
    return dataclasses.replace(row, state=dataclasses.replace(row.state, pace=pace))


@functools.lru_cache(maxsize=1024)
def _parameters(sampling: Sampling, eos_ids: tuple[int, ...]) -> SamplingParams:
    """A row's parameters on the device, made once for all rows that share them."""
    return sampling.rows(1, eos_ids)
