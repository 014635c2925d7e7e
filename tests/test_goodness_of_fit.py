import itertools
import math

import numpy as np
import pytest
from goodness_of_fit import chi_square_survival, g_test


@pytest.mark.parametrize(
    ("degrees", "statistic", "right"),
    [
        (1, 3.841458820694124, 0.05),
        (1, 25.0, math.erfc(math.sqrt(12.5))),
        (2, 0.1, math.exp(-0.05)),
        (2, 80.0, math.exp(-40)),
        (10, 18.307038053275146, 0.05),
        (26, 38.885138659830055, 0.05),
        (100, 124.34211340400407, 0.05),
        *(
            (510, x, math.fsum(math.exp(k * math.log(x / 2) - x / 2 - math.lgamma(k + 1)) for k in range(255)))
            for x in (400.0, 509.0, 513.0, 700.0)
        ),
    ],
)
def test_chi_square_survival(degrees, statistic, right):
    assert chi_square_survival(statistic, degrees) == pytest.approx(right, rel=1e-9)


def test_g_test_by_hand():
    statistic = 2 * (60 * math.log(1.2) + 40 * math.log(0.8))
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
