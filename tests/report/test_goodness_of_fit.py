import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax.report.goodness_of_fit import (
    combined,
    g_test,
    law_test,
    places,
    two_sample_test,
    uniformity,
    uniformity_test,
)


def test_g_test_by_hand():
    statistic = 2 * (60 * math.log(1.2) + 40 * math.log(0.8)) / (1 + (2 + 2 - 1) / 600)
    assert g_test([60, 40], [0.5, 0.5]) == pytest.approx(math.erfc(math.sqrt(statistic / 2)))
    assert g_test([[50], [50]], [[0.5], [0.5]]) == 1


def test_g_test_pools_small_cells():
    probs = [0.5, 0.4, 0.03, 0.03, 0.04]
    apart, pooled = g_test([50, 40, 0, 9, 1], probs), g_test([50, 40, 10], [0.5, 0.4, 0.1])
    assert apart == pooled == 1
    lone = g_test([70, 25, 5], [0.6, 0.35, 0.05])
    assert lone == g_test([70, 30], [0.6, 0.4]) < 1


def test_g_test_forbidden_cell_and_certain_law():
    assert g_test([1000, 1, 1000], [0.5, 0.0, 0.5]) == 0
    assert g_test([1000, 0, 1000], [0.5, 0.0, 0.5]) == 1
    assert g_test([0, 1000], [0.0, 1.0]) == 1


def test_g_test_refuses_what_says_nothing():
    with pytest.raises(ValueError, match="draw more"):
        g_test([3, 4], [0.5, 0.5])
    with pytest.raises(ValueError, match="a law over 2 cells"):
        g_test([30, 40], [0.5, 0.6])


def test_g_test_sees_a_reused_coin():
    """Case 1 of the public bug reports: one uniform decides acceptance and residual."""
    rng = np.random.default_rng(0)
    biased = rng.multinomial(20_000, [0.10, 0.58, 0.32])
    honest = rng.multinomial(20_000, [0.10, 0.60, 0.30])
    assert g_test(biased, [0.10, 0.60, 0.30]) < 1e-4
    assert g_test(honest, [0.10, 0.60, 0.30]) > 1e-4


def test_g_test_p_values_are_uniform_under_the_law():
    probs = np.array(list(itertools.accumulate(range(1, 9)))) / 120
    p_values = [g_test(np.random.default_rng(seed).multinomial(5000, probs), probs) for seed in range(600)]
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=0.03)
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.05)


def test_g_test_p_values_of_many_small_cells_are_uniform_under_the_law():
    """Uncorrected their mean is .30, and six times as many as should are below .01."""
    probs = np.full(4000, 1 / 4000)
    draws = [np.random.default_rng(seed).multinomial(45_000, probs) for seed in range(600)]
    assert np.mean([g_test(counts, probs) for counts in draws]) == pytest.approx(0.5, abs=0.05)


# ---- Samples against laws and against each other ----

LAW = np.array([0.5, 0.25, 0.125, 0.125])


def draw(law, rows, seed):
    return np.random.default_rng(seed).choice(len(law), rows, p=law)


def test_two_samples_of_two_cells():
    first, second = np.repeat([0, 1], [30, 70]), np.repeat([0, 1], [50, 50])
    test = two_sample_test(first[:, None], second[:, None])
    statistic = 2 * (30 * math.log(30 / 40) + 70 * math.log(70 / 60) + 50 * math.log(50 / 40) + 50 * math.log(50 / 60))
    assert statistic == pytest.approx(
        stats.chi2_contingency([[30, 70], [50, 50]], correction=False, lambda_="log-likelihood").statistic
    )
    inflation = 1 + (200 / 100 + 200 / 100 - 1) * (200 / 80 + 200 / 120 - 1) / (6 * 200)
    assert test.statistic == pytest.approx(statistic / inflation)
    assert test.degrees == 1
    assert test.p_value == pytest.approx(stats.chi2.sf(statistic / inflation, 1), rel=1e-9)
    assert test.passed


def test_samples_may_differ_in_size():
    first, second = np.repeat([0, 1], [30, 70]), np.repeat([0, 1], [600, 1400])
    assert two_sample_test(first[:, None], second[:, None]).statistic == pytest.approx(0, abs=1e-9)


def test_sample_against_its_law():
    tokens = draw(LAW, 3000, seed=0)
    test = law_test(tokens, np.append(LAW, 0))
    assert test.degrees == 3
    wanted = stats.power_divergence(np.bincount(tokens), 3000 * LAW, lambda_="log-likelihood").statistic
    wanted /= 1 + ((1 / LAW).sum() - 1) / (6 * 3000 * 3)
    assert (test.statistic, test.p_value) == pytest.approx((wanted, stats.chi2.sf(wanted, 3)), rel=1e-9)


@pytest.mark.parametrize("token", [4, -1])
def test_what_the_law_excludes_is_never_drawn(token):
    test = law_test(np.append(draw(LAW, 3000, seed=0), token), np.append(LAW, 0))
    assert (test.p_value, test.passed) == (0.0, False)


def test_p_values_of_equal_laws_are_spread_evenly():
    pairs = [two_sample_test(draw(LAW, 400, 2 * i)[:, None], draw(LAW, 300, 2 * i + 1)[:, None]) for i in range(400)]
    values = [pair.p_value for pair in pairs]
    assert 0.15 < np.mean(np.array(values) < 0.25) < 0.35
    assert 0.40 < np.mean(np.array(values) < 0.50) < 0.60
    assert all(pair.passed for pair in pairs)


def test_a_small_bias_is_seen():
    biased = LAW + np.array([0.02, -0.02, 0, 0])
    honest = [draw(LAW, 40_000, seed) for seed in (0, 1)]
    assert two_sample_test(honest[0][:, None], honest[1][:, None]).passed
    assert law_test(honest[0], LAW).passed
    assert not two_sample_test(honest[0][:, None], draw(biased, 40_000, 2)[:, None]).passed
    assert not law_test(draw(biased, 40_000, 2), LAW).passed


def test_joint_tests_see_what_marginals_hide():
    one, other = draw([0.5, 0.5], 4000, 0), draw([0.5, 0.5], 4000, 1)
    independent, tied = np.stack([one, other], axis=1), np.stack([one, one], axis=1)
    assert two_sample_test(independent[:, 1:], tied[:, 1:]).passed
    assert not two_sample_test(independent, tied).passed


def test_rare_cells_are_pooled():
    common, rare = np.repeat([0, 1], 500), np.arange(100, 160)
    test = two_sample_test(np.concatenate([common, rare[:30]])[:, None], np.concatenate([common, rare[30:]])[:, None])
    assert test.degrees == 2
    assert test.passed  # each rare id alone is in one sample only


def test_a_pool_that_is_too_small_takes_in_the_next_cell():
    tokens = np.concatenate([np.repeat([0, 1, 2], [500, 300, 100]), [3, 4, 5]])[:, None]
    assert two_sample_test(tokens, tokens).degrees == 2


def test_one_cell_tests_nothing():
    test = two_sample_test(np.arange(8)[:, None], np.arange(8)[:, None])
    assert (test.degrees, test.p_value, test.passed) == (0, None, None)


# ---- Tokens of many laws as one sample, and several tests as one ----

MIX = [0.1, 0.4, 0.1, 0.4]


def test_places_by_hand():
    """The likelier tokens come first, the lower id among equals; a draw spreads each token over its own mass."""
    log_probs = jnp.log(jnp.array([MIX] * 5))
    found = places(jnp.array([0.0, 0.5, 0.5, 0.5, 1.0]), jnp.array([1, 3, 0, 2, 2]), log_probs)
    np.testing.assert_allclose(found, [0, 0.6, 0.85, 0.95, 1], atol=1e-6)
    assert found.max() < 1


def test_a_forbidden_token_fails():
    log_probs = jnp.log(jnp.array([[0.5, 0.0, 0.5]]))
    found = np.tile(places(jnp.array([0.5]), jnp.array([1]), log_probs), 1000)
    assert np.isnan(found).all()
    assert uniformity(found) == 0


@pytest.mark.parametrize(("shift", "right"), [(0.0, True), (0.05, False)])
def test_places_are_uniform_under_their_own_laws_only(shift, right):
    """20,000 tokens of as many laws; of the wrong ones, part of the mass went to the likeliest token."""
    rng = np.random.default_rng(0)
    laws = rng.dirichlet(np.ones(6), 20_000)
    drawn = (1 - shift) * laws + shift * np.eye(6)[laws.argmax(axis=1)]
    tokens = (drawn.cumsum(axis=1) < rng.random((20_000, 1))).sum(axis=1)
    draws = jax.random.uniform(jax.random.key(0), (20_000,))
    found = np.asarray(places(draws, jnp.asarray(np.minimum(tokens, 5)), jnp.log(jnp.asarray(laws, jnp.float32))))
    assert (uniformity(found) > 1e-4) == right


def test_combined_is_a_p_value():
    """The smallest of 20 independent p-values is below 0.05 most of the time; together they are below it rarely."""
    drawn = np.random.default_rng(1).random((2000, 20))
    together = np.array([combined(row) for row in drawn])
    assert np.mean(drawn.min(axis=1) < 0.05) > 0.6
    assert np.mean(together < 0.05) == pytest.approx(0.05, abs=0.015)
    assert combined([0.5, 0.9]) == 1


def test_uniformity_as_a_test_may_have_nothing_to_say():
    even = np.linspace(0, 1, 200, endpoint=False)
    assert uniformity_test(even).p_value == uniformity(even) > 0.5
    assert uniformity_test(even).degrees == 15
    assert uniformity_test(even**2).passed is False
    assert uniformity_test(even[:100]).passed is None
    assert uniformity_test(np.append(even, np.nan)).p_value == uniformity(np.append(even, np.nan)) == 0
    with pytest.raises(ValueError, match="draw more"):
        uniformity(even[:100])
