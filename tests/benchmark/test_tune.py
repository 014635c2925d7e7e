import pytest
from measured import KNOWN, line_decoder, stats_of
from small_jobs import quick_programs

from specjax.benchmark.questions import Question
from specjax.benchmark.tune import predict, recommend, step_costs

STATS = stats_of([(4, 4, 5), (4, 2, 3), (0, 0, 1), (4, 0, 1)], 4)
VALUES = {"drafter": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("window", "wide", "size", "length", "cost"),
    [
        (4, 2.0, 1, 1 + 6 / 4, 0.25 + 0.75 * 2),
        (2, 2.0, 1, 1 + 4 / 4, 0.25 + 0.75 * 2),
        (1, 1.0, 1, 1 + 2 / 4, 1.0),
        (4, 2.0, 2, 1 + 6 / 4, 1 / 16 + 15 / 16 * 2),
    ],
)
def test_prediction(window, wide, size, length, cost):
    """Of 4 steps 3 drafted, and kept 4, 2 and 0 tokens; what a narrower window would have kept of them is known."""
    found = predict(STATS, window, plain_step_s=0.5, spec_step_s=0.5 * wide, batch_size=size)
    assert found["mean_acceptance_length"] == pytest.approx(length)
    assert found["step_cost_ratio"] == pytest.approx(cost)
    assert found["predicted_speedup"] == pytest.approx(length / cost)


@pytest.mark.parametrize(
    ("speedup", "interval", "speculate"),
    [
        (1.3, (1.1, 1.5), True),
        (1.3, (0.9, 1.6), False),
        (1.3, None, True),
        (1.01, (1.005, 1.02), False),
        (0.7, (0.6, 0.8), False),
        (None, None, False),
    ],
)
def test_only_what_is_faster_beyond_doubt_is_recommended(speedup, interval, speculate):
    advice = recommend(VALUES, {"speedup": speedup, "speedup_interval": interval})
    options = "--drafter ngram --num-speculative-tokens 4" if speculate else "--drafter none"
    assert advice == {"speculate": speculate, "options": options}


def test_steps_are_timed():
    question = Question(id=0, category="a", turns=(KNOWN,))
    looks = iter([0, 1, 10, 12, 20, 25, 30, 33, 40, 44, 50, 57, 60, 66])
    with quick_programs():
        costs = step_costs(line_decoder(), question, batch_size=1, clock=lambda: float(next(looks)))
    assert costs == (2.0, 4.0)
