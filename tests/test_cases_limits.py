"""Cases of group (b): EOS, stop ids, and limits of length; each is one example of a kind.

Where rows come in fours there is one for each rule.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from decoding import (
    LENGTH,
    NEW,
    PAIR,
    PAIR_PARAMS,
    SALT,
    SELF_PARAMS,
    SHORT,
    STOP,
    TINY,
    VOCAB,
    generate,
    outputs,
    pad,
    play,
    play_history,
    play_pair,
    play_scripts,
)
from harness import (
    HistoryModel,
    TableModel,
    script_of,
)
from reference import Sampling

import specjax
from specjax import DecodeConfig, Greedy, NGramDrafter, Params, sampling_params
from specjax.models.rope import rotations
from specjax.testing.rows import EachRow, Limited

RULES = 4


def fours(items: Sequence[Any]) -> list[Any]:
    return [item for item in items for _ in range(RULES)]


# ---- 14: EOS inside the window ----

PROMPT = (57, 3, 36)
DEPTH = PAIR.drafter.num_tokens
LAW = partial(reference.forward, PAIR_PARAMS.target, TINY.config)


@cache
def long_text() -> list[int]:
    """24 tokens of the greedy run, by the reference."""
    return reference.greedy_decode(lambda tokens: LAW(tokens)[-1], PROMPT, max_tokens=24)


@pytest.fixture(scope="module")
def stopped_rows() -> tuple[list[tuple[int, list[int]]], list[Any]]:
    """Rows that stop at index m of the greedy text, some with a second id that comes later or never; and a full one.

    The draft model is the target, so whole windows are accepted. Stop ids under every rule: case 65.
    """
    text = long_text()
    rows = [(m, [text[m]]) for m in range(DEPTH + 3)]
    rows += [(m, [text[m + 1], text[m]]) for m in range(DEPTH + 1)] + [(2, [text[2], unused(text)]), (23, [])]
    states = play_pair(SELF_PARAMS, [list(PROMPT)] * len(rows), max_tokens=24, stop_token_ids=[ids for _, ids in rows])
    return rows, states


def unused(text: list[int]) -> int:
    return min(set(range(61)) - set(text))


def test_case_14_an_accepted_eos_ends_the_row(stopped_rows):
    (rows, states), text = stopped_rows, long_text()
    assert len(set(text[: DEPTH + 3])) == DEPTH + 3  # each is a first occurrence
    final = states[-1]
    assert outputs(final) == [text[: m + 1] for m, _ in rows]
    assert final.finish_reason.tolist() == [STOP if ids else LENGTH for _, ids in rows]
    assert (final.stats.emitted == [m + 1 for m, _ in rows]).all()
    for row, (m, _) in enumerate(rows):
        assert (final.context.tokens[row, 3 + m + 1 :] == PAIR.pad_id).all()


def test_case_14_other_rows_go_on_after_it(stopped_rows):
    """The row without EOS takes four steps of six tokens, in which the others stay what they were."""
    rows, states = stopped_rows
    assert len(states) == 5
    ended = [row for row, (m, _) in enumerate(rows) if m <= DEPTH]
    for state in states[1:]:
        assert [outputs(state)[row] for row in ended] == [outputs(states[-1])[row] for row in ended]
        assert (state.stats.steps[ended] == 1).all()


# ---- 15: the budget of new tokens ----

CYCLE = np.full((VOCAB, VOCAB), -3.0, np.float32)
CYCLE[np.arange(VOCAB), (np.arange(VOCAB) + 1) % VOCAB] = 3
CYCLE[3, 4], CYCLE[3, 1] = -3, 3
BUDGETS = (0, 1, 2, 3, 4, 7, 8, 9)
TRIPLE = [1, 2, 3, 1, 2, 3]
BY_NGRAM = DecodeConfig(
    target=TableModel(vocab_size=VOCAB),
    drafter=Limited(NGramDrafter(num_tokens=8, prompt_lookup_min=2, prompt_lookup_max=4)),
    verifier=EachRow(),
)


def play_ngrams(logits: np.ndarray, prompts: list[list[int]], limits: list[int], **sampling: Any) -> list[Any]:
    """One program: 48 rows, 24 new tokens; each row has a K of its own."""
    spare = 48 - len(prompts)
    options = {name: [*x, *[x[-1]] * spare] if isinstance(x, list) else x for name, x in sampling.items()}
    draft = {"draft": None, "limit": jnp.asarray([*limits, *[0] * spare])}
    return play(
        Params(target=jnp.asarray(logits), draft=draft),
        jax.random.key(3),
        *pad([*prompts, *[[]] * spare], 8),
        sampling_params(48, **{"max_tokens": 24} | options),
        config=BY_NGRAM,
        max_new_tokens=24,
    )


def test_case_15_a_scripted_oracle_stays_within_the_budget():
    combinations = fours([(k, budget) for k in (1, 3, 8) for budget in BUDGETS])
    text = ([1, 2, 3] * 8)[: NEW + 8]
    states = play_scripts(
        CYCLE,
        [TRIPLE] * len(combinations),
        lambda row, length: text[length % 3 :][: combinations[row][0]],
        max_tokens=[budget for _, budget in combinations],
    )
    final = states[-1]
    assert outputs(final)[: len(combinations)] == [text[:budget] for _, budget in combinations]
    for row, (k, budget) in enumerate(combinations):
        assert final.finish_reason[row] == LENGTH
        assert final.stats.steps[row] == -(-budget // (k + 1))
        assert final.stats.emitted[row] == budget


def test_case_15_prompt_lookup_stays_within_the_budget():
    for budgets in (BUDGETS[:4], BUDGETS[4:]):
        combinations = fours([(k, budget) for k in (1, 3, 8) for budget in budgets])
        budget_list = [budget for _, budget in combinations]
        final = play_ngrams(CYCLE, [TRIPLE] * 48, [k for k, _ in combinations], max_tokens=budget_list)[-1]
        assert outputs(final) == [([1, 2, 3] * 3)[:budget] for budget in budget_list]
        assert final.stats.emitted.tolist() == budget_list


@pytest.mark.parametrize("budget", [0, 1])
def test_case_15_the_smallest_outputs_have_columns_for_no_more(budget):
    """`max_new_tokens` itself."""
    config = DecodeConfig(target=TableModel(vocab_size=VOCAB), drafter=NGramDrafter(num_tokens=3), verifier=Greedy())
    prompt, length = pad([TRIPLE, [2]], 8)
    arguments = Params(target=jnp.asarray(CYCLE)), jax.random.key(0), prompt, length
    output = generate(*arguments, sampling_params(2, max_tokens=9), config=config, max_new_tokens=budget)
    assert output.tokens.tolist() == [[1][:budget], [3][:budget]]
    assert output.length.tolist() == [budget] * 2
    assert output.finish_reason.tolist() == [LENGTH] * 2
    assert output.stats.emitted.tolist() == [budget] * 2


# ---- 18: the end of the cache ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_18_drafting_up_to_the_end_of_the_cache(temperature):
    """Capacity 32, prompts of 20 to 31 tokens, and rows that fill the whole buffer: equal to K = 0, to the last slot.

    `play` asserts after each step that no slot outside the window was written and that the cache is the text.
    """
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 11, size).tolist() for size in fours(range(20, 32))]
    budgets = [32 - len(prompt) for prompt in prompts]
    budgets[-RULES:] = [60] * RULES
    rules = {"temperature": [0.0 if row % 4 == 0 else temperature for row in range(48)], "max_tokens": budgets}
    nothing = script_of(jnp.zeros((48, 97), jnp.int32), 5)
    plain = play_history(prompts, nothing.replace(length=jnp.zeros_like(nothing.length)), **rules)[-1]
    assert (plain.context.length[:-RULES] == 32).all()
    assert (plain.context.length[-RULES:] == 91).all()
    drafted = play_history(prompts, script_of(jnp.asarray(plain.context.tokens), 5), **rules)[-1]
    np.testing.assert_array_equal(drafted.context.length, plain.context.length)
    same = [row for row in range(48) if temperature == 0 or row % 4 < 2]  # other rules keep the law, not the text
    np.testing.assert_array_equal(drafted.context.tokens[same], plain.context.tokens[same])
    assert (drafted.stats.accepted[same] > 0).sum() > len(same) / 2


def test_case_18_a_text_beyond_the_models_positions_is_refused():
    config = DecodeConfig(target=HistoryModel(vocab_size=11, max_positions=32))
    for size in (20, 31):
        prompt, length = pad([[1] * size], 31)
        with pytest.raises(ValueError, match="32 positions, got 33"):
            specjax.generate(
                Params(target=SALT),
                jax.random.key(0),
                prompt,
                length,
                sampling_params(1, max_tokens=33 - size),
                config=config,
                max_new_tokens=40,
            )


# ---- 21: min_tokens ----

EOS = 9
PREFERS_EOS = np.tile(np.where(np.arange(VOCAB) == EOS, 5.0, np.where(np.arange(VOCAB) == 7, 4.0, 0.0)), (VOCAB, 1))
WAITS = [(k, least) for k in range(7) for least in sorted({0, 1, 3, k, k + 1})]


@pytest.mark.parametrize("stop_token_ids", [(EOS,), (EOS, 2)])
def test_case_21_min_tokens_holds_eos_back_exactly_so_long(stop_token_ids):
    """7 7 7 EOS for min_tokens = 3, whatever K; the oracle knows the masked process."""
    rows = fours(WAITS)[:120]

    def propose(row: int, length: int) -> list[int]:
        k, least = rows[row]
        return [*[7] * max(least - (length - 2), 0), EOS, 7, 7, 7, 7, 7, 7][:k]

    final = play_scripts(
        PREFERS_EOS,
        [[1, 2]] * len(rows),
        propose,
        min_tokens=[least for _, least in rows],
        stop_token_ids=stop_token_ids,
    )[-1]
    assert outputs(final)[: len(rows)] == [[*[7] * least, EOS] for _, least in rows]
    assert (final.finish_reason[: len(rows)] == STOP).all()


def test_case_21_min_tokens_beyond_max_tokens_is_refused():
    with pytest.raises(ValueError, match="min_tokens <= max_tokens, got 5 and 4"):
        sampling_params(2, min_tokens=5, max_tokens=4)


def test_case_21_min_tokens_as_large_as_max_tokens_ends_by_length():
    final = play_scripts(
        PREFERS_EOS, [[1]] * RULES, lambda row, length: [7] * 4, min_tokens=NEW, stop_token_ids=(EOS,)
    )[-1]
    assert outputs(final)[:RULES] == [[7] * NEW] * RULES
    assert (final.finish_reason[:RULES] == LENGTH).all()


# ---- 22: n-gram drafts that find nothing ----

LOOP = np.full((VOCAB, VOCAB), -5.0, np.float32)
LOOP[np.arange(VOCAB), (np.arange(VOCAB) + 1) % 11] = 5
"""0 1 2 ... 10 0 1 ...: the first pair comes back after eleven tokens."""
TEXTS = [[0], [0, 1], [4, 5, 6], [0, 2, 4, 6, 8, 10, 1], [3, 4, 3, 4], [5, 6, 5, 6, 5], [2, 2, 2, 2]]


def looked_up(tokens: tuple[int, ...]) -> tuple[list[int], None]:
    found = reference.ngram_draft(tokens, 2, 4, len(tokens))
    return [found[i % len(found)] for i in range(8)] if found else [], None


def test_case_22_an_empty_draft_leaves_no_trace():
    """Short prompts, one without repeats, and texts that repeat late, side by side: each as if alone and undrafted."""
    prompts = fours(TEXTS)
    final = play_ngrams(LOOP, prompts, [8] * len(prompts), temperature=0.0)[-1]

    def law(tokens: tuple[int, ...]) -> np.ndarray:
        return reference.law(LOOP[tokens[-1]], Sampling(temperature=0.0), tokens, 0)

    def cut(prompt: list[int]) -> Any:
        def propose(tokens: tuple[int, ...]) -> tuple[list[int], None]:
            return looked_up(tokens)[0][: len(prompt) + 24 - len(tokens) - 1], None

        return propose

    for row, prompt in enumerate(prompts):
        steps = reference.speculative_decode(law, cut(prompt), prompt, reference.greedy_verdict, None, max_tokens=24)
        assert outputs(final)[row] == reference.greedy_decode(law, prompt, max_tokens=24)
        assert outputs(final)[row] == reference.emitted_tokens(steps)
        assert final.stats.steps[row] == len(steps)
        assert final.stats.drafted[row] == sum(len(step.draft) for step in steps)
        assert final.stats.accepted[row] == sum(step.accepted for step in steps)


def test_case_22_nothing_is_drafted_where_nothing_matched():
    """The suffix does not match itself, and no dummy token counts as drafted."""
    states = play_ngrams(LOOP, fours(TEXTS[:4]), [8] * 16)
    for state in states:
        early = state.context.length <= 11
        assert state.stats.drafted[:16][early[:16]].sum() == 0


# ---- 19: a draft model of shorter context ----


def test_case_19_a_draft_model_of_shorter_context_goes_on_beyond_it():
    """Draft model for 24 positions, 20 tokens of prompt and 40 new ones: the text is the target's."""
    prompt = np.random.default_rng(0).integers(0, 61, 20).tolist()
    final = play_pair(PAIR_PARAMS, [prompt], max_tokens=[40])[-1]
    assert outputs(final)[0] == reference.greedy_decode(lambda tokens: LAW(tokens)[-1], prompt, max_tokens=40)
    assert all(np.isfinite(buffer).all() for buffer in final.draft_state.keys)
    assert final.stats.drafted[0] >= 5 * (final.stats.steps[0] - 5)  # it did not stand down


def test_case_19_rotations_beyond_the_context_differ():
    """A table would repeat its last entry there."""
    config = SHORT.config
    assert config.max_positions == 24
    cosines, sines = rotations(config.rope, config.head_dim, jnp.array([23, 24, 30, 31]))
    assert len(np.unique(np.concatenate([cosines, sines], axis=1), axis=0)) == 4
