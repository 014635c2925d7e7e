"""Cases of group (a) where the right text is known token by token; each is one example of a kind.

Rows come in fours, one for each rule.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import reference
from decoding import NEW, VOCAB, outputs, play_scripts
from reference import Sampling

RULES = 4

# ---- 10: penalties see every token of a window, and nothing that was rejected ----

CONSTANT = np.array([3.0, 2.6, 2.1, 1.7, *[-50.0] * (VOCAB - 4)], np.float32)
PENALTIES = [
    {"frequency_penalty": 1.0},
    {"presence_penalty": 0.9},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    {"frequency_penalty": -0.3},
]


def greedy_text(prompt: Sequence[int], penalties: dict[str, float], num_tokens: int = NEW) -> list[int]:
    sampling = Sampling(temperature=0.0, **penalties)

    def law(tokens: tuple[int, ...]) -> np.ndarray:
        return reference.law(CONSTANT, sampling, tokens, len(prompt))

    return reference.greedy_decode(law, prompt, max_tokens=num_tokens)


def drafts_of(kind: str, text: list[int], start: int) -> list[int]:
    """What is proposed when `start` tokens of the text are out."""
    ahead = text[start : start + 4]
    return {
        "none": [],
        "oracle": ahead,
        "contrary": [(token + 1) % 4 for token in ahead],
        "half": [*ahead[:2], *[(token + 1) % 4 for token in ahead[2:]]],
        "repeat": ahead[:1] * 4,
    }[kind]


KINDS = ("none", "oracle", "contrary", "half", "repeat")


@pytest.mark.parametrize("prompt", [[5], [0, 0, 0, 1, 5]])
@pytest.mark.parametrize("penalties", PENALTIES)
def test_case_10_penalties_count_inside_the_window(penalties, prompt):
    """Also when the prompt carries counts; the greedy text is that of plain decoding, whatever is drafted."""
    text = greedy_text(prompt, penalties)
    kinds = [kind for kind in KINDS for _ in range(RULES)]
    states = play_scripts(
        np.tile(CONSTANT, (VOCAB, 1)),
        [prompt] * len(kinds),
        lambda row, length: drafts_of(kinds[row], text, length - len(prompt)) if length >= len(prompt) else [],
        **penalties,
    )
    assert outputs(states[-1])[: len(kinds)] == [text] * len(kinds)
    accepted = states[-1].stats.accepted[: len(kinds)].reshape(-1, RULES)
    assert (accepted == accepted[:, :1]).all()
    assert accepted[KINDS.index("none")].tolist() == accepted[KINDS.index("contrary")].tolist() == [0] * RULES
    assert accepted[KINDS.index("oracle")].tolist() == [9] * RULES


def test_case_10_the_text_of_the_report():
    """Double counting gives 1 at index 8; counting once per step gives runs of 0."""
    assert greedy_text([5], {"frequency_penalty": 1.0}) == [0, 1, 2, 0, 3, 1, 2, 0, 3, 1, 2, 0]


# ---- 11: the row after the rejected one is never used ----

RIGHT = [0, 3, 6, 2, 5, 1, 4] * 4
"""What follows 4 when i is always followed by i + 3 modulo 7."""
PLACES = [(k, j) for k in (1, 2, 5) for j in range(k)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_11_a_rejection_at_any_place_skips_no_token(temperature):
    """Every window of K tokens is wrong at place j only: each step yields the j tokens before it and its correction."""
    logits = np.full((VOCAB, VOCAB), -np.inf, np.float32)
    logits[np.arange(VOCAB), np.where(np.arange(VOCAB) < 7, (np.arange(VOCAB) + 3) % 7, 0)] = 0
    places = [place for place in PLACES for _ in range(RULES)]

    def propose(row: int, length: int) -> list[int]:
        num_tokens, wrong = places[row]
        draft = RIGHT[max(length - 2, 0) :][:num_tokens]
        return [(token + 1) % 7 if i == wrong else token for i, token in enumerate(draft)]

    states = play_scripts(logits, [[2, 4]] * len(places), propose, temperature=temperature)
    assert outputs(states[-1])[: len(places)] == [RIGHT[:NEW]] * len(places)
    for before, after in itertools.pairwise(states):
        for row, (_, wrong) in enumerate(places):
            grown = after.context.length[row] - before.context.length[row]
            assert grown == min(wrong + 1, NEW + 2 - before.context.length[row])
            assert after.cache.length[row] == after.context.length[row] - 1
