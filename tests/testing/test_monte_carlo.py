"""Sampling on the jitted decoder: what ships passes, and a small bias does not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.report.goodness_of_fit import suffices
from specjax.testing import monte_carlo
from specjax.testing.kit import ROWS, check_shipped_drafts
from specjax.testing.monte_carlo import (
    CHUNK,
    KINDS,
    WINDOW,
    check_distribution,
    check_experiment,
    draw,
    generator,
    law_tests,
    prompt_of,
    row_groups,
    sampled_draft,
    scripted_draft,
    table_source,
)
from specjax.verify import Rejection


@pytest.fixture(scope="module")
def source() -> monte_carlo.Source:
    return table_source(8)


@pytest.mark.parametrize(("size", "cases"), [(8, 3 + 3 + 4 + 4 + 3), (64, 3 + 3 + 4 + 4)])
def test_what_ships_keeps_the_law(size, cases):
    findings = list(check_distribution(ROWS, jax.random.key(0), [size]))
    assert len(findings) == cases
    assert [finding for finding in findings if not finding.passed] == []


def test_drafters_that_ship_report_the_laws_they_draw_from():
    findings = list(check_shipped_drafts(200_000, jax.random.key(0)))
    assert len(findings) == 2
    assert [finding for finding in findings if not finding.passed] == []


# ---- A bias of TV .003 is seen ----


@dataclasses.dataclass(frozen=True)
class Nudged(Rejection):
    """Now and then the first token of a text is drawn from some of the tokens only: the joint law is off by TV .003."""

    favoured: tuple[int, ...] = ()

    def __call__(self, keys, start, draft, log_probs):
        verdict = super().__call__(keys, start, draft, log_probs)
        coins, draws = (jax.vmap(jax.random.fold_in, (0, None))(keys, role) for role in (1000, 1001))
        allowed = jnp.isin(jnp.arange(log_probs.shape[-1]), jnp.array(self.favoured))
        some = jnp.where(allowed, log_probs[:, 0], -jnp.inf)
        mass = jnp.exp(some).sum(axis=-1)
        chosen = jax.vmap(jax.random.uniform)(coins) < 0.003 / (1 - mass)
        chosen &= start == len(prompt_of("T = 1"))
        token = jax.vmap(jax.random.categorical)(draws, some)
        tokens = verdict.tokens.at[:, 0].set(jnp.where(chosen, token, verdict.tokens[:, 0]))
        return verdict.replace(tokens=tokens, num_accepted=jnp.where(chosen, 0, verdict.num_accepted))


def p_value(source: monte_carlo.Source, rule: Rejection, rows: int) -> float:
    chosen = sampled_draft(source, {"rule": rule}, ["T = 1"], limits=(WINDOW,))
    (finding,) = check_experiment(chosen, rows, jax.random.key(5), generator(chosen.config))
    assert finding.count >= rows
    return finding.value


def test_a_bias_of_003_in_one_token_is_seen(source):
    assert p_value(source, Nudged(favoured=(7,)), 1_000_000) < 1e-10


def test_a_bias_of_003_where_it_is_hardest_to_see_is_seen(source):
    """Every probability is off by about the same part of it, up in one half of the mass and down in the other."""
    favoured = (0, 2, 3, 5, 6, 7)
    first = source.laws["T = 1"].sum(axis=(1, 2))
    assert 0.4 < first[list(favoured)].sum() < 0.6
    assert p_value(source, Nudged(favoured=favoured), ROWS) < 1e-4


# ---- Rows and their laws ----


def test_rows_hold_every_case(source):
    chosen = scripted_draft(source)
    groups, cases = row_groups(chosen)
    assert len(groups) == CHUNK
    assert set(cases) == {
        (rule, limit, kind)
        for rule in chosen.rules
        for limit in (0, 1, WINDOW)
        for kind in KINDS
        if rule != "greedy" or kind.startswith("T = 0")
    }
    assert np.bincount(groups).min() > CHUNK / 4 / 7 / 4 / 2
    lengths = {len(prompt_of(kind)) for kind in KINDS}
    assert lengths == {2, 3, 4, 5, 6}


def test_every_row_is_counted_once_in_its_group(source):
    chosen = sampled_draft(source)
    groups, _ = row_groups(chosen)
    counts = draw(chosen, 1, jax.random.key(0), generator(chosen.config))
    np.testing.assert_array_equal(counts.sum(axis=1), np.bincount(groups))


def test_law_tests_look_at_every_length(source):
    law = source.laws["T = 1"]
    counts = np.random.default_rng(0).multinomial(100_000, law.ravel())
    values = law_tests(counts, law)
    assert list(values) == ["first 1", "first 2", "first 3"]
    assert min(values.values()) > 1e-4
    swapped = law_tests(counts.reshape(8, 64)[::-1], law)
    assert swapped["first 1"] < 1e-4
    last = law_tests(counts.reshape(64, 8)[:, ::-1], law)
    assert last["first 1"] > 1e-4 > last["first 3"]


def test_samples_too_small_for_a_law_leave_it_out(source):
    law = source.laws["T = 1"]
    counts = np.random.default_rng(0).multinomial(150, law.ravel())
    assert list(law_tests(counts, law)) == ["first 1", "first 2"]
    assert suffices(5, np.eye(3)[1])
    assert not suffices(15, np.array([0.5, 0.5]))
    assert suffices(20, np.array([0.5, 0.5]))


def test_laws_of_kinds_differ(source):
    first = {kind: law.sum(axis=(1, 2)) for kind, law in source.laws.items()}
    assert np.count_nonzero(first["top-k 5"]) == 5
    assert np.count_nonzero(first["T = 0"]) == 1
    assert np.count_nonzero(first["min-p .1"]) < 8
    assert all(law.sum() == pytest.approx(1) for law in source.laws.values())
