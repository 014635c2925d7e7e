import math
from fractions import Fraction

import numpy as np
import pytest
import reference
from reference import BLOCK, REJECTION, Noise, Rule

# ---- Acceptance rules, exactly ----

TOY_P, TOY_Q = (Fraction(1, 3), Fraction(2, 3)), (Fraction(2, 3), Fraction(1, 3))


def toy(probs):
    return lambda prefix: probs


def closed_form(vocab, scale, step, shift, modulus):
    """The context-dependent models of section 1.2, in Fractions."""

    def model(prefix):
        code = 0
        for token in prefix:
            code = code * (vocab + 1) + token + 1
        weights = [1 + (scale * code + step * x + shift) % modulus for x in range(vocab)]
        return [Fraction(weight, sum(weights)) for weight in weights]

    return model


def closed_form_pair(vocab):
    return closed_form(vocab, 7, 3, 2, 11), closed_form(vocab, 5, 8, 6, 13)


def uncapped_stop_law(draft, p, q):
    """The mistake of section 1.4: the last coin takes the joint ratio without the caps on the way."""
    joint = math.prod(p[i][x] / q[i][x] for i, x in enumerate(draft))
    passes = [1, *reference.block_thresholds(reference.block_ratios(draft, p, q), p, q)[:-1], min(1, joint)]
    return [passes[n] * math.prod(1 - h for h in passes[n + 1 :]) for n in range(len(passes))]


UNCAPPED = Rule(uncapped_stop_law, reference.block_next_law)


@pytest.mark.parametrize(("rule", "accepted"), [(REJECTION, Fraction(10, 9)), (BLOCK, Fraction(11, 9))])
def test_toy(rule, accepted):
    target, drafter = toy(TOY_P), toy(TOY_Q)
    assert reference.expected_accepted(target, drafter, 2, rule) == accepted
    assert reference.joint_law(target, drafter, 2, rule) == reference.autoregressive_law(target, 3)


@pytest.mark.parametrize(
    ("vocab", "num_tokens", "rejection", "block"),
    [
        (2, 2, Fraction(96, 95), Fraction(97, 90)),
        (2, 3, Fraction(4145257, 3423420), Fraction(177523, 131670)),
        (3, 2, Fraction(18308159, 13372200), Fraction(83679, 59432)),
    ],
)
def test_context_dependent_models(vocab, num_tokens, rejection, block):
    target, drafter = closed_form_pair(vocab)
    right = reference.autoregressive_law(target, num_tokens + 1)
    for rule, accepted in ((REJECTION, rejection), (BLOCK, block)):
        assert reference.expected_accepted(target, drafter, num_tokens, rule) == accepted
        assert reference.joint_law(target, drafter, num_tokens, rule) == right


def test_enumeration_sees_a_biased_rule():
    target, drafter = toy(TOY_P), toy(TOY_Q)
    joint = reference.joint_law(target, drafter, 2, UNCAPPED)
    assert reference.expected_accepted(target, drafter, 2, UNCAPPED) == Fraction(4, 3)
    assert reference.total_variation(joint, reference.autoregressive_law(target, 3)) == Fraction(1, 9)


def random_model(seed, vocab):
    """A context-dependent model in float64, with a zero here and there."""

    def model(prefix):
        weights = np.random.default_rng([seed, len(prefix), *prefix]).exponential(size=vocab) ** 2
        weights[weights < 0.05 * weights.max()] = 0
        return list(weights / weights.sum())

    return model


@pytest.mark.parametrize("seed", range(3))
def test_random_models_in_float64(seed):
    target, drafter = random_model(seed, 3), random_model(100 + seed, 3)
    right = reference.autoregressive_law(target, 4)
    for rule in (REJECTION, BLOCK):
        joint = reference.joint_law(target, drafter, 3, rule)
        assert max(abs(joint[tokens] - right[tokens]) for tokens in right) < 1e-12
    accepted = [reference.expected_accepted(target, drafter, 3, rule) for rule in (REJECTION, BLOCK)]
    assert accepted[1] > accepted[0]


@pytest.mark.parametrize("rule", [REJECTION, BLOCK])
def test_self_draft_is_always_accepted(rule):
    target = closed_form_pair(3)[0]
    assert reference.expected_accepted(target, target, 2, rule) == 2
    assert reference.joint_law(target, target, 2, rule) == reference.autoregressive_law(target, 3)


@pytest.mark.parametrize("rule", [REJECTION, BLOCK])
def test_deterministic_draft_is_accepted_with_its_probability(rule):
    target = closed_form_pair(3)[0]
    drafter = toy([0, 1, 0])
    first, second = target(())[1], target((1,))[1]
    assert reference.expected_accepted(target, drafter, 2, rule) == first + first * second
    assert reference.joint_law(target, drafter, 2, rule) == reference.autoregressive_law(target, 3)


@pytest.mark.parametrize("rule", [REJECTION, BLOCK])
def test_token_that_the_drafter_could_not_draw_is_rejected(rule):
    p, q = [[0.5, 0.5]] * 2, [[1.0, 0.0]]
    assert rule.stop_law([1], p, q) == [1, 0]


@pytest.mark.parametrize("rule", [REJECTION, BLOCK])
def test_empty_draft_is_plain_decoding(rule):
    assert rule.stop_law([], [TOY_P], []) == [1]
    assert rule.next_law([], [TOY_P], [], 0) == list(TOY_P)


def test_residual():
    third = Fraction(1, 3)
    assert reference.residual([third, 2 * third], [2 * third, third]) == [0, 1]
    assert reference.residual([third, 2 * third], [third, 2 * third]) == [third, 2 * third]
    assert reference.residual([0, Fraction(3, 4), Fraction(1, 4)], [1, 0, 0], Fraction(1, 2)) == [0, 0.75, 0.25]


def test_shared_noise_match():
    p, q = np.array([9, 5, 3, 2, 1]) / 20, np.array([4, 3, 3, 5, 5]) / 20
    overlap = np.minimum(p, q).sum()
    match = reference.shared_noise_match(p, q)
    assert overlap == pytest.approx(0.65)
    assert p @ q == pytest.approx(0.1875)
    assert match == pytest.approx(0.596536, abs=5e-7)
    assert match > overlap / (2 - overlap)
    gumbel = np.random.default_rng(0).gumbel(size=(100_000, 5))
    seen = np.mean(np.argmax(np.log(p) + gumbel, axis=1) == np.argmax(np.log(q) + gumbel, axis=1))
    assert seen == pytest.approx(match, abs=0.006)


# ---- Decoding step by step ----


def random_noise(seed, vocab):
    """Every draw from its own stream, so that no order of calls matters."""
    roles = ("accept", "draft", "residual", "bonus", "plain")

    def stream(role, start, offset):
        return np.random.default_rng([seed, roles.index(role), start, offset])

    return Noise(
        uniform=lambda start, offset: stream("accept", start, offset).random(),
        gumbel=lambda role, start, offset: stream(role, start, offset).gumbel(size=vocab),
    )


def scripted_noise(coins, wanted=None):
    """The given coins, and noise that makes each draw land on the role's wanted token."""
    return Noise(
        uniform=lambda start, offset: coins[offset],
        gumbel=lambda role, start, offset: np.where(np.arange(3) == (wanted or {}).get(role, -1), 50.0, 0.0),
    )


def test_rejection_step():
    p, q = [[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], [[0.6, 0.2, 0.2]]
    accepted = reference.rejection_verdict(5, [0], p, q, scripted_noise([0.16], {"bonus": 1}))
    rejected = reference.rejection_verdict(5, [0], p, q, scripted_noise([0.17]))
    chosen = reference.rejection_verdict(5, [0], p, q, scripted_noise([0.17], {"residual": 2, "bonus": 0}))
    never = reference.rejection_verdict(5, [0], p, q, scripted_noise([0.17], {"residual": 0, "bonus": 0}))
    assert [accepted, rejected, chosen, never] == [(1, 1), (0, 1), (0, 2), (0, 1)]


def test_deterministic_draft_needs_no_law():
    p = [[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]]
    for verdict in (reference.rejection_verdict, reference.block_verdict):
        assert verdict(5, [1], p, None, scripted_noise([0.59])) == (1, 2)
        assert verdict(5, [1], p, None, scripted_noise([0.61], {"residual": 1})) == (0, 2)


def test_block_keeps_the_last_prefix_that_passes():
    p, q = [TOY_P] * 3, [TOY_Q] * 2
    noise = Noise(uniform=lambda start, offset: (0.9, 0.9)[offset], gumbel=lambda role, start, offset: np.zeros(2))
    assert reference.block_verdict(3, [0, 1], p, q, noise) == (2, 1)
    assert reference.rejection_verdict(3, [0, 1], p, q, noise) == (0, 1)


def test_block_residual_is_weighted_by_the_joint_ratio():
    """P_1 = 1/2, so the residual is (2, 1, 0) / 3; without the weight it would be (3, 2, 0) / 5."""
    p, q = [[0.5, 0.3, 0.2], [0.4, 0.3, 0.3], [0, 0, 1]], [[1, 0, 0], [0.1, 0.1, 0.8]]
    for nudge, right in ((0.6, 0), (0.8, 1)):
        noise = Noise(uniform=lambda start, i: (0.23, 0.99)[i], gumbel=lambda *_, nudge=nudge: np.array([0, nudge, 0]))
        assert reference.block_verdict(3, [0, 2], p, q, noise) == (1, right)


def test_sampled_draft_follows_the_draft_model():
    seen = []

    def drafter(tokens):
        seen.append(tokens)
        return np.eye(7)[(tokens[-1] + 3) % 7]

    draft, q = reference.sample_draft(drafter, 3, random_noise(0, 7))((1, 4))
    assert draft == [0, 3, 6]
    assert seen == [(1, 4), (1, 4, 0), (1, 4, 0, 3)]
    np.testing.assert_array_equal(q, np.eye(7)[[0, 3, 6]])


def test_greedy_verdict():
    p = np.eye(3)[[1, 2, 0]]
    assert reference.greedy_verdict(0, [1, 2], p, None, None) == (2, 0)
    assert reference.greedy_verdict(0, [1, 0], p, None, None) == (1, 2)
    assert reference.greedy_verdict(0, [0, 2], p, None, None) == (0, 1)


@pytest.mark.parametrize("verdict", [reference.rejection_verdict, reference.block_verdict])
def test_decoder_draws_from_the_target(verdict):
    """The first three tokens of many runs, against the exact joint law."""
    target, drafter = (reference_float(model) for model in closed_form_pair(2))
    joint = reference.autoregressive_law(target, 3)
    counts, accepted = dict.fromkeys(joint, 0), 0
    for seed in range(4000):
        noise = random_noise(seed, 2)
        propose = reference.sample_draft(drafter, 2, noise)
        steps = reference.speculative_decode(target, propose, (), verdict, noise, max_tokens=3)
        counts[tuple(reference.emitted_tokens(steps))] += 1
        accepted += steps[0].accepted
    assert reference.g_test(list(counts.values()), list(joint.values())) > 1e-4
    rule = REJECTION if verdict is reference.rejection_verdict else BLOCK
    assert accepted / 4000 == pytest.approx(float(reference.expected_accepted(target, drafter, 2, rule)), abs=0.05)


def reference_float(model):
    return lambda prefix: [float(mass) for mass in model(prefix)]


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_exact_match_is_plain_decoding_under_the_same_noise(num_tokens):
    target, drafter = random_model(1, 5), random_model(2, 5)
    for seed in range(20):
        noise = random_noise(seed, 5)
        verdict = reference.exact_match_verdict
        plain = reference.speculative_decode(target, reference.no_draft, (3,), verdict, noise, max_tokens=12)
        propose = reference.sample_draft(drafter, num_tokens, noise)
        steps = reference.speculative_decode(target, propose, (3,), verdict, noise, max_tokens=12)
        assert reference.emitted_tokens(steps) == reference.emitted_tokens(plain)
        assert len(plain) == 12


def cycle(tokens):
    """All mass on the last token plus 3, modulo 7."""
    return np.eye(7)[(tokens[-1] + 3) % 7]


def oracle(num_tokens, wrong_at=None):
    def propose(tokens):
        draft = [(tokens[-1] + 3 * (i + 1)) % 7 for i in range(num_tokens)]
        return [(x + 1) % 7 if i == wrong_at else x for i, x in enumerate(draft)], None

    return propose


@pytest.mark.parametrize("verdict", ["greedy", "rejection", "block", "exact_match"])
@pytest.mark.parametrize(("num_tokens", "wrong_at"), [(k, j) for k in (1, 2, 5) for j in (None, *range(k))])
def test_rejection_at_each_position(verdict, num_tokens, wrong_at):
    propose, noise = oracle(num_tokens, wrong_at), random_noise(0, 7)
    rule = getattr(reference, f"{verdict}_verdict")
    steps = reference.speculative_decode(cycle, propose, (1, 4), rule, noise, max_tokens=10)
    kept = num_tokens if wrong_at is None else wrong_at
    assert reference.emitted_tokens(steps) == [0, 3, 6, 2, 5, 1, 4, 0, 3, 6]
    assert reference.greedy_decode(cycle, (1, 4), max_tokens=10) == [0, 3, 6, 2, 5, 1, 4, 0, 3, 6]
    assert len(steps) == math.ceil(10 / (kept + 1))
    assert [step.start for step in steps] == list(range(2, 12, kept + 1))
    assert {step.accepted for step in steps[:-1]} <= {kept}


def test_steps_propose_from_the_whole_text():
    """With an n-gram draft: the cycle repeats after its seventh token."""

    def propose(tokens):
        return reference.ngram_draft(tokens, 2, 3, 4), None

    steps = reference.speculative_decode(
        cycle, propose, (4,), reference.rejection_verdict, random_noise(0, 7), max_tokens=18
    )
    assert reference.emitted_tokens(steps) == [0, 3, 6, 2, 5, 1, 4, 0, 3, 6, 2, 5, 1, 4, 0, 3, 6, 2]
    assert [step.draft for step in steps] == [()] * 8 + [(3, 6, 2, 5), (4, 0, 3, 6)]
    assert [step.accepted for step in steps] == [0] * 8 + [4, 4]


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 8])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 4, 7, 8, 9])
def test_length_cap(num_tokens, max_tokens):
    propose = oracle(num_tokens)
    steps = reference.speculative_decode(
        cycle, propose, (4,), reference.greedy_verdict, random_noise(0, 7), max_tokens=max_tokens
    )
    assert reference.emitted_tokens(steps) == [0, 3, 6, 2, 5, 1, 4, 0, 3][:max_tokens]
    assert len(steps) == math.ceil(max_tokens / (num_tokens + 1))


@pytest.mark.parametrize("stop", [0, 3, 6, 2, 5, 1])
def test_stop_id_inside_the_window_ends_the_text(stop):
    steps = reference.speculative_decode(
        cycle, oracle(4), (6, 4), reference.greedy_verdict, random_noise(0, 7), max_tokens=20, stop_token_ids=(stop, 99)
    )
    length = [0, 3, 6, 2, 5, 1].index(stop) + 1
    assert reference.emitted_tokens(steps) == [0, 3, 6, 2, 5, 1][:length]
    assert reference.greedy_decode(cycle, (6, 4), max_tokens=20, stop_token_ids=(stop,)) == [0, 3, 6, 2, 5, 1][:length]
    assert sum(step.accepted for step in steps) == length - sum(len(step.emitted) == 5 for step in steps)


# ---- n-gram drafts ----


@pytest.mark.parametrize(
    ("tokens", "sizes", "num_tokens", "right"),
    [
        ([1, 2, 3, 1, 2], (1, 3), 4, [3, 1, 2, 3]),  # the loop goes on
        ([1, 2, 3, 1, 2], (1, 3), 2, [3, 1]),
        ([1, 2, 3, 1, 2], (3, 4), 2, []),
        ([7, 1, 8, 7, 2, 9, 7], (1, 3), 8, [2, 9, 7, 2, 9, 7, 2, 9]),  # the most recent match
        ([6, 7, 1, 8, 7, 2, 6, 7], (1, 1), 1, [1]),  # of single tokens the one that matches further back
        ([6, 7, 1, 8, 7, 2, 5, 7, 2, 6, 7], (1, 1), 1, [2]),  # but the most frequent follower first
        ([1, 2, 9, 2, 5, 1, 2], (1, 3), 1, [9]),  # the longest suffix first
        ([1, 2, 9, 2, 5, 3, 2], (1, 1), 1, [5]),
        ([1, 2, 9, 2, 5, 3, 2], (2, 3), 4, []),  # a single token is too short
        ([4, 4, 4], (1, 2), 5, [4, 4, 4, 4, 4]),  # overlapping
        ([1, 2, 3], (1, 3), 4, []),
        ([5], (1, 3), 4, []),  # a suffix does not match itself
        ([5, 5], (1, 3), 4, [5, 5, 5, 5]),
        ([1, 2, 3, 1, 2], (1, 3), 0, []),
    ],
)
def test_ngram_draft(tokens, sizes, num_tokens, right):
    assert reference.ngram_draft(tokens, *sizes, num_tokens) == right
