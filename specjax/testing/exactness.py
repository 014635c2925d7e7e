"""Checks by enumeration: every shipped rule keeps the target's joint law, and accepts as many tokens as it should."""

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from specjax.testing import report
from specjax.testing.enumeration import CoinRule, Exact, Window, exact, fixed_windows, sampled_window, shared_noise
from specjax.testing.laws import Model, closed_form, context_free
from specjax.testing.report import Finding
from specjax.types import Verifier
from specjax.verify import Block, ExactMatch, Greedy, Rejection

RULES: Mapping[str, Verifier] = {
    "rejection": Rejection(),
    "block": Block(),
    "exact_match": ExactMatch(),
    "greedy": Greedy(),
}
"""The verifiers that ship."""

TRANSFORMS: Mapping[str, dict[str, Any]] = {
    "T = 1": {},
    "T = .7, top-p .9": {"temperature": 0.7, "top_p": 0.9},
    "top-k 2": {"top_k": 2},
    "min-p .3": {"min_p": 0.3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "min_tokens": {"stop_token_ids": [1], "min_tokens": 2},
    "logit bias, allowed ids": {"logit_bias": (0.7, -0.5, -np.inf, 0.3)},
    "T = 0": {"temperature": 0.0},
}
"""Arguments of `sampling_params` that mean something for four tokens."""

TOLERANCE: Mapping[str, float] = {"float64": 1e-12, "float32": 1e-6}
SIZE = 4
"""Tokens of the vocabulary."""

DRAFTS: Mapping[str, Callable[..., Window]] = {
    "sampled draft": lambda **options: sampled_window(*pair(SIZE), **options),
    "impossible tokens": lambda **options: sampled_window(*pair(SIZE, gaps=True), **options),
    "equal laws": lambda **options: sampled_window(pair(SIZE)[0], pair(SIZE)[0], **options),
    "short draft": lambda **options: sampled_window(*pair(SIZE), length=2, **options),
    "deterministic draft": lambda **options: fixed_windows(pair(SIZE)[0], **options),
    "no draft": lambda num_tokens, **options: fixed_windows(pair(SIZE)[0], num_tokens=0, **options),
}
"""What can stand in a window."""


def pair(vocab_size: int, **options: Any) -> tuple[Model, Model]:
    """The target and the drafter of the closed forms."""
    return closed_form(vocab_size, 7, 3, 2, 11, **options), closed_form(vocab_size, 5, 8, 6, 13, **options)


def check_joint_laws(rules: Mapping[str, Verifier] = RULES, *, dtype: str = "float64") -> Iterator[Finding]:
    """The joint law of K + 1 tokens is the target's: for every rule and kind of draft the worst of all transforms.

    Args:
      rules: verifiers that `exact` can drive, by name.
      dtype: that the rules calculate in, "float64" or "float32".
    """
    for name, rule in rules.items():
        for drafts in DRAFTS:
            with jax.enable_x64(dtype == "float64"):
                found = {transform: _enumerate(rule, drafts, transform) for transform in TRANSFORMS}
            worst = max(found, key=lambda transform: found[transform].error)
            count = sum(result.joint.size for result in found.values())
            case, value = f"{name}, {drafts}, {dtype}", found[worst].error
            yield report.error("enumeration", case, value, TOLERANCE[dtype], count, worst)


def _enumerate(rule: Verifier, drafts: str, transform: str) -> Exact:
    sampling = TRANSFORMS[transform] | ({"temperature": 0.0} if isinstance(rule, Greedy) else {})
    window = 4 if isinstance(rule, CoinRule) else 3  # the other rules meet every draft with every draw
    return exact(rule, DRAFTS[drafts](vocab_size=SIZE, num_tokens=window, sampling=sampling))


TOY = context_free((1 / 3, 2 / 3, 0)), context_free((2 / 3, 1 / 3, 0))
P, Q = (0.45, 0.3, 0.25), (0.2, 0.2, 0.6)

ACCEPTED: tuple[tuple[str, tuple[Model, Model], int, Mapping[type, Fraction]], ...] = (
    ("toy", TOY, 2, {Rejection: Fraction(10, 9), Block: Fraction(11, 9)}),
    ("V = 2, K = 2", pair(2, width=3), 2, {Rejection: Fraction(96, 95), Block: Fraction(97, 90)}),
    ("V = 2, K = 3", pair(2, width=3), 3, {Rejection: Fraction(4145257, 3423420), Block: Fraction(177523, 131670)}),
    ("V = 3, K = 2", pair(3), 2, {Rejection: Fraction(18308159, 13372200), Block: Fraction(83679, 59432)}),
)
"""E[accepted] of windows of K, from arithmetic with fractions. Smaller vocabularies are corners of V = 3."""


def check_acceptance(rules: Mapping[str, Verifier] = RULES) -> Iterator[Finding]:
    """E[accepted tokens] is that of the closed forms, and block verification never expects fewer than rejection."""
    limit = TOLERANCE["float64"]
    for name, rule in rules.items():
        with jax.enable_x64(True):
            errors = dict(_acceptance_errors(rule))
        if errors:
            worst = max(errors, key=errors.__getitem__)
            yield report.error("acceptance", name, errors[worst], limit, len(errors), worst)
    if {"rejection", "block"} <= set(rules):
        with jax.enable_x64(True):
            lead = [_lead(rules, transform) for transform in TRANSFORMS]
        yield report.error("acceptance", "block accepts no fewer than rejection", -min(lead), limit, len(lead))


def _acceptance_errors(rule: Verifier) -> Iterator[tuple[str, float]]:
    for name, models, length, values in ACCEPTED:
        for kind, right in values.items():
            if isinstance(rule, kind):
                yield name, abs(_accepted(rule, models, length) - float(right))
    if isinstance(rule, ExactMatch):
        match = float(shared_noise(np.array(P), np.array(Q)).trace())
        for length in (1, 2, 3):
            right = sum(match**n for n in range(1, length + 1))
            found = _accepted(rule, (context_free(P), context_free(Q)), length)
            yield f"shared noise, K = {length}", abs(found - right)


def _accepted(rule: Verifier, models: tuple[Model, Model], length: int) -> float:
    return float(exact(rule, sampled_window(*models, vocab_size=3, num_tokens=3, length=length)).accepted[0])


def _lead(rules: Mapping[str, Verifier], transform: str) -> float:
    window = sampled_window(*pair(SIZE), vocab_size=SIZE, num_tokens=4, sampling=TRANSFORMS[transform])
    ahead, behind = (float(exact(rules[name], window).accepted[0]) for name in ("block", "rejection"))
    return ahead - behind
