"""The jitted acceptance rules: their law by Monte Carlo, and row by row against the reference under the same noise."""

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from decoding import fast_jit, row_noise
from reference import BLOCK, REJECTION, Rule, g_test

from specjax.sampling import categorical
from specjax.types import Draft, Verdict
from specjax.verify import Block, ExactMatch, Greedy, Rejection

EXACT = {"rejection": REJECTION, "block": BLOCK}

B, M, V = 40_000, 3, 4
"""Rows, 10,000 of each draft length from 0 to M."""
LENGTH = np.arange(B) % (M + 1)
KEYS = jax.random.split(jax.random.key(11), B)
START = (np.arange(B) // 4) % 5
SURE = ("sure rejection", "sure block", "sure exact", "sure greedy")
FIXED = ("fixed rejection", "fixed block")
DRAWN = ("rejection", "block", "exact")


@fast_jit
def judged(keys: Any, start: Any, length: Any, tokens: Any, log_q: Any, log_p: Any) -> tuple[Any, Any, Any]:
    """Every rule's verdict, on drafts that were drawn with its own keys and on given tokens; and those drafts."""
    apart, shared = (categorical(rule.draft_keys(keys, start, M), log_q) for rule in (Rejection(), ExactMatch()))
    verdicts = {"exact": ExactMatch()(keys, start, Draft(tokens=shared, length=length, log_probs=log_q), log_p)}
    sure = Draft(tokens=tokens, length=length)
    for name, rule in (("rejection", Rejection()), ("block", Block())):
        verdicts[name] = rule(keys, start, Draft(tokens=apart, length=length, log_probs=log_q), log_p)
        verdicts[f"fixed {name}"] = rule(keys, start, sure.replace(log_probs=log_q), log_p)
        verdicts[f"sure {name}"] = rule(keys, start, sure, log_p)
    verdicts["sure exact"] = ExactMatch()(keys, start, sure, log_p)
    verdicts["sure greedy"] = Greedy()(keys, start, sure, log_p)
    return verdicts, apart, shared


def judge(p: Any, q: Any, tokens: Any, length: Any = LENGTH) -> tuple[dict[str, Verdict], np.ndarray, np.ndarray]:
    """The same from laws `[M + 1, V]`, or one for each row, in NumPy."""
    with np.errstate(divide="ignore"):
        log_p, log_q = (jnp.asarray(np.log(np.asarray(law, np.float32))) for law in (p, q))
    log_p, log_q = jnp.broadcast_to(log_p, (B, M + 1, V)), jnp.broadcast_to(log_q, (B, M, V))
    tokens = jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), (B, M))
    return jax.tree.map(np.asarray, judged(KEYS, jnp.asarray(START), jnp.asarray(length), tokens, log_q, log_p))


RNG = np.random.default_rng(4)
P, Q = RNG.dirichlet(np.ones(V), M + 1), RNG.dirichlet(np.ones(V), M)
P[1, 2] = Q[2, 0] = 0
P, Q = P / P.sum(axis=1, keepdims=True), Q / Q.sum(axis=1, keepdims=True)
GIVEN = (3, 1, 2)


@pytest.fixture(scope="module")
def verdicts() -> tuple[dict[str, Verdict], np.ndarray, np.ndarray]:
    return judge(P, Q, GIVEN)


def emitted_law(rule: Rule, length: int, deterministic: bool) -> dict[tuple[int, ...], float]:
    """The law of what a window emits when the laws do not depend on the drafted tokens."""
    law: dict[tuple[int, ...], float] = {}
    drafts = [GIVEN[:length]] if deterministic else itertools.product(range(V), repeat=length)
    for draft in drafts:
        q = reference.one_hot_laws(draft, P) if deterministic else Q
        weight = math.prod(q[i][x] for i, x in enumerate(draft))
        for n, stop in enumerate(rule.stop_law(draft, P, q)) if weight else ():
            for token, mass in enumerate(rule.next_law(draft, P, q, n)):
                outcome = (*draft[:n], token)
                law[outcome] = law.get(outcome, 0) + weight * stop * mass
    return law


def emitted(verdict: Verdict, rows: Any) -> list[tuple[int, ...]]:
    return [tuple(t[: n + 1].tolist()) for t, n in zip(verdict.tokens[rows], verdict.num_accepted[rows], strict=True)]


def fits(outcomes: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> bool:
    counts = dict.fromkeys(law, 0)
    for outcome in outcomes:
        counts[outcome] += 1
    return g_test(list(counts.values()), list(law.values())) > 1e-4


@pytest.mark.parametrize("length", range(M + 1))
@pytest.mark.parametrize("name", ["rejection", "block", "sure rejection", "sure block"])
def test_jitted_rule_emits_its_law(verdicts, name, length):
    rule, rows = EXACT[name.split()[-1]], length == LENGTH
    assert fits(emitted(verdicts[0][name], rows), emitted_law(rule, length, name.startswith("sure")))


def test_drafts_follow_their_law(verdicts):
    for drafts in verdicts[1:]:
        counts = np.zeros((V,) * M)
        np.add.at(counts, tuple(drafts.T), 1)
        assert g_test(counts, np.einsum("a,b,c->abc", *Q)) > 1e-4


@pytest.mark.parametrize("name", ["exact", "sure exact"])
def test_exact_match_emits_the_targets_own_draws(verdicts, name):
    """All M + 1 tokens are independent draws from the target, whatever the draft: the same for both drafts."""
    tokens = verdicts[0][name].tokens
    counts = np.zeros((V,) * (M + 1))
    np.add.at(counts, tuple(tokens.T), 1)
    assert g_test(counts, np.einsum("a,b,c,d->abcd", *P)) > 1e-4
    np.testing.assert_array_equal(tokens, verdicts[0]["exact"].tokens)


def test_exact_match_keeps_what_agrees(verdicts):
    for name, drafts in (("exact", verdicts[2]), ("sure exact", np.broadcast_to(GIVEN, (B, M)))):
        verdict = verdicts[0][name]
        agreed = (drafts == verdict.tokens[:, :M]) & (np.arange(M) < LENGTH[:, None])
        np.testing.assert_array_equal(verdict.num_accepted, np.cumprod(agreed, axis=1).sum(axis=1))


def test_shared_noise_matches_as_often_as_it_should():
    """The vector of algorithms.md, and of independent noise beside it."""
    p, q = np.array([9, 5, 3, 2]) / 19, np.array([4, 3, 3, 5]) / 15
    match = reference.shared_noise_match(p, q)
    found, apart, _ = judge(np.tile(p, (M + 1, 1)), np.tile(q, (M, 1)), GIVEN, np.full(B, M))
    rates = [match**n * (1 - match) for n in range(M)] + [match**M]
    assert g_test(np.bincount(found["exact"].num_accepted, minlength=M + 1), rates) > 1e-4
    agreed = int((apart == found["exact"].tokens[:, :M]).sum())
    alone = float(p @ q)
    assert g_test([agreed, B * M - agreed], [alone, 1 - alone]) > 1e-4
    assert match > alone + 0.2


def test_greedy_keeps_what_is_most_likely(verdicts):
    best = P.argmax(axis=1)
    verdict = verdicts[0]["sure greedy"]
    agreed = (best[:M] == GIVEN) & (np.arange(M) < LENGTH[:, None])
    np.testing.assert_array_equal(verdict.num_accepted, np.cumprod(agreed, axis=1).sum(axis=1))
    np.testing.assert_array_equal(verdict.tokens, np.broadcast_to(best, (B, M + 1)))


# ---- Row by row against the reference, with the library's own randomness ----

ROWS = range(600)
REFERENCES: dict[str, Callable[..., tuple[int, int]]] = {
    "rejection": reference.rejection_verdict,
    "block": reference.block_verdict,
    "exact": reference.exact_match_verdict,
    "greedy": reference.greedy_verdict,
}


@pytest.fixture(scope="module")
def random_rows() -> tuple[Any, ...]:
    """Laws of each row's own: sharp, flat, one-hot, with impossible tokens, p equal to q."""
    rng = np.random.default_rng(8)
    p, q = (random_laws(rng, size) for size in (M + 1, M))
    p[::5, :M] = q[::5]
    tokens = rng.integers(0, V, (B, M))
    tokens = np.where(rng.random((B, M)) < 0.5, p[:, :M].argmax(axis=-1), tokens)
    tokens = np.where(np.arange(M) < LENGTH[:, None], tokens, rng.choice([-1, V, 0, V - 1, 10**9], (B, M)))
    return p, q, tokens, *judge(p, q, tokens)


def random_laws(rng: np.random.Generator, size: int) -> np.ndarray:
    weights = rng.dirichlet(np.full(V, 0.7), (B, size)) * (rng.random((B, size, V)) > 0.15)
    weights[..., 0] += weights.sum(axis=-1) == 0
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("name", DRAWN + SURE)
def test_each_row_is_judged_like_the_reference(random_rows, name):
    p, q, tokens, found, apart, shared = random_rows
    kind = name.split()[-1]
    verdict, drafts = found[name], {"exact": shared, "sure": tokens}.get(name.split()[0], apart)
    for row in ROWS:
        length = LENGTH[row]
        laws = None if name.startswith("sure") else q[row, :length].astype(np.float64)
        arguments = drafts[row, :length].tolist(), p[row, : length + 1].astype(np.float64), laws
        kept, following = REFERENCES[kind](int(START[row]), *arguments, noise_of(row))
        assert verdict.num_accepted[row] == kept
        assert verdict.tokens[row, : kept + 1].tolist() == [*drafts[row, :kept].tolist(), following]


@cache
def noise_of(row: int) -> reference.Noise:
    return row_noise(KEYS[row], V, size=9, window=M)


def test_every_outcome_is_met(random_rows):
    """Or the comparison above would prove little: each rule keeps and rejects at each place."""
    for name in DRAWN + SURE:
        accepted = random_rows[3][name].num_accepted[np.array(ROWS)]
        for length in range(M + 1):
            assert set(accepted[LENGTH[ROWS] == length].tolist()) == set(range(length + 1))


# ---- What must never be accepted, and what always ----


@pytest.mark.parametrize("name", DRAWN + FIXED + SURE)
def test_no_more_is_accepted_than_was_drafted(random_rows, name):
    """And the token that ends the window is never an impossible one."""
    verdict = random_rows[3][name]
    assert (verdict.num_accepted <= LENGTH).all()
    assert (verdict.num_accepted >= 0).all()
    index = np.arange(B), verdict.num_accepted
    assert (random_rows[0][(*index, verdict.tokens[index])] > 0).all()


@cache
def judged_scenario(name: str, filler: int = 0) -> dict[str, Verdict]:
    likely = np.eye(V)[V - 1] * 0.96 + 0.01
    p, q, tokens = {
        "outside": (likely, likely, [V - 1, filler, V - 1]),
        "impossible for the drafter": ([0.4, 0.3, 0.2, 0.1], [0.0, 0.5, 0.3, 0.2], [0, 1, 1]),
        "forbidden by the target": ([0.0, 0.5, 0.3, 0.2], [0.4, 0.3, 0.2, 0.1], [0, 1, 1]),
    }[name]
    return judge(np.tile(p, (M + 1, 1)), np.tile(q, (M, 1)), tokens, np.full(B, M))[0]


@pytest.mark.parametrize("filler", [-1, V, 10**9, -(10**9)])
@pytest.mark.parametrize("name", FIXED + SURE)
def test_ids_outside_the_vocabulary_are_rejected(name, filler):
    """Though the last id, which -1 would wrap to and V clamp to, has nearly all the mass; and the law stays right."""
    verdict = judged_scenario("outside", filler)[name]
    assert verdict.num_accepted.max() == 1
    kept = verdict.num_accepted == 1
    assert kept.mean() > 0.9
    likely = np.eye(V)[V - 1] if name == "sure greedy" else np.eye(V)[V - 1] * 0.96 + 0.01
    assert g_test(np.bincount(verdict.tokens[kept, 1], minlength=V), likely) > 1e-4


@pytest.mark.parametrize("name", FIXED)
def test_a_token_that_the_drafter_could_not_draw_is_rejected(name):
    """q = 0 always rejects: the ratio p / q does not exist."""
    assert judged_scenario("impossible for the drafter")[name].num_accepted.max() == 0


@pytest.mark.parametrize("name", FIXED + SURE)
def test_a_token_that_the_target_forbids_is_rejected(name):
    verdict = judged_scenario("forbidden by the target")[name]
    assert verdict.num_accepted.max() == 0
    assert verdict.tokens[:, 0].min() > 0


def test_equal_laws_are_always_accepted():
    """The same float32 array on both sides: no ratio is a shade below one."""
    laws = np.random.default_rng(0).dirichlet(np.full(V, 0.3), (B, M + 1)).astype(np.float32)
    found = judge(laws, laws[:, :M], GIVEN)[0]
    for name in DRAWN:
        np.testing.assert_array_equal(found[name].num_accepted, LENGTH)


# ---- Keys ----


@pytest.mark.parametrize("rule", [Rejection(), Block(), Greedy(), ExactMatch()])
def test_rules_are_strategies(rule):
    """Equal rules hash equal, so that they never retrace; draft keys come one per drafted token."""
    assert rule == type(rule)()
    assert hash(rule) == hash(type(rule)())
    keys = rule.draft_keys(KEYS[:2], jnp.array([3, 4]), M)
    assert keys.shape == (2, M)
    assert len(np.unique(jax.random.key_data(keys).reshape(-1, 2), axis=0)) == 2 * M
