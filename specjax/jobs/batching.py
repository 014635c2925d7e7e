"""Continuous batching: a fixed number of slots; a prompt takes one as soon as a row is done, while the others go on."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.compiled import bucket
from specjax.jobs.completion import Completion, RowText, batch_rows
from specjax.jobs.decoder import Decoder, Rows, begin
from specjax.jobs.prompts import Prompt
from specjax.jobs.settings import Sampling
from specjax.jobs.warmup import measure_costs
from specjax.pace import make_pace
from specjax.parallel.drivers import Driver
from specjax.slots import Slots
from specjax.types import FinishReason, Pace, SamplingParams

MAX_STEPS = 32
"""Steps after which the host looks at the rows even if none is done."""
_REPEATS = 3


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt and how to complete it."""

    prompt: Prompt
    """With its ids."""
    sampling: Sampling
    """`max_new_tokens` at most that of the decoder, which is what the buffers have room for."""


class SlotBatch:
    """Slots of one size, with buffers that grow to the bucket of the longest prompt so far.

    One program decodes them all, whatever is in them; one more per bucket of prompts reads a prompt and puts it into a
    slot. A row's tokens depend on its prompt, its id, its parameters and the decoder, never on the rest (but for those
    that `Rejection` or `Block` samples under a measured pace). Steps are timed once, with the buffers of the first.

    On a mesh each group of devices has an equal part of the slots and reads the prompts that it is given by itself.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_slots: int,
        *,
        longest: int = 1,
        max_steps: int = MAX_STEPS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Empty slots.

        Args:
          decoder: what decodes.
          num_slots: rows of a batch.
          longest: tokens of the longest prompt that earlier slots have held. Buffers begin with its bucket, so that
            their programs are compiled already.
          max_steps: of a call, while no row is done.
          clock: seconds.
        """
        self._longest = longest
        self._decoder, self._max_steps, self._clock = decoder, max_steps, clock
        self._texts: list[RowText | None] = [None] * num_slots
        self._stepwise = [False] * num_slots
        self._slots: Slots | None = None
        self._pace = self._pace_of(np.ones(len(decoder.config.window_sizes)))
        self._programs: set[tuple[int, ...]] = set()
        self._more = True
        self._reading: Any = None  # an array of the last prompt; jax.Array does not declare is_ready
        self._given_at = clock()
        self.compile_time_s = 0.0
        """Seconds of tracing, compiling (or reading from the cache), first runs and measured steps."""
        self.dispatch_time_s = 0.0
        """Seconds of a call of the decoding program without a step: what any call costs beside what it computes."""
        self.host_time_s = 0.0
        """Seconds that the device waited for the host, compiling apart: the host's own work at whose end the device
        stood still, and for each call of a program (two for each prompt that is taken up) `dispatch_time_s`."""
        self.step_times_s: tuple[float, float] | None = None
        """Seconds of a plain step and of the widest one over half of the first buffers; None: not measured."""
        self.num_calls = 0
        """Calls of the decoding program."""

    def complete(
        self, requests: Iterable[Request], stop: Callable[[], bool] = lambda: False
    ) -> Iterator[list[Completion]]:
        """Completes requests, each as soon as a slot is free, and yields those that are done while the rest goes on.

        Args:
          requests: taken up in order. Those of similar length in a row waste least.
          stop: asked between two calls of the device, and before each prompt. Once it says yes nothing more is read or
            decoded; what is not done is dropped.

        Raises:
          Exception: what `requests` raises, once all that was done before has been yielded.
        """
        waiting, finished = itertools.takewhile(lambda _: not stop(), requests), []
        self._given_at = self._clock()  # the time since an earlier call is nobody's
        try:
            while self._fill(waiting) and not stop():
                self._advance()
                yield finished
                finished = []  # the caller has them
                finished = self._collect()
        except Exception:
            yield finished
            raise
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
        began, driver, config = self._clock(), self._decoder.driver, self._decoder.config
        group, place = divmod(slot, len(self._texts) // driver.num_groups)
        inputs = self._inputs(group, request)
        if self._slots is None and self._decoder.measured_pace:
            self._measure(self._read(*inputs))
        waited = self._waited_s()
        row = self._read(*inputs)
        slots = self._slots
        if slots is None or _columns(row) > _columns(slots):
            slots = self._grow(row)
        self._slots = driver.insert(slots, row, place, config=config)
        self._reading, self._given_at = row.state.finish_reason, self._clock()
        self._texts[slot] = RowText(self._decoder_of(request), request.prompt, began, None)
        self._stepwise[slot] = bool(request.sampling.stop)
        program = _columns(row), _columns(slots)
        if program in self._programs:
            self.host_time_s += waited + 2 * self.dispatch_time_s
        else:
            self._count_compilation(began, program)

    def _decoder_of(self, request: Request) -> Decoder:
        return dataclasses.replace(self._decoder, sampling=request.sampling)

    def _inputs(self, group: int, request: Request) -> tuple[Rows, SamplingParams, SamplingParams]:
        """A row for each group of devices: one with the request's prompt, and elsewhere one without any."""
        decoder, num_groups = self._decoder, self._decoder.driver.num_groups
        keys, tokens, length = batch_rows(self._decoder_of(request), [request.prompt] * num_groups, num_groups)
        if self._slots is None:
            wider = max(0, bucket(self._longest) - tokens.shape[1])
            tokens = jnp.asarray(np.pad(tokens, ((0, 0), (0, wider))))
        length = jnp.where(jnp.arange(num_groups) == group, length, 0)
        shared = dataclasses.replace(request.sampling, seed=0)
        return (keys, tokens, length), *_parameters(shared, decoder.eos_ids, decoder.driver)

    def _read(self, rows: Rows, sampling: SamplingParams, placed: SamplingParams) -> Slots:
        """Starts to read the rows' prompts."""
        return Slots(state=begin(self._decoder, rows, sampling, self._pace), sampling=placed)

    def _measure(self, row: Slots) -> None:
        """Learns what a step costs."""
        decoder = self._decoder
        slots = decoder.driver.empty_slots(row, len(self._texts), config=decoder.config)
        middle = _columns(slots) // 2
        costs = measure_costs(decoder, slots.state, slots.sampling, self._clock)
        seconds = (costs @ np.array([1, middle])).tolist()
        self._pace, self.step_times_s = self._pace_of(costs), (seconds[0], seconds[-1])

    def _pace_of(self, costs: np.ndarray) -> Pace | None:
        """What rows begin with: a pace with these costs, unless all of them speculate always."""
        return make_pace(self._decoder.driver.num_groups, costs) if self._decoder.measured_pace else None

    def _grow(self, row: Slots) -> Slots:
        """Slots with buffers as long as those of `row`, and what they held so far."""
        driver, config = self._decoder.driver, self._decoder.config
        slots = driver.empty_slots(row, len(self._texts), config=config)
        if self._slots is not None:
            slots = driver.insert(slots, self._slots, 0, config=config)
        return self._decode(slots, 0)

    def _decode(self, slots: Slots, num_steps: int, least: int = 1) -> Slots:
        """Slots after a call of the decoding program, which has them donated."""
        run, params, config = self._decoder.driver.decode_steps, self._decoder.params, self._decoder.config
        state = run(params, slots.state, slots.sampling, num_steps, least, config=config)
        return dataclasses.replace(slots, state=state)

    def _count_compilation(self, began: float, program: tuple[int, ...]) -> None:
        """Keeps the first run of a program, from `began` on, apart from the host's time; learns what a call costs."""
        self._programs.add(program)
        slots, times = jax.block_until_ready(self._taken()), []
        for _ in range(_REPEATS):
            called = self._clock()
            slots = jax.block_until_ready(self._decode(slots, 0))
            times.append(self._clock() - called)
        self._slots, self.dispatch_time_s = slots, min(times)
        self._reading, self._given_at = None, self._clock()
        self.compile_time_s += self._given_at - began

    def _waited_s(self) -> float:
        """Seconds since the host last started something or saw it end, if by now the device has nothing to do."""
        idle = self._reading is None or self._reading.is_ready()
        return self._clock() - self._given_at if idle else 0.0

    def _advance(self) -> None:
        """Starts a call that ends when a row is done, for which a request may wait, or after some steps."""
        running = sum(text is not None for text in self._texts)
        num_steps = 1 if any(self._stepwise) else self._max_steps
        self.host_time_s += self._waited_s() + self.dispatch_time_s
        self.num_calls += 1
        self._slots = self._decode(self._taken(), num_steps, running if self._more else 1)

    def _collect(self) -> list[Completion]:
        """Waits for the call to end and takes what is done out of the slots."""
        slots = jax.block_until_ready(self._taken())
        self._reading, now = None, self._clock()
        self._given_at = now
        driver, state, finished = self._decoder.driver, slots.state, []
        seen = driver.to_host((state.context, state.finish_reason, state.stats, state.log_probs))
        reasons = seen[1]
        for slot, text in enumerate(self._texts):
            if text is not None:
                reasons[slot] = text.observe(now, jax.tree.map(itemgetter(slot), seen))
                if reasons[slot] != FinishReason.RUNNING:
                    finished.append(text.finish(self._stepwise[slot]))
                    self._texts[slot], self._stepwise[slot] = None, False
        state = dataclasses.replace(state, finish_reason=driver.to_devices(reasons))
        self._slots = dataclasses.replace(slots, state=state)
        return finished

    def _taken(self) -> Slots:
        if self._slots is None:
            raise ValueError("expected a request in a slot, got none")
        return self._slots


def _columns(slots: Slots) -> int:
    return slots.state.context.tokens.shape[-1]


@functools.lru_cache(maxsize=1024)
def _parameters(sampling: Sampling, eos_ids: tuple[int, ...], driver: Driver) -> tuple[SamplingParams, SamplingParams]:
    """A row's parameters for each group, and the same on its devices, made once for all rows that share them."""
    rows = sampling.rows(driver.num_groups, eos_ids)
    return rows, driver.to_devices(rows)
