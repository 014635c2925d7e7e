"""The pure functions of the acceptance rules, driven through every outcome: the joint law is the target's, exactly."""

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

# ---- Exact enumeration: the shipped functions as a `reference.Rule` ----


def shipped_rejection(dtype: Any) -> Rule:
    """What `Rejection` computes, driven through every outcome."""

    def stop_law(draft: Sequence[int], p: Sequence[Any], q: Sequence[Any]) -> list[float]:
        accept = verify.acceptance(at(p, draft, dtype), at(q, draft, dtype)).tolist()
        return [*(math.prod(accept[:n]) * (1 - accept[n]) for n in range(len(draft))), math.prod(accept)]

    def next_law(draft: Sequence[int], p: Sequence[Any], q: Sequence[Any], n: int) -> list[float]:
        return floats(p[n]) if n == len(draft) else verify.residual(array(p[n], dtype), array(q[n], dtype)).tolist()

    return Rule(stop_law, next_law)


def shipped_block(dtype: Any, padding: int = 0) -> Rule:
    """What `Block` computes, in a window that is `padding` wider than the draft; junk stands in the rest."""

    def ratios(draft: Sequence[int], p: Sequence[Any], q: Sequence[Any]) -> jax.Array:
        junk = jnp.full((padding,), 0.3, dtype)
        chosen = (jnp.concatenate([at(laws, draft, dtype), junk])[None] for laws in (p, q))
        return verify.joint_ratios(*chosen)

    def stop_law(draft: Sequence[int], p: Sequence[Any], q: Sequence[Any]) -> list[float]:
        junk = [[0.9] * len(p[0])] * padding
        inner = (array([*laws[1 : len(draft)], *junk], dtype)[None] for laws in (p, q))
        inner = (laws.reshape(1, len(draft) + padding - 1, len(p[0])) for laws in inner)
        passes = verify.block_acceptance(ratios(draft, p, q), *inner, jnp.array([len(draft)]))[0].tolist()
        passes = [1.0, *passes[: len(draft)]]
        return [passes[n] * math.prod(1 - h for h in passes[n + 1 :]) for n in range(len(passes))]

    def next_law(draft: Sequence[int], p: Sequence[Any], q: Sequence[Any], n: int) -> list[float]:
        if n == len(draft):
            return floats(p[n])
        kept = [1.0, *ratios(draft, p, q)[0].tolist()][n]
        return verify.residual(array(p[n], dtype), array(q[n], dtype), kept).tolist()

    return Rule(stop_law, next_law)


def array(law: Any, dtype: Any) -> jax.Array:
    return jnp.asarray(np.array(law, np.float64), dtype)


def floats(law: Any) -> list[float]:
    return [float(mass) for mass in law]


def at(laws: Sequence[Any], draft: Sequence[int], dtype: Any) -> jax.Array:
    return array([law[x] for law, x in zip(laws, draft, strict=False)], dtype)


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
SHIPPED = {"rejection": shipped_rejection, "block": shipped_block}
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
        assert_exact(models, num_tokens, SHIPPED[name](jnp.float64), accepted[name], 1e-12)


@pytest.mark.parametrize("name", SHIPPED)
def test_three_tokens_of_three(name):
    models = closed_form_pair(3)
    with jax.enable_x64(True):
        assert_exact(models, 3, SHIPPED[name](jnp.float64), expected_accepted(*models, 3, EXACT[name]), 1e-12)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(("models", "num_tokens", "accepted"), CLOSED_FORMS[:3])
def test_joint_law_in_float32(models, num_tokens, accepted, name):
    assert_exact(models, num_tokens, SHIPPED[name](jnp.float32), accepted[name], 1e-6)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_block_in_a_wider_window_is_exact(num_tokens):
    models = closed_form_pair(2)
    accepted = expected_accepted(*models, num_tokens, BLOCK)
    with jax.enable_x64(True):
        assert_exact(models, num_tokens, shipped_block(jnp.float64, padding=2), accepted, 1e-12)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("seed", range(3))
def test_random_models_with_impossible_tokens(seed, name):
    """Some tokens have probability 0 in p, some in q."""
    models = random_model(seed, 0.3), random_model(seed + 10, 0.3)
    accepted = expected_accepted(*models, 2, EXACT[name])
    with jax.enable_x64(True):
        assert_exact(models, 2, SHIPPED[name](jnp.float64), accepted, 1e-12)


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
        assert_exact((target, target), 2, SHIPPED[name](jnp.float64), 2, 1e-12)


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
