"""Sampling on the jitted decoder: what ships passes, and a small bias does not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.report.goodness_of_fit import suffices
from specjax.testing import monte_carlo
from specjax.testing.kit import PROBES, ROWS
from specjax.testing.monte_carlo import (
    CHUNK,
    KINDS,
    RULES,
    WINDOW,
    check_distribution,
    check_experiment,
    draw,
    law_tests,
    prompt_of,
    row_groups,
    sampled_draft,
    scripted_draft,
)
from specjax.verify import Rejection


@pytest.fixture(scope="module", autouse=True)
def made_once():
    """Each source, and each config's program."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("table_source", "generator"):
            patch.setattr(monte_carlo, name, functools.cache(getattr(monte_carlo, name)))
        yield


@pytest.fixture(scope="module")
def source() -> monte_carlo.Source:
    return monte_carlo.table_source(8)


@pytest.mark.parametrize(("size", "cases"), [(8, 4 + 4 + 5 + 5 + 4), (64, 4 + 4 + 5 + 5)])
def test_what_ships_keeps_the_law(size, cases):
    findings = list(check_distribution(ROWS, jax.random.key(0), [size]))
    assert len(findings) == cases
    assert [finding for finding in findings if not finding.passed] == []


def test_drafters_that_ship_report_the_laws_they_draw_from():
    findings = list(PROBES["drafts"]())
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
    finding, drafted = check_experiment(chosen, rows, jax.random.key(5), monte_carlo.generator(chosen.config))
    assert finding.count >= rows
    assert drafted.passed
    return finding.value


def test_a_bias_of_003_in_one_token_is_seen(source):
    assert p_value(source, Nudged(favoured=(7,)), 1_000_000) < 1e-10


def test_a_bias_of_003_where_it_is_hardest_to_see_is_seen(source):
    """Every probability is off by about the same part of it, up in one half of the mass and down in the other."""
    favoured = (0, 2, 3, 5, 6, 7)
    first = source.laws["T = 1"].sum(axis=(1, 2, 3))
    assert 0.4 < first[list(favoured)].sum() < 0.6
    assert p_value(source, Nudged(favoured=favoured), ROWS) < 1e-4


# ---- Rows and their laws ----


def test_rows_hold_every_case(source):
    chosen = scripted_draft(source)
    groups, cases = row_groups(chosen)
    assert len(groups) == CHUNK
    assert chosen.rules == tuple(RULES)
    assert set(cases) == {
        (rule, limit, kind)
        for rule in chosen.rules
        for limit in (0, 1, WINDOW)
        for kind in KINDS
        if rule != "greedy" or kind.startswith("T = 0")
    }
    assert np.bincount(groups).min() > CHUNK / 4 / 7 / 4 / 2
    more = np.bincount(groups, drafts_the_likeliest(chosen)) - np.bincount(groups) / 2
    assert more.min() >= 0
    assert more.max() < 6  # the random ones that happen to be the likeliest
    lengths = {len(prompt_of(kind)) for kind in KINDS}
    assert lengths == {2, 3, 4, 5, 6}


def drafts_the_likeliest(chosen: monte_carlo.Experiment) -> np.ndarray:
    """`[CHUNK]`, of each row's first whole window; random tokens do so once in 512."""
    tokens, best = np.asarray(chosen.params.draft["draft"].tokens), np.asarray(chosen.source.params).argmax(axis=-1)
    prompt, length, _ = monte_carlo.inputs(chosen)
    rows, start = np.arange(CHUNK), np.asarray(length)
    text, found = np.asarray(prompt)[rows, start - 1], np.ones(CHUNK, bool)
    for offset in range(WINDOW):
        text = best[text]
        found &= tokens[rows, start, offset] == text
    return found


def test_every_row_is_counted_once_in_its_group(source):
    chosen = sampled_draft(source)
    groups, _ = row_groups(chosen)
    found = draw(chosen, 1, jax.random.key(0), monte_carlo.generator(chosen.config))
    np.testing.assert_array_equal(found.counts.sum(axis=1), np.bincount(groups))
    limits = np.array([limit for _, limit, _ in row_groups(chosen)[1]])
    assert ((found.drafted == 0) == (limits == 0)).all()
    assert ((found.accepted > 0) == (limits > 0)).all()


def test_law_tests_look_at_every_length(source):
    law = source.laws["T = 1"]
    counts = np.random.default_rng(0).multinomial(100_000, law.ravel())
    values = law_tests(counts, law)
    assert list(values) == ["first 1", "first 2", "first 3", "first 4", "token 2", "token 3", "token 4"]
    assert min(values.values()) > 1e-4
    swapped = law_tests(counts.reshape(8, 512)[::-1], law)
    assert swapped["first 1"] < 1e-4
    last = law_tests(counts.reshape(512, 8)[:, ::-1], law)
    assert last["first 3"] > 1e-4 > last["first 4"]
    assert last["token 3"] > 1e-4 > last["token 4"]


@pytest.mark.parametrize("place", range(1, 4))
def test_a_bias_of_a_later_token_shows_in_its_own_law(place):
    """Where the joint law has too many cells to see it."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 8, (4_000, 4))
    tokens[:, place] *= rng.random(4_000) > 0.12
    counts = np.zeros((8,) * 4, int)
    np.add.at(counts, tuple(tokens.T), 1)
    values = law_tests(counts, np.full((8,) * 4, 8.0**-4))
    assert values[f"token {place + 1}"] < 1e-10
    assert min(value for test, value in values.items() if test != f"token {place + 1}") > values[f"token {place + 1}"]


def test_an_impossible_token_fails_however_few_rows_there_are(source):
    law = source.laws["top-k 5"]
    counts = np.zeros(law.shape, int)
    counts[np.unravel_index(law.argmax(), law.shape)] = 3
    assert law_tests(counts, law) == {}
    for place in range(law.ndim):
        impossible = np.zeros(law.shape, int)
        impossible[tuple(np.argwhere(np.moveaxis(law, place, 0) == 0)[0])] = 1
        assert 0 in law_tests(counts + np.moveaxis(impossible, 0, place), law).values()


def test_a_run_without_rows_or_drafts_is_no_pass(source):
    chosen = sampled_draft(source, kinds=["T = 1"], limits=(0,))
    generate = monte_carlo.generator(chosen.config)
    with pytest.raises(ValueError, match="expected rows to draw, 1 or more, got 0"):
        draw(chosen, 0, jax.random.key(0), generate)
    findings = list(check_experiment(chosen, 1, jax.random.key(0), generate))
    passed = [(finding.check, finding.passed) for finding in findings]
    assert passed == [*[("distribution", True)] * 3, ("drafted", False)]


def test_bonus_tokens_are_tested(source):
    """A draft of K tokens has its bonus token at index K: of whole windows at V = 8, of K = 2 at V = 64."""
    assert source.shape == (8,) * (WINDOW + 1)
    assert monte_carlo.table_source(64).shape == (64,) * 3


def test_samples_too_small_for_a_law_leave_it_out(source):
    law = source.laws["T = 1"]
    counts = np.random.default_rng(0).multinomial(150, law.ravel())
    assert list(law_tests(counts, law)) == ["first 1", "first 2", "token 2", "token 3", "token 4"]
    assert suffices(5, np.eye(3)[1])
    assert not suffices(15, np.array([0.5, 0.5]))
    assert suffices(20, np.array([0.5, 0.5]))


def test_laws_of_kinds_differ(source):
    first = {kind: law.sum(axis=(1, 2, 3)) for kind, law in source.laws.items()}
    assert np.count_nonzero(first["top-k 5"]) == 5
    assert np.count_nonzero(first["T = 0"]) == 1
    assert np.count_nonzero(first["min-p .1"]) < 8
    assert all(law.sum() == pytest.approx(1) for law in source.laws.values())
