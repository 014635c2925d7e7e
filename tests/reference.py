"""Independent references for the tests: NumPy in float64, slow and obvious, written from the papers.

Nothing here calls the library's core. A *law* is a sequence of V probabilities; a *model* maps the tokens so far to the
law of the next one. The acceptance rules use plain arithmetic only, so that models in Fractions are handled exactly.

References:
  Rejection, arXiv 2211.17192 and 2302.01318; block verification, 2403.10444; shared noise, 2408.07978; repetition
  penalty, 1909.05858.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from reference_transformer import forward as forward
from reference_transformer import hidden_states as hidden_states
from reference_transformer import inverse_frequencies as inverse_frequencies
from reference_transformer import rope_magnitude as rope_magnitude
from reference_transformer import softmax as softmax

from specjax.report.goodness_of_fit import g_test as g_test

Law = Sequence[Any] | np.ndarray
Model = Callable[[tuple[int, ...]], Law]

# ---- From logits to the law ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """One row's decoding parameters; the defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[float, ...] | None = None


def law(logits: Any, sampling: Sampling, tokens: Sequence[int], prompt_length: int) -> np.ndarray:
    """The processed law `[V]` of the token that follows `tokens`, of which `prompt_length` are the prompt."""
    output = tokens[prompt_length:]
    scores = add_bias(np.asarray(logits).astype(np.float64), sampling, len(output))
    scores = penalize(scores, sampling, tokens, output)
    if np.isnan(scores).any() or not np.isfinite(scores.max()):
        raise ValueError(f"expected logits with a finite maximum, got {scores}")
    if sampling.temperature == 0:
        return np.eye(len(scores))[np.argmax(scores)]
    probs = softmax((scores - scores.max()) / sampling.temperature)
    return keep_min_p(keep_top_p(keep_top_k(probs, sampling.top_k), sampling.top_p), sampling.min_p)


def add_bias(scores: np.ndarray, sampling: Sampling, num_output: int) -> np.ndarray:
    """Adds the logit bias (-inf forbids) and forbids stop ids before `min_tokens` output tokens."""
    scores = scores + (0.0 if sampling.logit_bias is None else np.array(sampling.logit_bias))
    if num_output < sampling.min_tokens:
        scores[list(sampling.stop_token_ids)] = -np.inf
    return scores


def penalize(scores: np.ndarray, sampling: Sampling, tokens: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """Repetition counts prompt and output; presence and frequency count the output only."""
    scores = scores.copy()
    for token in set(tokens):
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(output).count(token)
    return scores


def keep_top_k(probs: np.ndarray, top_k: int) -> np.ndarray:
    """Keeps the k most probable, lowest ids first among equals; 0 keeps all."""
    return _keep(probs, _descending(probs)[: top_k or None])


def keep_top_p(probs: np.ndarray, top_p: float) -> np.ndarray:
    """Keeps the smallest set whose mass reaches `top_p`, to within float64 rounding; 1 keeps all."""
    if top_p >= 1:
        return probs
    order = _descending(probs)
    needed = 1 + int(np.sum(np.cumsum(probs[order]) < top_p - 1e-9))
    return _keep(probs, order[:needed])


def keep_min_p(probs: np.ndarray, min_p: float) -> np.ndarray:
    """Keeps what has at least `min_p` times the largest probability."""
    return _keep(probs, np.flatnonzero(probs >= min_p * probs.max()))


def _descending(probs: np.ndarray) -> np.ndarray:
    return np.argsort(-probs, kind="stable")


def _keep(probs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(probs)
    kept[ids] = probs[ids]
    return kept / kept.sum()


# ---- Acceptance rules: L drafted tokens, laws p_1..p_{L+1} of the target and q_1..q_L of the drafter ----


@dataclasses.dataclass(frozen=True)
class Rule:
    """An acceptance rule by its probabilities: all that an exact enumeration needs."""

    stop_law: Callable[[Sequence[int], Sequence[Law], Sequence[Law]], list[Any]]
    """(draft, p, q) -> L + 1 probabilities, the n-th that exactly n drafted tokens are kept."""
    next_law: Callable[[Sequence[int], Sequence[Law], Sequence[Law], int], list[Any]]
    """(draft, p, q, n) -> the law of the token that follows n kept ones."""


def acceptance(p: Any, q: Any) -> Any:
    """min(1, p/q); what the drafter could not have drawn is never accepted."""
    return min(1, p / q) if q > 0 else 0


def residual(p: Law, q: Law, weight: Any = 1) -> list[Any]:
    """norm((weight p - q)+), or p where nothing is left."""
    positive = [max(weight * a - b, 0) for a, b in zip(p, q, strict=True)]
    return [mass / sum(positive) for mass in positive] if sum(positive) else list(p)


def rejection_stop_law(draft: Sequence[int], p: Sequence[Law], q: Sequence[Law]) -> list[Any]:
    """Tokens are judged one by one; the first failure ends the window."""
    accept = [acceptance(p[i][x], q[i][x]) for i, x in enumerate(draft)]
    stops = [math.prod(accept[:n]) * (1 - accept[n]) for n in range(len(draft))]
    return [*stops, math.prod(accept)]


def rejection_next_law(draft: Sequence[int], p: Sequence[Law], q: Sequence[Law], n: int) -> list[Any]:
    """The residual at the failure, the target's own law after a fully kept window."""
    return residual(p[n], q[n]) if n < len(draft) else list(p[n])


def block_ratios(draft: Sequence[int], p: Sequence[Law], q: Sequence[Law]) -> list[Any]:
    """P_0..P_L: the joint ratio of the draft, capped at 1 on the way."""
    ratios = [1]
    for i, x in enumerate(draft):
        ratios.append(min(1, ratios[-1] * p[i][x] / q[i][x]) if q[i][x] > 0 else 0)
    return ratios


def block_thresholds(ratios: Sequence[Any], p: Sequence[Law], q: Sequence[Law]) -> list[Any]:
    """h_1..h_L, the probability that each prefix passes its own coin."""
    thresholds = []
    for i, ratio in enumerate(ratios[1:-1], start=1):
        left = sum(max(ratio * a - b, 0) for a, b in zip(p[i], q[i], strict=True))
        thresholds.append(1 if ratio == 1 else left / (left + 1 - ratio))
    return [*thresholds, *ratios[1:][-1:]]


def block_stop_law(draft: Sequence[int], p: Sequence[Law], q: Sequence[Law]) -> list[Any]:
    """Every coin is thrown; the longest prefix that passes is kept."""
    passes = [1, *block_thresholds(block_ratios(draft, p, q), p, q)]
    return [passes[n] * math.prod(1 - h for h in passes[n + 1 :]) for n in range(len(passes))]


def block_next_law(draft: Sequence[int], p: Sequence[Law], q: Sequence[Law], n: int) -> list[Any]:
    """The residual weighted by the joint ratio, the target's own law after a fully kept window."""
    return residual(p[n], q[n], block_ratios(draft, p, q)[n]) if n < len(draft) else list(p[n])


REJECTION = Rule(rejection_stop_law, rejection_next_law)
BLOCK = Rule(block_stop_law, block_next_law)


def shared_noise_match(p: Law, q: Law) -> Any:
    """Chance that argmax(log p + g) == argmax(log q + g) under one Gumbel vector g (all probabilities positive)."""
    pairs = list(zip(p, q, strict=True))
    return sum(1 / sum(max(a / p_j, b / q_j) for a, b in pairs) for p_j, q_j in pairs)


# ---- Exact enumeration ----


def autoregressive_law(target: Model, num_tokens: int, prefix: tuple[int, ...] = ()) -> dict[tuple[int, ...], Any]:
    """The joint law of the `num_tokens` tokens that follow `prefix`, keyed by those tokens."""
    if num_tokens == 0:
        return {(): 1}
    joint = {}
    for token, mass in enumerate(target(prefix)):
        for rest, weight in autoregressive_law(target, num_tokens - 1, (*prefix, token)).items():
            joint[token, *rest] = mass * weight
    return joint


def windows(target: Model, drafter: Model, num_tokens: int) -> Iterable[tuple[Any, tuple, list[Law], list[Law]]]:
    """Every (probability, draft, p, q) that one window of `num_tokens` can hold."""
    for draft, weight in autoregressive_law(drafter, num_tokens).items():
        prefixes = [draft[:i] for i in range(num_tokens + 1)]
        if weight > 0:
            yield weight, draft, [target(prefix) for prefix in prefixes], [drafter(prefix) for prefix in prefixes[:-1]]


def joint_law(target: Model, drafter: Model, num_tokens: int, rule: Rule) -> dict[tuple[int, ...], Any]:
    """The joint law of K + 1 tokens: what one window emits, continued by the target where it emits fewer."""
    joint = dict.fromkeys(autoregressive_law(target, num_tokens + 1), 0)
    for weight, draft, p, q in windows(target, drafter, num_tokens):
        for n, stop in enumerate(rule.stop_law(draft, p, q)):
            for token, mass in enumerate(rule.next_law(draft, p, q, n)):
                emitted = (*draft[:n], token)
                for rest, tail in autoregressive_law(target, num_tokens - n, emitted).items():
                    joint[*emitted, *rest] += weight * stop * mass * tail
    return joint


def expected_accepted(target: Model, drafter: Model, num_tokens: int, rule: Rule) -> Any:
    """E[drafted tokens that one window keeps]."""
    return sum(
        weight * n * stop
        for weight, draft, p, q in windows(target, drafter, num_tokens)
        for n, stop in enumerate(rule.stop_law(draft, p, q))
    )


def total_variation(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> Any:
    """Half the L1 distance of two laws over the same outcomes."""
    return sum(abs(first[outcome] - second[outcome]) for outcome in first) / 2


# ---- Decoding step by step, with scripted randomness ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """Where a decoder's randomness comes from; a test may wrap the library's own keys."""

    uniform: Callable[[int, int], float]
    """(window start, offset) -> the acceptance coin in [0, 1)."""
    gumbel: Callable[[str, int, int], np.ndarray]
    """(role, window start, offset) -> `[V]`, role "draft", "residual" or "bonus"; or "plain" at (position, 0)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One verify step."""

    start: int
    """Position of the first drafted token."""
    draft: tuple[int, ...]
    emitted: tuple[int, ...]
    """Tokens that joined the text: nothing after a stop id or the length cap."""
    accepted: int
    """Drafted tokens among `emitted`."""


Verdict = Callable[[int, Sequence[int], Sequence[Law], Sequence[Law] | None, Noise], tuple[int, int]]
"""(start, draft, p, q or None for a deterministic draft, noise) -> (drafted tokens kept, the token that follows)."""


def pick(probs: Law, gumbel: np.ndarray) -> int:
    """A draw from the law: argmax(log p + g)."""
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(np.array(probs, np.float64)) + gumbel))


def greedy_verdict(start: int, draft: Sequence[int], p: Sequence[Law], q: Any, noise: Any) -> tuple[int, int]:
    """Keeps drafted tokens while they are the target's argmax."""
    choices = [int(np.argmax(row)) for row in p]
    kept = _first_false([x == choice for x, choice in zip(draft, choices, strict=False)])
    return kept, choices[kept]


def exact_match_verdict(start: int, draft: Sequence[int], p: Sequence[Law], q: Any, noise: Noise) -> tuple[int, int]:
    """Keeps drafted tokens while they are the target's own draw at their position."""
    draws = [pick(row, noise.gumbel("plain", start + i, 0)) for i, row in enumerate(p)]
    kept = _first_false([x == draw for x, draw in zip(draft, draws, strict=False)])
    return kept, draws[kept]


def rejection_verdict(
    start: int, draft: Sequence[int], p: Sequence[Law], q: Sequence[Law] | None, noise: Noise
) -> tuple[int, int]:
    """Keeps drafted tokens while u q(x) < p(x)."""
    q = one_hot_laws(draft, p) if q is None else q
    kept = _first_false([noise.uniform(start, i) < acceptance(p[i][x], q[i][x]) for i, x in enumerate(draft)])
    return kept, _next_token(start, draft, kept, rejection_next_law(draft, p, q, kept), noise)


def block_verdict(
    start: int, draft: Sequence[int], p: Sequence[Law], q: Sequence[Law] | None, noise: Noise
) -> tuple[int, int]:
    """Keeps the longest prefix whose coin passes."""
    q = one_hot_laws(draft, p) if q is None else q
    thresholds = block_thresholds(block_ratios(draft, p, q), p, q)
    kept = max([i + 1 for i, h in enumerate(thresholds) if noise.uniform(start, i) < h], default=0)
    return kept, _next_token(start, draft, kept, block_next_law(draft, p, q, kept), noise)


def one_hot_laws(draft: Sequence[int], p: Sequence[Law]) -> list[Law]:
    """The laws of a deterministic draft."""
    return [np.eye(len(p[0]))[x] for x in draft]


def _next_token(start: int, draft: Sequence[int], kept: int, probs: Law, noise: Noise) -> int:
    return pick(probs, noise.gumbel("residual" if kept < len(draft) else "bonus", start, kept))


def _first_false(flags: Sequence[bool]) -> int:
    return [*flags, False].index(False)


def speculative_decode(
    target: Model,
    propose: Callable[[tuple[int, ...]], tuple[Sequence[int], Sequence[Law] | None]],
    prompt: Sequence[int],
    verdict: Verdict,
    noise: Noise,
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int] = (),
) -> list[Step]:
    """Draft, verify, commit, until a stop id or `max_tokens` output tokens; `propose` gives (draft, q or None)."""
    tokens, steps = tuple(prompt), []
    while (room := len(prompt) + max_tokens - len(tokens)) > 0 and not (steps and tokens[-1] in stop_token_ids):
        draft, q = propose(tokens)
        p = [target((*tokens, *draft[:i])) for i in range(len(draft) + 1)]
        kept, following = verdict(len(tokens), draft, p, q, noise)
        emitted = cut((*draft[:kept], following), stop_token_ids)[:room]
        accepted = min(kept, len(emitted))
        steps.append(Step(start=len(tokens), draft=tuple(draft), emitted=emitted, accepted=accepted))
        tokens += emitted
    return steps


def cut(tokens: Sequence[int], stop_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens up to and including the first stop id."""
    ends = [i + 1 for i, token in enumerate(tokens) if token in stop_token_ids]
    return tuple(tokens[: min(ends, default=len(tokens))])


def emitted_tokens(steps: Iterable[Step]) -> list[int]:
    """The text that the steps emitted."""
    return [token for step in steps for token in step.emitted]


def no_draft(tokens: tuple[int, ...]) -> tuple[list[int], None]:
    """Proposes nothing: with it, `speculative_decode` is plain decoding."""
    return [], None


def greedy_decode(
    target: Model, prompt: Sequence[int], *, max_tokens: int, stop_token_ids: Sequence[int] = ()
) -> list[int]:
    """The argmax of every law in turn."""
    text = list(prompt)
    while len(text) < len(prompt) + max_tokens and (len(text) == len(prompt) or text[-1] not in stop_token_ids):
        text.append(int(np.argmax(target(tuple(text)))))
    return text[len(prompt) :]


def sample_draft(drafter: Model, num_tokens: int, noise: Noise) -> Callable[[tuple[int, ...]], tuple[list, list]]:
    """A `propose` that draws from a draft model and reports the laws it drew from."""

    def propose(tokens: tuple[int, ...]) -> tuple[list[int], list[Law]]:
        draft, q = [], []
        for offset in range(num_tokens):
            q.append(drafter((*tokens, *draft)))
            draft.append(pick(q[-1], noise.gumbel("draft", len(tokens), offset)))
        return draft, q

    return propose


def ngram_draft(tokens: Sequence[int], min_n: int, max_n: int, num_tokens: int) -> list[int]:
    """What followed an earlier match of the longest suffix of `max_n` down to `min_n` tokens.

    Of several matches those count that the most frequent token follows, of these the ones that reach furthest back (up
    to 4 tokens), and of these the most recent. Always `num_tokens` of them: past the end of the text the continuation
    goes on with itself.
    """
    tokens, length = list(tokens), len(tokens)
    for n in range(min(max_n, length - 1), min_n - 1, -1):
        ends = [end for end in range(n, length) if tokens[end - n : end] == tokens[length - n :]]
        if ends:
            votes = Counter(tokens[end] for end in ends)
            ends = [end for end in ends if votes[tokens[end]] == max(votes.values())]
            reach = [next((m for m in (4, 3, 2, 1) if tokens[:end][-m:] == tokens[-m:]), 0) for end in ends]
            end = max(end for end, far in zip(ends, reach, strict=True) if far == max(reach))
            return (tokens[end:] * num_tokens)[:num_tokens]
    return []
