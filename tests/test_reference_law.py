import functools
import math

import numpy as np
import pytest
import reference
from reference import Sampling, law


def law_of(probs, *, tokens=(), prompt_length=0, **options):
    with np.errstate(divide="ignore"):
        return law(np.log(probs), Sampling(**options), list(tokens), prompt_length)


def processed(logits, sampling, prompt_length, tokens):
    """A target whose logits never change."""
    return law(logits, sampling, tokens, prompt_length)


@pytest.mark.parametrize(
    ("probs", "options", "right"),
    [
        ([0.5, 0.3, 0.15, 0.05], {}, [0.5, 0.3, 0.15, 0.05]),
        ([0.5, 0.3, 0.15, 0.05], {"min_p": 0.4}, [0.625, 0.375, 0, 0]),
        ([0.5, 0.3, 0.15, 0.05], {"top_p": 0.75}, [0.625, 0.375, 0, 0]),
        ([0.5, 0.3, 0.15, 0.05], {"top_k": 2}, [0.625, 0.375, 0, 0]),
        ([0.5, 0.3, 0.15, 0.05], {"top_k": 9}, [0.5, 0.3, 0.15, 0.05]),
        ([0.5, 0.3, 0.15, 0.05], {"logit_bias": (-np.inf, 0, 0, 0)}, [0, 0.6, 0.3, 0.1]),
        ([0.5, 0.3, 0.15, 0.05], {"logit_bias": (0, math.log(3), 0, 0)}, [0.3125, 0.5625, 0.09375, 0.03125]),
        ([0.4, 0.3, 0.2, 0.1], {"temperature": 0.5}, np.array([16, 9, 4, 1]) / 30),
        ([0.4, 0.3, 0.2, 0.1], {"temperature": 0.0}, [1, 0, 0, 0]),
        ([0.3, 0.4, 0.0, 0.3], {"temperature": 1e-6}, [0, 1, 0, 0]),
        # The order: temperature before top-p, top-k before top-p, top-p before min-p, each on what is left.
        ([0.4, 0.3, 0.2, 0.1], {"temperature": 0.5, "top_p": 0.5}, [1, 0, 0, 0]),
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.5, "min_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),
        ([0.3, 0.3, 0.2, 0.2], {"top_p": 0.7, "min_p": 0.6}, [0.375, 0.375, 0.25, 0]),
    ],
)
def test_transforms(probs, options, right):
    np.testing.assert_allclose(law_of(probs, **options), right, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"top_k": 3}, [0, 1, 2]), ({"top_p": 0.5}, [0, 1, 2, 3]), ({"top_p": 0.51}, range(5)), ({"temperature": 0}, [0])],
)
def test_ties_go_to_the_lowest_ids(options, kept):
    probs = law_of([0.125] * 8, **options)
    assert np.flatnonzero(probs).tolist() == list(kept)
    assert probs.sum() == pytest.approx(1, abs=1e-15)


def test_tie_at_the_edge_of_top_k():
    assert np.flatnonzero(law_of([0.1, 0.2, 0.4, 0.2, 0.1], top_k=2)).tolist() == [1, 2]


def test_frequency_penalty_counts_the_output_token_by_token():
    logits = np.array([3.0, 2.6, 2.1, 1.7])
    sampling = Sampling(frequency_penalty=1.0, temperature=0.0)
    text = reference.greedy_decode(functools.partial(processed, logits, sampling, 2), [0, 0], max_tokens=12)
    assert text == [0, 1, 2, 0, 3, 1, 2, 0, 3, 1, 2, 0]


def test_penalties_on_logits():
    logits, tokens = [2.0, -1.0, 0.5, 0.0], [0, 0, 1, 1, 1]  # prompt: 0, 0, 1; output: 1, 1

    def scores(**options):
        probs = law(logits, Sampling(**options), tokens, 3)
        return np.log(probs / probs[3])

    np.testing.assert_allclose(scores(repetition_penalty=2.0), [1.0, -2.0, 0.5, 0.0])
    np.testing.assert_allclose(scores(presence_penalty=0.25), [2.0, -1.25, 0.5, 0.0])
    np.testing.assert_allclose(scores(frequency_penalty=0.25), [2.0, -1.5, 0.5, 0.0])
    np.testing.assert_allclose(scores(repetition_penalty=2.0, frequency_penalty=0.25), [1.0, -2.5, 0.5, 0.0])
    np.testing.assert_allclose(scores(repetition_penalty=2.0, logit_bias=(-3, 0, 0, 0)), [-2.0, -2.0, 0.5, 0.0])
    np.testing.assert_allclose(scores(presence_penalty=1.0, temperature=0.5), [4.0, -4.0, 1.0, 0.0])


def test_min_tokens_forbids_stop_ids_before_that_many_output_tokens():
    logits = np.zeros(10)
    logits[[2, 7, 4]] = [9.0, 5.0, 8.0]

    def decode(min_tokens):
        sampling = Sampling(temperature=0.0, min_tokens=min_tokens, stop_token_ids=(2, 4))
        return reference.greedy_decode(
            lambda text: law(logits, sampling, text, 2), [2, 1], max_tokens=6, stop_token_ids=(2, 4)
        )

    assert [decode(n) for n in (0, 1, 3, 7)] == [[2], [7, 2], [7, 7, 7, 2], [7] * 6]


@pytest.mark.parametrize("logits", [[0.0, np.nan], [-np.inf, -np.inf], [0.0, np.inf]])
def test_logits_without_a_law_are_refused(logits):
    with pytest.raises(ValueError, match="finite maximum"):
        law(logits, Sampling(), [], 0)
