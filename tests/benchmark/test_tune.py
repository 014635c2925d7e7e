import pytest
from measured import KNOWN, line_decoder, stats_of
from small_jobs import quick_programs

from specjax.benchmark.questions import Question
from specjax.benchmark.tune import check_enough, predict, recommend, step_costs, worth_trying

STATS = stats_of([(4, 4, 5), (4, 2, 3), (0, 0, 1), (4, 0, 1)], 4)


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
        (1.3, None, False),
        (1.01, (1.005, 1.02), False),
        (0.7, (0.6, 0.8), False),
        (None, None, False),
    ],
)
def test_only_what_is_faster_beyond_doubt_is_recommended(speedup, interval, speculate):
    advice = recommend("--drafter ngram", {"speedup": speedup, "speedup_interval": interval})
    assert advice == {"speculate": speculate, "options": "--drafter ngram" if speculate else "--drafter none"}


def test_what_failed_is_not_recommended():
    assert not recommend("--drafter ngram", {"error": "RuntimeError: full"})["speculate"]


@pytest.mark.parametrize(
    ("predicted", "order"),
    [
        ([1.1, 1.5, 1.3, 1.4], [1, 3, 2]),
        ([0.9, 1.5, None], [1]),
        ([0.9, 0.95, 0.8], [1]),
        ([None, 1.2], [1]),
    ],
)
def test_the_best_predictions_are_tried_first(predicted, order):
    candidates = [{"error": "no"} if value is None else {"predicted_speedup": value} for value in predicted]
    assert worth_trying(candidates) == order


def test_a_verdict_needs_five_questions_or_batches():
    questions = [Question(id=number, category="a", turns=(KNOWN,)) for number in range(9)]
    check_enough(questions[:5], 1)
    check_enough(questions, 2)
    with pytest.raises(ValueError, match=r"at least 5 questions .* got 4"):
        check_enough(questions[:4], 1)
    with pytest.raises(ValueError, match=r"at least 5 batches .* got 4"):
        check_enough(questions[:8], 2)


def test_steps_are_timed():
    question = Question(id=0, category="a", turns=(KNOWN,))
    looks = iter([0, 1, 10, 12, 20, 25, 30, 33, 40, 44, 50, 57, 60, 66])
    with quick_programs():
        costs = step_costs(line_decoder(), question, batch_size=1, clock=lambda: float(next(looks)))
    assert costs == (2.0, 4.0)
