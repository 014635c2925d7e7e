"""The enumeration itself: it agrees with fractions on right and wrong rules, and sees what is wrong."""

import dataclasses
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import BLOCK, REJECTION

from specjax import verify
from specjax.testing import closed_form, context_free, exact, fixed_windows, sampled_window, shared_noise
from specjax.testing.enumeration import _end_law
from specjax.testing.exactness import RULES, check_acceptance, check_joint_laws, pair
from specjax.testing.laws import continuation, every_text, joint_law, prefix_laws, processed_laws, reader, text_law
from specjax.testing.models import HistoryModel, history_params
from specjax.testing.mutations import MUTATIONS
from specjax.verify import Block, ExactMatch, Greedy, Rejection

P, Q = np.array([9, 5, 3, 2, 1]) / 20, np.array([4, 3, 3, 5, 5]) / 20
TOY = context_free([1 / 3, 2 / 3]), context_free([2 / 3, 1 / 3])


# ---- What ships ----


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_keeps_the_joint_law(name, dtype):
    findings = list(check_joint_laws({name: RULES[name]}, dtype=dtype))
    assert len(findings) == 6
    assert [finding for finding in findings if not finding.passed] == []


def test_every_rule_accepts_what_it_should():
    findings = list(check_acceptance())
    assert {finding.case for finding in findings} == {
        "rejection",
        "block",
        "exact_match",
        "block accepts no fewer than rejection",
    }
    assert [finding for finding in findings if not finding.passed] == []


# ---- Against arithmetic with fractions ----


def fraction_model(scale: int, step: int, shift: int, modulus: int) -> reference.Model:
    def law(prefix: tuple[int, ...]) -> list[Fraction]:
        code = 0
        for token in prefix:
            code = code * 4 + token + 1
        weights = [1 + (scale * code + step * x + shift) % modulus for x in range(3)]
        return [Fraction(weight, sum(weights)) for weight in weights]

    return law


FRACTIONS = fraction_model(7, 3, 2, 11), fraction_model(5, 8, 6, 13)
NO_TAU = reference.Rule(reference.block_stop_law, reference.rejection_next_law)


@pytest.mark.parametrize(
    ("verifier", "rule"), [(Rejection(), REJECTION), (Block(), BLOCK), ("block: residual without P_tau", NO_TAU)]
)
def test_joint_law_and_acceptance_equal_the_reference(verifier, rule):
    """Of a wrong rule too: what the enumeration computes is the law of the rule, not of the target."""
    right = reference.joint_law(*FRACTIONS, 2, rule)
    with jax.enable_x64(True):
        window = sampled_window(*pair(3), vocab_size=3, num_tokens=2)
        if isinstance(verifier, str):
            with mutation(verifier).applied():
                found = exact(Block(), window)
        else:
            found = exact(verifier, window)
    np.testing.assert_allclose(found.joint[0], np.reshape([float(x) for x in right.values()], (3, 3, 3)), atol=1e-12)
    accepted = reference.expected_accepted(*FRACTIONS, 2, rule)
    assert found.accepted[0] == pytest.approx(float(accepted), abs=1e-12)
    assert (found.error < 1e-12) == (rule is not NO_TAU)


@pytest.mark.parametrize(("verifier", "rule"), [(Rejection(), REJECTION), (Block(), BLOCK)])
def test_deterministic_drafts_are_one_hot_laws(verifier, rule):
    """Their closed forms, which need no law of the draft, accept what the reference does with a one-hot law."""
    with jax.enable_x64(True):
        found = exact(verifier, fixed_windows(pair(3)[0], vocab_size=3, num_tokens=2))
    for draft, accepted in zip(every_text(3, 2).tolist(), found.accepted, strict=True):
        right = reference.expected_accepted(FRACTIONS[0], lambda prefix, draft=draft: certain(draft, prefix), 2, rule)
        assert accepted == pytest.approx(float(right), abs=1e-12)


def certain(draft: list[int], prefix: tuple[int, ...]) -> list[int]:
    return [int(x == draft[len(prefix)]) for x in range(3)]


@pytest.mark.parametrize("verifier", [Rejection(), Block(), ExactMatch()])
def test_equal_laws_accept_everything(verifier):
    with jax.enable_x64(True):
        found = exact(verifier, sampled_window(pair(3)[0], pair(3)[0], vocab_size=3, num_tokens=2))
    assert found.accepted[0] == pytest.approx(2, abs=1e-12)


def mutation(name: str):
    return next(item for item in MUTATIONS if item.name == name)


def test_the_public_script_with_an_uncapped_ratio():
    """E = 4/3 in place of 11/9, at TV 1/9 from the target."""
    with jax.enable_x64(True), mutation("block: uncapped last ratio").applied():
        found = exact(Block(), sampled_window(*TOY, vocab_size=2, num_tokens=2))
    assert found.accepted[0] == pytest.approx(4 / 3, abs=1e-12)
    assert found.total_variation == pytest.approx(1 / 9, abs=1e-12)


# ---- The call that ships ----


@pytest.mark.parametrize("length", [2, 1])
@pytest.mark.parametrize("rule", [Rejection(), Block()])
def test_the_call_that_ships_ends_as_the_enumeration_does(monkeypatch, rule, length):
    """Whatever sides the coins show: as many drafted tokens are kept, and the last one is drawn from the same law."""
    window, drawn = sampled_window(*pair(3), vocab_size=3, num_tokens=2, length=length), []
    rows, chances = len(window.chance), np.asarray(rule.chances(window.draft, window.log_probs)) * window.inside

    def draw(keys, log_law):
        drawn.append(np.exp(log_law))
        return jnp.full(rows, 7, jnp.int32)

    monkeypatch.setattr(verify, "categorical", draw)
    for sides in itertools.product([False, True], repeat=2):
        coins = jnp.broadcast_to(jnp.where(jnp.array(sides), 0.0, 1.0), (rows, 2))
        monkeypatch.setattr(verify, "_uniform", lambda keys, coins=coins: coins)
        keys, start = jax.random.split(jax.random.key(0), rows), jnp.zeros(rows, jnp.int32)
        verdict = rule(keys, start, window.draft, window.log_probs)
        possible = np.where(sides, chances, 1 - chances).prod(axis=1) > 0
        assert possible.any() == (length == 2 or not sides[1])
        kept = int(rule.count(jnp.array([sides]))[0])
        assert (np.asarray(verdict.num_accepted)[possible] == kept).all()
        law = _end_law(rule, window, kept)[possible]
        last = drawn.pop()[possible]
        np.testing.assert_allclose(last / last.sum(axis=1, keepdims=True), law, atol=1e-6)
        tokens = np.asarray(verdict.tokens)[possible]
        np.testing.assert_array_equal(tokens[:, :kept], np.asarray(window.draft.tokens)[possible, :kept])
        assert (tokens[:, kept] == 7).all()


# ---- Shared noise ----


def test_shared_noise_vector():
    """1 - TV is .65, and independent noise would match with .1875."""
    assert shared_noise(P, Q).trace() == pytest.approx(0.596536, abs=5e-7)
    assert np.minimum(P, Q).sum() == pytest.approx(0.65)
    assert pytest.approx(0.1875) == P @ Q


@pytest.mark.parametrize(
    ("p", "q"),
    [(P, Q), (P, P), ([0.5, 0.5, 0, 0, 0], [0, 0.3, 0.3, 0.4, 0]), ([0, 1, 0, 0, 0], Q), ([0.5, 0.5, 0], [0, 0, 1])],
)
def test_shared_noise_is_the_law_of_the_pair(p, q):
    p, q = np.asarray(p, float), np.asarray(q, float)
    law = shared_noise(p, q)
    np.testing.assert_allclose(law.sum(axis=1), p, atol=1e-15)
    np.testing.assert_allclose(law.sum(axis=0), q, atol=1e-15)
    gumbel = np.random.default_rng(0).gumbel(size=(100_000, len(p)))
    with np.errstate(divide="ignore"):
        pairs = (np.log(p) + gumbel).argmax(axis=1) * len(p) + (np.log(q) + gumbel).argmax(axis=1)
    assert reference.g_test(np.bincount(pairs, minlength=law.size), law.ravel()) > 1e-4


def test_shared_noise_of_many_laws_at_once():
    rng = np.random.default_rng(2)
    p, q = rng.dirichlet(np.ones(4), (2, 3)), rng.dirichlet(np.ones(4), (2, 3))
    np.testing.assert_allclose(shared_noise(p, q)[1, 2], shared_noise(p[1, 2], q[1, 2]), atol=1e-15)


def test_exact_match_law_shows_in_how_much_it_accepts():
    """Matches at two places: m + m^2, or with independent drafts what p and q agree on."""
    match = float(shared_noise(P, Q).trace())
    with jax.enable_x64(True):
        found = exact(ExactMatch(), sampled_window(context_free(P), context_free(Q), vocab_size=5, num_tokens=2))
        fixed = exact(ExactMatch(), fixed_windows(context_free(P), vocab_size=5, num_tokens=2))
    assert found.accepted[0] == pytest.approx(match + match**2, abs=1e-12)
    np.testing.assert_allclose(fixed.accepted.reshape(5, 5), P[:, None] * (1 + P), atol=1e-12)
    assert max(found.error, fixed.error) < 1e-12


# ---- What it refuses, and its parts ----


@dataclasses.dataclass(frozen=True)
class Strange:
    """No pure functions to drive."""

    def draft_keys(self, keys, start, num_tokens):
        return keys

    def __call__(self, keys, start, draft, log_probs):
        return None


def test_a_rule_that_cannot_be_driven_is_refused():
    with pytest.raises(ValueError, match="chances, count and leftover"):
        exact(Strange(), fixed_windows(TOY[0], vocab_size=2, num_tokens=1))


def test_a_law_that_cannot_be_sampled_is_refused():
    with pytest.raises(ValueError, match="finite maximum"):
        processed_laws(context_free([1.0, 0.0]), every_text(2, 1), (0,), {"stop_token_ids": [0], "min_tokens": 1})


def test_greedy_needs_certain_laws():
    """At temperature 1 the most likely token is not the target's draw."""
    with pytest.raises(ValueError, match="temperature 0 for a Greedy"):
        exact(Greedy(), sampled_window(*pair(3), vocab_size=3, num_tokens=2))


def test_texts_and_laws():
    assert every_text(3, 2).tolist() == [[a, b] for a in range(3) for b in range(3)]
    assert every_text(3, 0).shape == (1, 0)
    model = closed_form(3, 7, 3, 2, 11)
    with jax.enable_x64(True):
        laws = prefix_laws(processed_laws(model, every_text(3, 2), (0,), {}))
    assert [law.shape for law in laws] == [(3,), (3, 3), (3, 3, 3)]
    right = reference.autoregressive_law(FRACTIONS[0], 3)
    np.testing.assert_allclose(joint_law(laws).ravel(), [float(x) for x in right.values()], atol=1e-15)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 3}, {"repetition_penalty": 1.5}])
def test_text_law_is_the_reference_law(options):
    model, salt, prompt = HistoryModel(vocab_size=5), history_params(3), (4, 1)
    found = text_law(continuation(reader(model), salt, prompt), 5, 2, prompt, **options)
    sampling = reference.Sampling(**options)

    def law(text: tuple[int, ...]) -> np.ndarray:
        return reference.law(model.logits_after(salt, text), sampling, text, len(prompt))

    right = np.array([mass * law((*prompt, token)) for token, mass in enumerate(law(prompt))])
    np.testing.assert_allclose(found, right, atol=1e-6)


def test_gaps_are_impossible_tokens():
    with np.errstate(divide="ignore"):
        logits = np.asarray(closed_form(3, 7, 3, 2, 11, gaps=True, width=4)(jnp.asarray(every_text(3, 1))))
    assert np.isneginf(logits).sum(axis=-1).tolist() == [[2, 2]] * 3
