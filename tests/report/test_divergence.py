"""What counts as one law, and what rounding explains: each against arithmetic of another kind."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.report.divergence import (
    Divergence,
    Scores,
    explain,
    filter_edge,
    rounding,
    step,
)

LAW = np.array([0.5, 0.25, 0.125, 0.125])


def draw(law, rows, seed):
    return np.random.default_rng(seed).choice(len(law), rows, p=law)


# ---- What rounding explains ----


@pytest.mark.parametrize("magnitude", [23.5, 16.0, 15.9375, 1.0, 0.75, 100.0])
def test_steps_are_those_of_the_dtype(magnitude):
    for dtype in ("float32", "bfloat16"):
        value = jnp.asarray(magnitude, dtype)
        assert step(dtype, magnitude) == float(jnp.nextafter(value, jnp.asarray(jnp.inf, dtype)) - value)


def test_rounding_is_fixed_in_float32_and_two_steps_in_bfloat16():
    assert rounding("float32", 23.5) == rounding("float32", 0.1) == 1e-4
    assert rounding("bfloat16", 23.5) == 0.25
    assert rounding("bfloat16", 1.0) == 2**-6
    assert rounding("bfloat16", 0.0) < 1e-30


def scores_of(logits, **changes):
    logits = np.asarray(logits, np.float32)
    log_probs = np.log(np.exp(logits) / np.exp(logits).sum())
    plain = Scores(
        logits=logits,
        log_probs=log_probs,
        noise=np.zeros_like(logits),
        kept=np.ones(len(logits), bool),
        temperature=1.0,
    )
    return dataclasses.replace(plain, **changes)


def parted(plain, other):
    return Divergence(prompt_id="x", index=3, plain_id=plain, other_id=other)


def test_a_tie_of_the_two_best():
    found = explain(parted(1, 2), scores_of([0.0, 5.00004, 5.0]), "float32")
    assert found.gap == pytest.approx(4e-5, rel=0.05)
    assert found.top2_gap == found.gap
    assert (found.edge, found.allowed, found.within_rounding) == (None, 1e-4, True)
    assert (found.prompt_id, found.index) == ("x", 3)


def test_a_gap_beyond_rounding():
    found = explain(parted(1, 2), scores_of([0.0, 5.0002, 5.0]), "float32")
    assert not found.within_rounding
    assert explain(parted(1, 2), scores_of([0.0, 5.0002, 5.0]), "bfloat16").within_rounding


def test_a_tie_elsewhere_explains_nothing():
    found = explain(parted(1, 0), scores_of([4.0, 5.00001, 5.0]), "float32")
    assert found.top2_gap < 1e-4
    assert found.gap == pytest.approx(1.0, rel=1e-3)
    assert not found.within_rounding


def test_bfloat16_allows_two_steps_at_the_size_of_the_two_logits():
    for gap, within in ((0.24, True), (0.26, False)):
        found = explain(
            parted(0, 1), scores_of([23.5, 23.5 - gap, 80.0], kept=np.array([True, True, False])), "bfloat16"
        )
        assert (found.allowed, found.within_rounding) == (0.25, within)


def test_sampled_rows_compare_scores_with_their_noise():
    scores = scores_of([3.0, 1.0, 0.0], noise=np.array([0.0, 2.00004, 0.0], np.float32))
    assert explain(parted(1, 0), scores, "float32").within_rounding
    assert not explain(parted(1, 0), scores_of([3.0, 1.0, 0.0]), "float32").within_rounding


def test_gaps_are_in_units_of_logits():
    hot, cold = (dataclasses.replace(scores_of([3.0, 2.9, 0.0]), temperature=t) for t in (2.0, 0.5))
    assert explain(parted(0, 1), hot, "float32").gap == pytest.approx(0.2, rel=1e-4)
    assert explain(parted(0, 1), cold, "float32").gap == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize(("plain", "other"), [(None, 1), (1, None)])
def test_an_end_of_text_is_no_tie(plain, other):
    found = explain(parted(plain, other), scores_of([0.0, 0.0]), "float32")
    assert found.gap is None
    assert not found.within_rounding


def test_a_forbidden_token_is_no_tie():
    with np.errstate(divide="ignore"):
        scores = scores_of([0.0, 1.0, -np.inf, -np.inf], top_k=3, top_p=0.999, min_p=1e-9)
    found = explain(parted(1, 2), scores, "bfloat16")
    assert found.gap is None
    assert not found.within_rounding


def test_broken_logits_are_no_tie():
    assert not explain(parted(0, 1), scores_of([np.nan, 1.0]), "float32").within_rounding


# ---- The edges of filters ----


def test_no_filters_no_edges():
    assert filter_edge(scores_of([1.0, 2.0, 3.0]), 0) == math.inf
    assert filter_edge(scores_of([1.0, 2.0, 3.0], top_k=3), 0) == math.inf


def test_edge_of_top_k_is_the_rival_across_it():
    scores = scores_of([4.0, 2.5, 2.0, 0.0], top_k=2)
    assert [filter_edge(scores, token) for token in range(4)] == pytest.approx([2.0, 0.5, 0.5, 2.5], rel=1e-5)


def test_edge_of_min_p_is_where_a_token_would_be_cut():
    scores = scores_of([0.0, math.log(0.25), math.log(0.15)], min_p=0.2)
    assert filter_edge(scores, 1) == pytest.approx(math.log(0.25 / 0.2), rel=1e-4)
    assert filter_edge(scores, 2) == pytest.approx(math.log(0.2 / 0.15), rel=1e-4)


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_shift_of_half_the_edge_each_way_moves_a_token_across_top_p(top_k):
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    for token, top_p in ((1, 0.51), (1, 0.49), (2, 0.81), (2, 0.79)):
        if top_k:
            top_p = top_p / 0.95
        edge = filter_edge(scores_of(logits, top_p=top_p, top_k=top_k), token)
        heavier = np.where(np.arange(4) < token, 1, -1)
        kept = mass_before(logits, token, top_k) < top_p
        shifts = [(1 if kept else -1) * share * edge / 2 * heavier for share in (0.9, 1.1)]
        assert [mass_before(logits + shift, token, top_k) < top_p for shift in shifts] == [kept, not kept]


def mass_before(logits, token, top_k):
    probs = np.exp(logits[: top_k or None])
    return probs[:token].sum() / probs.sum()


def test_the_likeliest_token_is_at_no_edge():
    assert filter_edge(scores_of([3.0, 0.0, 0.0], top_p=0.5), 0) == math.inf


def test_a_token_kept_by_a_hair_is_explained_by_the_filter():
    scores = scores_of(np.log([0.5, 0.3, 0.2]), top_p=0.50001, noise=np.array([0.0, 3.0, 0.0], np.float32))
    found = explain(parted(1, 0), scores, "float32")
    assert found.gap > 1
    assert found.edge == pytest.approx(1e-5 / 0.25, rel=0.1)
    assert found.within_rounding
    assert not explain(parted(1, 0), dataclasses.replace(scores, top_p=0.6), "float32").within_rounding
