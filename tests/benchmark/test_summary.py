import dataclasses
import datetime
import importlib.metadata
from pathlib import Path

import pytest
from measured import pair_of

from specjax.benchmark.summary import batch_records, by_category, environment, summarize_pairs
from specjax.jobs.runtime import peak_memory


def test_figures_of_a_pair():
    """8 tokens in 3 steps against 8: steps of 1.4 + 0.2 s against 1 s, 5 s in all against 9."""
    found = summarize_pairs([pair_of()])
    assert found["speedup"] == pytest.approx(9 / 5)
    assert found["speedup_interval"] is None
    assert found["decode_speedup"] == pytest.approx((4 / 4) / (7 / 8))
    assert found["predicted_speedup"] == pytest.approx((8 / 3) / 1.6)
    assert found["draft_cost_ratio"] == pytest.approx(0.2)
    assert found["verify_cost_ratio"] == pytest.approx(1.4)
    assert found["num_equal_outputs"] == 1
    fast, slow = found["speculative"], found["plain"]
    assert fast["mean_acceptance_length"] == 8 / 3
    assert fast["acceptance_histogram"] == [1, 0, 1, 1, 0]
    assert fast["acceptance_rate_per_position"] == [1.0, 1.0, 0.5, 0.0]
    assert (fast["itl_s"], slow["itl_s"]) == (1.5, pytest.approx(1.1))
    assert fast["instrumentation_overhead"] == pytest.approx(6.1 / 5)
    assert fast["seconds"] == 5.0
    assert fast["compile_time_s"] == 0.5
    assert slow["tpot_s"] == pytest.approx(8 / 7)


def test_categories_are_pooled_apart():
    pairs = [pair_of("b", fast=3.0), pair_of("a", fast=9.0, name="y"), pair_of("b", fast=6.0, name="z")]
    groups = by_category(pairs)
    assert list(groups) == ["b", "a"]
    assert groups["b"]["speedup"] == pytest.approx(18 / 9)
    assert groups["a"]["speedup"] == 1.0
    assert groups["b"]["speedup_interval"] is None
    assert summarize_pairs(pairs)["speedup"] == pytest.approx(27 / 18)


def test_rows_that_share_a_batch_are_in_no_category():
    pair = dataclasses.replace(pair_of(), batch_size=4)
    assert by_category([pair]) == {}
    assert summarize_pairs([pair, pair_of(name="y")])["mean_batch_fill"] == 2 / 5


def test_turns_of_a_question_are_drawn_together():
    """Two turns of each of 4 questions are 4 draws, of 5 questions 5; and second turns that repeat add no certainty."""
    turns = [pair_of(fast=fast, name=str(fast)) for fast in (3.0, 4.0, 6.0, 7.0, 9.0) for _ in range(2)]
    assert summarize_pairs(turns[:8])["speedup_interval"] is None
    both, first = summarize_pairs(turns), summarize_pairs(turns[::2])
    assert both["speedup_interval"] == pytest.approx(first["speedup_interval"])
    assert both["speedup_interval"][0] < both["speedup"] < both["speedup_interval"][1]


def test_batches_of_several_rows_are_drawn_as_a_whole():
    pairs = [dataclasses.replace(pair_of(fast=fast), batch_size=2) for fast in (3.0, 4.0, 6.0, 7.0, 9.0)]
    alone = [pair_of(fast=fast, name=str(fast)) for fast in (3.0, 4.0, 6.0, 7.0, 9.0)]
    assert summarize_pairs(pairs)["speedup_interval"] == summarize_pairs(alone)["speedup_interval"]
    assert summarize_pairs(pairs[1:])["speedup_interval"] is None


def test_records_of_batches():
    (record,) = batch_records([pair_of()])
    assert record == {
        "categories": ["a"],
        "ids": ["x"],
        "speculative": {"num_emitted_tokens": 8, "seconds": 5.0},
        "plain": {"num_emitted_tokens": 8, "seconds": 9.0},
    }


def test_surroundings():
    known = environment()
    assert known["num_cpus"] >= 1
    assert known["backend"] == "cpu"
    assert known["prng"] == "threefry2x32"
    assert known["specjax"] == importlib.metadata.version("specjax")
    assert abs(datetime.datetime.fromisoformat(known["date"]) - datetime.datetime.now(datetime.UTC)).days == 0
    assert not any(str(Path.home()) in str(value) for value in known.values())
    memory = peak_memory()
    assert 2**24 < memory["peak_host_bytes"] < 2**40
    assert memory["peak_device_bytes"] is None
