"""Group l of the cases, on the counters that the decoder carries: 64 and 65. Case 67 belongs to the clock's helper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import NEW, VERIFIERS, VOCAB, WIDTH, WINDOW, follow, rows, run, script, table_config

from specjax.stats import count_step, init_stats
from specjax.types import FinishReason, Params

NEXT = (np.arange(VOCAB) + 3) % VOCAB
NEXT[1] = 13
CHAIN = jnp.asarray(np.where(np.arange(VOCAB) == NEXT[:, None], 5.0, 0.0), jnp.float32)
"""Prefers token i + 3 after token i; but 13 after 1, as after 10."""
COLUMNS = WIDTH + NEW


def decode(verifier, prompts, texts, *, length=None, **sampling):
    params = Params(target=CHAIN, draft=script(texts, WINDOW, length=length))
    return run(table_config(verifier=verifier), params, prompts, **sampling)


def text_from(token):
    return [token, *follow(CHAIN, token, COLUMNS)]


def counters(output, row):
    return {name: np.asarray(value)[row].tolist() for name, value in vars(output.stats).items()}


def assert_consistent(output):
    """What holds in every run, whatever was drafted."""
    stats = jax.tree.map(np.asarray, output.stats)
    np.testing.assert_array_equal(stats.emitted, output.length)
    np.testing.assert_array_equal(stats.histogram.sum(axis=1), stats.steps)
    np.testing.assert_array_equal(stats.histogram @ np.arange(WINDOW + 1), stats.accepted)
    np.testing.assert_array_equal(stats.drafted_per_position.sum(axis=1), stats.drafted)
    np.testing.assert_array_equal(stats.accepted_per_position.sum(axis=1), stats.accepted)
    assert (stats.accepted_per_position <= stats.drafted_per_position).all()
    assert (np.diff(stats.accepted_per_position, axis=1) <= 0).all()
    assert (stats.emitted <= stats.accepted + stats.steps).all()


# ---- Case 64 ----


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_case_64_nothing_counts_after_the_first_rejection(verifier):
    """Windows of 4 with accept masks T F T T and T T T T: what follows the wrong token fits it, and counts nowhere."""
    text = [4, 7, 1, *text_from(13)]
    output = decode(verifier, [[4]], [text], length=np.full((1, COLUMNS), 4), max_tokens=7)
    assert rows(output)[0] == [7, 10, 13, 0, 3, 6, 9]
    assert counters(output, 0) == {
        "steps": 2,
        "drafted": 8,
        "accepted": 5,
        "emitted": 7,
        "drafted_per_position": [2, 2, 2, 2, 0],
        "accepted_per_position": [2, 1, 1, 1, 0],
        "histogram": [0, 1, 0, 0, 1, 0],
    }
    assert_consistent(output)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_case_64_rates_of_perfect_and_hopeless_drafts(verifier):
    """Oracle: 5 windows of 5 + 1 tokens, and one of 1 + 1 at the limit. Contrary: a token a step. None: the same."""
    contrary = [4, *((token + 1) % VOCAB for token in text_from(7))]
    lengths = np.array([[WINDOW]] * 2 + [[0]] + [[WINDOW]] * 5)
    output = decode(verifier, [[4]] * 3, [text_from(4), contrary, text_from(4)], length=lengths)
    assert rows(output)[:3] == [follow(CHAIN, 4)] * 3
    oracle, hopeless, silent = (counters(output, row) for row in range(3))
    assert (oracle["steps"], oracle["drafted"], oracle["accepted"], oracle["emitted"]) == (6, 26, 26, 32)
    assert oracle["histogram"] == [0, 1, 0, 0, 0, 5]
    assert oracle["drafted_per_position"] == oracle["accepted_per_position"] == [6, 5, 5, 5, 5]
    assert (hopeless["steps"], hopeless["accepted"], hopeless["emitted"]) == (32, 0, 32)
    assert hopeless["drafted"] == 27 * 5 + 4 + 3 + 2 + 1 + 0
    assert (silent["steps"], silent["drafted"], silent["emitted"]) == (32, 0, 32)
    assert hopeless["histogram"] == silent["histogram"] == [32, 0, 0, 0, 0, 0]
    assert_consistent(output)


# ---- Case 65 ----


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_case_65_tokens_after_a_stop_count_nowhere(verifier):
    """A matching window of 5 with the stop id at each place, the bonus token's included: 7 10 13 0 3 | 6."""
    stops = [[stop] for stop in (7, 10, 13, 0, 3, 6)]
    output = decode(verifier, [[4]] * 6, [text_from(4)] * 6, stop_token_ids=stops)
    assert rows(output)[:6] == [[7, 10, 13, 0, 3, 6][: row + 1] for row in range(6)]
    assert output.finish_reason[:6].tolist() == [FinishReason.STOP] * 6
    for row in range(6):
        kept = min(row + 1, WINDOW)
        assert counters(output, row) == {
            "steps": 1,
            "drafted": 5,
            "accepted": kept,
            "emitted": row + 1,
            "drafted_per_position": [1] * 5,
            "accepted_per_position": [1] * kept + [0] * (5 - kept),
            "histogram": [int(n == kept) for n in range(6)],
        }
    assert_consistent(output)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_case_65_a_length_limit_inside_the_window(verifier):
    """A row drafts no more than it may emit, so nothing past the limit is proposed, judged or counted."""
    limits = [0, 1, 2, 5, 6, 7, 12, 13]
    output = decode(verifier, [[4]] * 8, [text_from(4)] * 8, max_tokens=limits)
    assert rows(output) == [follow(CHAIN, 4, limit) for limit in limits]
    assert output.stats.emitted.tolist() == limits
    assert output.stats.steps.tolist() == [0, 1, 1, 1, 1, 2, 2, 3]
    assert output.stats.drafted.tolist() == output.stats.accepted.tolist() == [0, 0, 1, 4, 5, 5, 10, 10]
    assert output.finish_reason.tolist() == [FinishReason.LENGTH] * 8
    assert_consistent(output)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_case_65_finished_rows_add_to_no_counter(verifier):
    """Rows that stop early count the same whether a neighbour goes on for 32 steps more or not."""
    contrary = [4, *((token + 1) % VOCAB for token in text_from(7))]
    texts, prompts = [text_from(4), text_from(4), contrary], [[4]] * 3
    together = decode(verifier, prompts, texts, max_tokens=[4, 32, 32], stop_token_ids=[[], [13], []])
    apart = decode(verifier, prompts, texts, max_tokens=[4, 32, 0], stop_token_ids=[[], [13], []])
    assert together.stats.steps.tolist()[:3] == [1, 1, 32]
    assert counters(apart, 2)["steps"] == 0
    for row in (0, 1):
        assert counters(together, row) == counters(apart, row)
    assert not any(np.any(value[3:]) for value in vars(together.stats).values())
    assert_consistent(together)


def test_case_65_counting_alone():
    """`count_step` adds a live row's step and leaves a done row as it is, whatever stands in its columns."""
    stats = init_stats(2, 3)
    live = jnp.array([True, False])
    drafted, accepted, emitted = jnp.array([3, 3]), jnp.array([2, 1]), jnp.array([3, 2])
    once = count_step(stats, live, drafted, accepted, emitted)
    twice = count_step(once, jnp.array([True, True]), jnp.array([1, 0]), jnp.array([1, 0]), jnp.array([2, 1]))
    assert {name: value.tolist() for name, value in vars(once).items()} == {
        "steps": [1, 0],
        "drafted": [3, 0],
        "accepted": [2, 0],
        "emitted": [3, 0],
        "drafted_per_position": [[1, 1, 1], [0, 0, 0]],
        "accepted_per_position": [[1, 1, 0], [0, 0, 0]],
        "histogram": [[0, 0, 1, 0], [0, 0, 0, 0]],
    }
    assert {name: value.tolist() for name, value in vars(twice).items()} == {
        "steps": [2, 1],
        "drafted": [4, 0],
        "accepted": [3, 0],
        "emitted": [5, 1],
        "drafted_per_position": [[2, 1, 1], [0, 0, 0]],
        "accepted_per_position": [[2, 1, 0], [0, 0, 0]],
        "histogram": [[0, 1, 1, 0], [1, 0, 0, 0]],
    }
