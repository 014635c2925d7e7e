"""The pure functions of the acceptance rules, driven through every outcome: the joint law is the target's, exactly."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import BLOCK, REJECTION, Model, Rule, autoregressive_law, expected_accepted, joint_law

from specjax import verify
from specjax.types import Draft
from specjax.verify import Block, Rejection

# ---- Exact enumeration: the shipped functions as a `reference.Rule` ----


def shipped(verifier: Any, dtype: Any, padding: int = 0, *, soft: bool = True) -> Rule:
    """What a verifier of coins computes, driven through every outcome of its coins.

    The window is `padding` wider than the draft, and junk stands in the rest. `soft`: the draft's laws are given.
    """

    def window(draft: Sequence[int], p: Sequence[Any], q: Sequence[Any]) -> tuple[Draft, jax.Array]:
        size = len(p[0])
        tokens, junk = jnp.array([[*draft, *[0] * padding]]), np.full((padding, size), 0.3)
        drafted = jnp.log(array([*q[: len(draft)], *junk], dtype))[None] if soft else None
        row = Draft(tokens=tokens, length=jnp.array([len(draft)]), log_probs=drafted)
        return row, jnp.log(array([*p[: len(draft) + 1], *junk], dtype))[None]

    def stop_law(draft: Sequence[int], p: Sequence[Any], q: Sequence[Any]) -> list[float]:
        chances = verifier.chances(*window(draft, p, q))[0, : len(draft)].tolist()
        law = [0.0] * (len(draft) + 1)
        for passed in itertools.product([False, True], repeat=len(draft)):
            mass = math.prod(c if ok else 1 - c for c, ok in zip(chances, passed, strict=True))
            law[int(verifier.count(jnp.array([[*passed, *[False] * padding]]))[0])] += mass
        return law

    def next_law(draft: Sequence[int], p: Sequence[Any], q: Sequence[Any], n: int) -> list[float]:
        if n == len(draft):
            return floats(p[n])
        return verifier.leftover(*window(draft, p, q), jnp.array([n]))[0].tolist()

    return Rule(stop_law, next_law)


def array(law: Any, dtype: Any) -> jax.Array:
    return jnp.asarray(np.array(law, np.float64), dtype)


def floats(law: Any) -> list[float]:
    return [float(mass) for mass in law]


def closed_form(vocab: int, scale: int, step: int, shift: int, modulus: int) -> Model:
    """p(x | c) proportional to 1 + ((scale enc(c) + step x + shift) mod modulus)."""

    def law(prefix: tuple[int, ...]) -> list[Fraction]:
        code = 0
        for token in prefix:
            code = code * (vocab + 1) + token + 1
        weights = [1 + (scale * code + step * x + shift) % modulus for x in range(vocab)]
        return [Fraction(weight, sum(weights)) for weight in weights]

    return law


def closed_form_pair(vocab: int) -> tuple[Model, Model]:
    return closed_form(vocab, 7, 3, 2, 11), closed_form(vocab, 5, 8, 6, 13)


def toy(probs: Sequence[Fraction]) -> Model:
    return lambda prefix: list(probs)


THIRD = Fraction(1, 3)
TOY = toy([THIRD, 2 * THIRD]), toy([2 * THIRD, THIRD])
SHIPPED = {"rejection": Rejection(), "block": Block()}
EXACT = {"rejection": REJECTION, "block": BLOCK}


def assert_exact(models: tuple[Model, Model], num_tokens: int, rule: Rule, accepted: Any, tolerance: float) -> None:
    """The joint law of K + 1 tokens is the target's, and E[accepted] is right."""
    target, drafter = models
    joint, right = joint_law(target, drafter, num_tokens, rule), autoregressive_law(target, num_tokens + 1)
    assert max(abs(joint[outcome] - right[outcome]) for outcome in right) < tolerance
    assert abs(expected_accepted(target, drafter, num_tokens, rule) - accepted) < tolerance * 4


CLOSED_FORMS = [
    (TOY, 2, {"rejection": Fraction(10, 9), "block": Fraction(11, 9)}),
    (closed_form_pair(2), 2, {"rejection": Fraction(96, 95), "block": Fraction(97, 90)}),
    (closed_form_pair(2), 3, {"rejection": Fraction(4145257, 3423420), "block": Fraction(177523, 131670)}),
    (closed_form_pair(3), 2, {"rejection": Fraction(18308159, 13372200), "block": Fraction(83679, 59432)}),
]


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(("models", "num_tokens", "accepted"), CLOSED_FORMS)
def test_joint_law_and_acceptance_are_exact(models, num_tokens, accepted, name):
    with jax.enable_x64(True):
        assert_exact(models, num_tokens, shipped(SHIPPED[name], jnp.float64), accepted[name], 1e-12)


@pytest.mark.parametrize("name", SHIPPED)
def test_three_tokens_of_three(name):
    models = closed_form_pair(3)
    with jax.enable_x64(True):
        assert_exact(models, 3, shipped(SHIPPED[name], jnp.float64), expected_accepted(*models, 3, EXACT[name]), 1e-12)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(("models", "num_tokens", "accepted"), CLOSED_FORMS[:3])
def test_joint_law_in_float32(models, num_tokens, accepted, name):
    assert_exact(models, num_tokens, shipped(SHIPPED[name], jnp.float32), accepted[name], 1e-6)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_block_in_a_wider_window_is_exact(num_tokens):
    models = closed_form_pair(2)
    accepted = expected_accepted(*models, num_tokens, BLOCK)
    with jax.enable_x64(True):
        assert_exact(models, num_tokens, shipped(Block(), jnp.float64, padding=2), accepted, 1e-12)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("seed", range(3))
def test_random_models_with_impossible_tokens(seed, name):
    """Some tokens have probability 0 in p, some in q."""
    models = random_model(seed, 0.3), random_model(seed + 10, 0.3)
    accepted = expected_accepted(*models, 2, EXACT[name])
    with jax.enable_x64(True):
        assert_exact(models, 2, shipped(SHIPPED[name], jnp.float64), accepted, 1e-12)


def random_model(seed: int, share: float) -> Model:
    @cache
    def law(prefix: tuple[int, ...]) -> list[float]:
        rng = np.random.default_rng([seed, *prefix, 77])
        weights = rng.random(3) * (rng.random(3) > share)
        weights = weights if weights.any() else np.ones(3)
        return (weights / weights.sum()).tolist()

    return law


@pytest.mark.parametrize("name", SHIPPED)
def test_equal_laws_accept_everything(name):
    target = closed_form_pair(2)[0]
    with jax.enable_x64(True):
        assert_exact((target, target), 2, shipped(SHIPPED[name], jnp.float64), 2, 1e-12)


@pytest.mark.parametrize("name", SHIPPED)
def test_deterministic_drafts_are_one_hot_laws(name):
    """Their closed forms, which need no law of the draft, give the target's joint law too."""
    target = closed_form_pair(3)[0]

    def certain(prefix: tuple[int, ...]) -> list[float]:
        return np.eye(3)[(sum(prefix) + len(prefix)) % 3].tolist()

    accepted = expected_accepted(target, certain, 3, EXACT[name])
    with jax.enable_x64(True):
        assert_exact((target, certain), 3, shipped(SHIPPED[name], jnp.float64, soft=False), accepted, 1e-12)


# ---- The pure functions ----


def test_residual_values():
    law = verify.residual(jnp.array([0.1, 0.6, 0.3]), jnp.array([0.6, 0.2, 0.2]))
    np.testing.assert_allclose(law, [0, 0.8, 0.2], atol=1e-6)
    law = verify.residual(jnp.array([0.5, 0.5]), jnp.array([0.2, 0.8]), 0.5)
    np.testing.assert_allclose(law, [1, 0], atol=1e-6)
    same = jnp.array([[0.3, 0.7], [0.5, 0.5]])
    np.testing.assert_array_equal(verify.residual(same, same), same)
    batch = verify.residual(same, jnp.array([[0.3, 0.7], [1, 0]]), jnp.array([[1.0], [0.5]]))
    np.testing.assert_allclose(batch, [[0.3, 0.7], [0, 1]], atol=1e-6)


def test_acceptance_values():
    p, q = jnp.array([0.1, 0.6, 0.0, 0.4, 0.0]), jnp.array([0.6, 0.2, 0.5, 0.0, 0.0])
    np.testing.assert_allclose(verify.acceptance(p, q), [1 / 6, 1, 0, 0, 0], rtol=1e-6)


def test_joint_ratios_are_capped_on_the_way():
    found = verify.joint_ratios(jnp.array([[0.9, 0.2, 0.5, 0.3]]), jnp.array([[0.3, 0.4, 0.25, 0.0]]))
    np.testing.assert_allclose(found, [[1, 0.5, 1, 0]], rtol=1e-6)
    assert verify.joint_ratios(jnp.ones((2, 0)), jnp.ones((2, 0))).shape == (2, 0)
