"""What a step costs, by a clock that says what it is told."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from line_decoder import KNOWN, decoder_of, prompts_of

from specjax.jobs.completion import batch_rows
from specjax.jobs.decoder import begin
from specjax.jobs.warmup import measure_costs

PLACES = [(64, 1), (64, 5), (1024, 1), (1024, 5)]


class Steps:
    """A driver whose steps do nothing but note how long the text was and how much room was left."""

    def __init__(self):
        self.seen = []

    def decode_steps(self, params, state, sampling, num_steps, *, config):
        assert num_steps == 1
        self.seen.append((int(state.context.length[0]), int(state.limit[0] - state.context.length[0])))
        return state


def measured(columns, times, windows=None):
    """Costs, and the steps that were taken; each step takes the next of `times`."""
    decoder, driver = decoder_of(measured_pace=True), Steps()
    state = begin(decoder, batch_rows(decoder, prompts_of(KNOWN), 1), decoder.sampling.rows(1, ()), None)
    context = dataclasses.replace(state.context, tokens=jnp.zeros((1, columns), jnp.int32))
    ticks = itertools.accumulate(itertools.chain.from_iterable((10.0, time) for time in times))
    config = dataclasses.replace(decoder.config, windows=windows)
    decoder = dataclasses.replace(decoder, driver=driver, config=config)
    costs = measure_costs(decoder, dataclasses.replace(state, context=context), None, lambda: next(ticks))
    return costs, driver.seen


def test_long_buffers_are_measured_at_both_ends():
    """The fastest of three each; a cost is a time with next to no text and what each of 1,024 tokens adds to it."""
    costs, seen = measured(2048, [1, 9, 9, 5, 4, 3, 2, 9, 4, 9, 9, 9])
    assert seen == PLACES * 3
    np.testing.assert_allclose(costs @ [1, 0], [1, 3])
    np.testing.assert_allclose(costs @ [1, 1024], [2, 5])


@pytest.mark.parametrize("late", [1, 0.5])
def test_a_step_is_not_taken_to_be_faster_over_more_text(late):
    costs, _ = measured(2048, [1, 3, late, 5] * 3)
    np.testing.assert_allclose(costs, [[1, 0], [3, 2 / 1024]])


def test_short_buffers_are_measured_in_the_middle():
    costs, seen = measured(64, [1, 9, 4, 3, 2, 9])
    assert seen == [(32, 1), (32, 5)] * 3
    np.testing.assert_allclose(costs, [[1, 0], [3, 0]])


def test_every_window_is_measured():
    costs, seen = measured(64, [1, 2, 3] * 3, windows=(0, 2, 4))
    assert seen == [(32, 1), (32, 3), (32, 5)] * 3
    np.testing.assert_allclose(costs, [[1, 0], [2, 0], [3, 0]])
