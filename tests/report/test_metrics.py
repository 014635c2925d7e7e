"""Cases 64 (pooled counts), 65 (after the end nothing counts) and 67 (latency per token, not per chunk)."""

import numpy as np
import pytest

from specjax.report.metrics import (
    Timeline,
    count_metrics,
    cut_stats,
    cut_timeline,
    latency_metrics,
    no_stats,
    pool,
    speedup,
    speedup_interval,
    throughput_metrics,
)
from specjax.types import DecodeStats

WINDOW = 4


def stats_of(*steps):
    """Counters of a row whose steps are (drafted, accepted, emitted), counted by hand."""
    drafted = [sum(d > i for d, _, _ in steps) for i in range(WINDOW)]
    accepted = [sum(a > i for _, a, _ in steps) for i in range(WINDOW)]
    return DecodeStats(
        steps=np.array(len(steps)),
        drafted=np.array(sum(d for d, _, _ in steps)),
        accepted=np.array(sum(a for _, a, _ in steps)),
        emitted=np.array(sum(e for _, _, e in steps)),
        drafted_per_position=np.array(drafted, int),
        accepted_per_position=np.array(accepted, int),
        histogram=np.array([sum(a == n for _, a, _ in steps) for n in range(WINDOW + 1)], int),
    )


def assert_same_stats(actual, expected):
    assert {name: value.tolist() for name, value in vars(actual).items()} == {
        name: value.tolist() for name, value in vars(expected).items()
    }


def test_acceptance_of_two_windows():
    metrics = count_metrics(stats_of((4, 1, 2), (4, 4, 5)))
    assert metrics == {
        "num_spec_steps": 2,
        "num_draft_tokens": 8,
        "num_accepted_tokens": 5,
        "num_emitted_tokens": 7,
        "mean_acceptance_length": 3.5,
        "draft_acceptance_rate": 0.625,
        "acceptance_rate_per_position": [1.0, 0.5, 0.5, 0.5],
        "conditional_acceptance_rate": [1.0, 0.5, 1.0, 1.0],
        "acceptance_histogram": [0, 1, 0, 0, 1],
    }


def test_unconditional_rate_counts_only_steps_that_drafted_the_position():
    metrics = count_metrics(stats_of((4, 2, 3), (1, 1, 2), (0, 0, 1)))
    assert metrics["acceptance_rate_per_position"] == [1.0, 1.0, 0.0, 0.0]
    assert metrics["conditional_acceptance_rate"] == [1.0, 0.5, 0.0, None]
    assert metrics["draft_acceptance_rate"] == 3 / 5


def test_rows_are_pooled_before_dividing():
    long, short = stats_of(*[(4, 4, 5)] * 9), stats_of((1, 0, 1))
    metrics = count_metrics(pool([long, short]))
    assert metrics["draft_acceptance_rate"] == 36 / 37
    assert metrics["mean_acceptance_length"] == 46 / 10
    assert metrics["acceptance_histogram"] == [1, 0, 0, 0, 9]


def test_nothing_to_divide_by_is_none():
    metrics = count_metrics(pool([]))
    assert metrics["num_spec_steps"] == 0
    assert metrics["mean_acceptance_length"] is metrics["draft_acceptance_rate"] is None
    assert metrics["acceptance_rate_per_position"] == []
    idle = count_metrics(no_stats(WINDOW))
    assert idle["acceptance_rate_per_position"] == idle["conditional_acceptance_rate"] == [None] * WINDOW
    assert set(latency_metrics([], stepwise=True).values()) == {None}
    assert set(throughput_metrics(0, 0, 0.0).values()) == {None}
    assert speedup({"output_tokens_per_second": 3.0}, {"output_tokens_per_second": None}) is None
    assert speedup({"output_tokens_per_second": None}, {"output_tokens_per_second": 2.0}) is None


def test_plain_decoding_has_no_positions():
    metrics = count_metrics(no_stats(0))
    assert metrics["acceptance_rate_per_position"] == metrics["conditional_acceptance_rate"] == []
    assert metrics["acceptance_histogram"] == [0]


def test_case_67_latency_is_per_token_and_steps_are_named_apart():
    timeline = Timeline(start=0.0, emissions=((0.050, 1), (0.070, 4), (0.090, 2), (0.110, 3)))
    metrics = latency_metrics([timeline], stepwise=True)
    assert metrics["ttft_s"] == pytest.approx(0.050)
    assert metrics["tpot_s"] == pytest.approx(0.060 / 9)
    assert metrics["itl_s"] == pytest.approx(0.020)
    assert metrics["e2e_latency_s"] == pytest.approx(0.110)


def test_case_67_first_arrival_may_hold_several_tokens():
    metrics = latency_metrics([Timeline(start=10.0, emissions=((10.5, 4), (11.5, 4)))], stepwise=True)
    assert metrics["ttft_s"] == 0.5
    assert metrics["tpot_s"] == 1 / 7
    assert metrics["itl_s"] == 1.0


def test_no_time_between_steps_when_steps_were_not_watched():
    metrics = latency_metrics([Timeline(start=0.0, emissions=((1.0, 2), (9.0, 30)))], stepwise=False)
    assert metrics["itl_s"] is None
    assert metrics["tpot_s"] == 8 / 31


def test_latencies_of_several_prompts():
    lines = [
        Timeline(start=0.0, emissions=((1.0, 1), (4.0, 3))),
        Timeline(start=5.0, emissions=((8.0, 1),)),
        Timeline(start=9.0, emissions=()),
    ]
    metrics = latency_metrics(lines, stepwise=True)
    assert metrics == {"ttft_s": 2.0, "tpot_s": 1.0, "itl_s": 3.0, "e2e_latency_s": 3.5}


def test_throughput_and_speedup():
    fast, slow = throughput_metrics(30, 20, 4.0), throughput_metrics(30, 20, 10.0)
    assert fast == {"output_tokens_per_second": 5.0, "total_token_throughput": 12.5}
    assert speedup(fast, slow) == 2.5


def test_the_interval_holds_95_of_100_speedups():
    """Plain times that vary by 10 %: the speed-up of 100 questions does so by 1 %, either way 1.96 times that."""
    times = 4 + 0.4 * np.random.default_rng(1).standard_normal(100)
    tokens = [(8, 8)] * 100
    low, high = speedup_interval(tokens, [(2.0, time) for time in times], num_draws=4000)
    spread = times.std() / 10 / 2
    assert (high - low) / spread == pytest.approx(2 * 1.96, rel=0.06)
    assert (high + low) / 2 == pytest.approx(times.mean() / 2, abs=0.3 * spread)


def test_few_questions_have_no_interval():
    assert speedup_interval([(8, 8)] * 4, [(2.0, 3.0)] * 4) is None
    assert speedup_interval([(8, 8)] * 5, [(2.0, 3.0)] * 5) == (1.5, 1.5)
    assert speedup_interval([(8, 8)] * 5 + [(0, 8)], [(2.0, 3.0)] * 6) is None


def history_of(*steps):
    return [stats_of(*steps[:count]) for count in range(len(steps) + 1)]


@pytest.mark.parametrize(
    ("kept", "steps"),
    [
        (0, []),
        (1, [(4, 1, 1)]),  # inside the first window
        (3, [(4, 3, 3)]),
        (4, [(4, 4, 4)]),  # before the bonus token
        (5, [(4, 4, 5)]),
        (6, [(4, 4, 5), (2, 0, 1)]),
        (7, [(4, 4, 5), (2, 0, 1), (0, 0, 1)]),
        (9, [(4, 4, 5), (2, 0, 1), (0, 0, 1), (3, 2, 2)]),
        (10, [(4, 4, 5), (2, 0, 1), (0, 0, 1), (3, 2, 3)]),
    ],
)
def test_counters_end_where_the_text_was_cut(kept, steps):
    history = history_of((4, 4, 5), (2, 0, 1), (0, 0, 1), (3, 2, 3))
    assert_same_stats(cut_stats(history, kept), stats_of(*steps))


def test_arrivals_end_where_the_text_was_cut():
    timeline = Timeline(start=0.0, emissions=((1.0, 2), (2.0, 3), (3.0, 1)))
    cuts = [cut_timeline(timeline, kept).emissions for kept in range(7)]
    assert cuts == [
        (),
        ((1.0, 1),),
        ((1.0, 2),),
        ((1.0, 2), (2.0, 1)),
        ((1.0, 2), (2.0, 2)),
        ((1.0, 2), (2.0, 3)),
        ((1.0, 2), (2.0, 3), (3.0, 1)),
    ]
