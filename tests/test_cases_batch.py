"""Cases of group (c), batches, ragged lengths and padding, with 40, vocabularies of unequal width, and 68.

Each is one example of a kind.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from decoding import (
    LENGTH,
    PAIR,
    PAIR_PARAMS,
    SHORT,
    TINY,
    VOCAB,
    begin,
    fast_jit,
    outputs,
    pad,
    pair_inputs,
    play,
    play_history,
    play_pair,
    play_scripts,
    proceed,
    propose,
    snapshot,
)
from harness import Script, ScriptedDrafter, TableModel, script_of, tiny_params
from many_rows import repeated, spread
from reference import Sampling, g_test

from specjax import (
    Block,
    DecodeConfig,
    Greedy,
    ModelDrafter,
    NGramDrafter,
    Params,
    Rejection,
    logit_bias,
    sampling_params,
)
from specjax.testing.rows import EachRow
from specjax.types import Draft

# ---- 23: rows of ranges of their own ----

RANGES, EACH = 7, 8
RANGE_KEYS = jax.random.split(jax.random.key(23), RANGES)
LENGTHS = [0, 1, 2, 3, 4, 0, 4]
BY_RANGE = DecodeConfig(
    target=TableModel(vocab_size=RANGES * EACH), drafter=ScriptedDrafter(num_tokens=4), verifier=Rejection()
)


def ranges_table() -> jax.Array:
    """Tokens 8 r..8 r + 7 are followed by one another only."""
    logits = np.random.default_rng(23).normal(size=(RANGES * EACH, RANGES * EACH)) * 1.5
    own = np.arange(RANGES * EACH) // EACH
    return jnp.asarray(np.where(own[:, None] == own, logits, -np.inf), jnp.float32)


def ranges_script(rows: Sequence[int]) -> Script:
    """Row r always proposes LENGTHS[r] tokens of its range, and tokens of other ranges behind them."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, EACH, (RANGES, 16, 4)) + EACH * np.arange(RANGES)[:, None, None]
    length = np.broadcast_to(np.array(LENGTHS)[:, None], (RANGES, 16))
    junk = np.arange(4) >= length[..., None]
    tokens = np.where(junk, (tokens + EACH) % (RANGES * EACH), tokens)
    return Script(tokens=jnp.asarray(tokens[rows], jnp.int32), length=jnp.asarray(length[rows], jnp.int32))


@cache
def ranges(rows: tuple[int, ...], temperature: float) -> Any:
    return play_ranges(rows, ranges_script(list(rows)), temperature)


def play_ranges(rows: Sequence[int], script: Script, temperature: float) -> Any:
    params = Params(target=ranges_table(), draft=script)
    sampling = sampling_params(len(rows), temperature=temperature, max_tokens=12)
    prompts = [[EACH * row + 3, EACH * row] for row in rows]
    keys = RANGE_KEYS[np.array(rows)]
    return play(params, keys, *pad(prompts, 3), sampling, config=BY_RANGE, max_new_tokens=12)[-1]


ALL = tuple(range(RANGES))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_23_a_row_emits_its_own_range_only(temperature):
    final = ranges(ALL, temperature)
    for row, text in enumerate(outputs(final)):
        assert len(text) == 12
        assert {token // EACH for token in text} == {row}
    assert (final.stats.drafted > 0).tolist() == [length > 0 for length in LENGTHS]
    assert final.stats.accepted.sum() > 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", ALL)
def test_case_23_a_row_alone_is_the_row_in_the_batch(row, temperature):
    assert_rows(ranges((row,), temperature), ranges(ALL, temperature), [row])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("order", [(6, 5, 4, 3, 2, 1, 0), (3, 0, 6, 2, 5, 1, 4)])
def test_case_23_permuted_rows_are_permuted_outputs(order, temperature):
    assert_rows(ranges(order, temperature), ranges(ALL, temperature), list(order))


def assert_rows(found: Any, whole: Any, rows: list[int]) -> None:
    """Text, reasons and counters, bit for bit."""
    for name in ("context", "finish_reason", "stats"):
        for one, all_rows in zip(
            jax.tree.leaves(getattr(found, name)), jax.tree.leaves(getattr(whole, name)), strict=True
        ):
            np.testing.assert_array_equal(one, all_rows[rows])


# ---- 68: rows of different luck ----


def lucky_script() -> Script:
    """Windows of 4: row r has its first r tokens right in every one, the last two rows as many as comes."""
    texts = np.array([[*[0] * 2, *text] for text in outputs(ranges(ALL, 0.0))])
    right = script_of(jnp.asarray(np.pad(texts, ((0, 0), (0, 2)))), 4)
    places = np.random.default_rng(1).integers(0, 5, right.length.shape)
    places[:5] = np.arange(5)[:, None]
    wrong = (np.asarray(right.tokens) + 1) % EACH + EACH * np.arange(RANGES)[:, None, None]
    return right.replace(tokens=jnp.where(np.arange(4) < places[..., None], right.tokens, wrong))


def test_case_68_each_row_goes_at_its_own_pace():
    """A row of a right tokens a step takes ceil(12 / (a + 1)) steps, whatever its neighbours need; alone, the same."""
    script = lucky_script()
    together = play_ranges(ALL, script, 0.0)
    assert outputs(together) == outputs(ranges(ALL, 0.0))
    assert together.stats.steps[:5].tolist() == [12, 6, 4, 3, 3]
    assert (np.count_nonzero(together.stats.histogram[5:], axis=1) > 1).all()
    for row in ALL:
        own = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], script)
        assert_rows(play_ranges([row], own, 0.0), together, [row])


# ---- 24: the drafter's cache, seen in what it proposes ----


@cache
def greedy_tokens(which: str, text: tuple[int, ...], count: int) -> list[int]:
    """What a model says next, by the reference and without a cache."""
    models = {"target": (PAIR_PARAMS.target, TINY.config), "draft": (PAIR_PARAMS.draft, SHORT.config)}
    params, config = models[which]
    tokens = list(text)
    for _ in range(count):
        tokens.append(int(np.argmax(reference.forward(params, config, tokens)[-1])))
    return tokens[len(text) :]


def test_case_24_every_proposal_is_that_of_a_fresh_drafter():
    """Ragged rows over many steps: no key of a rejected token is ever attended to. Only acceptance would show it."""
    rng = np.random.default_rng(24)
    prompts = [rng.integers(0, 61, size).tolist() for size in (1, 6, 13, 20)]
    states, proposals = play_pair(PAIR_PARAMS, prompts, max_tokens=[9, 14, 12, 10]), 0
    *_, sampling = pair_inputs(prompts)
    for state in states[:-1]:
        keyed = state.replace(keys=jax.random.wrap_key_data(state.keys))
        proposed = propose(PAIR_PARAMS, keyed, sampling, config=PAIR)
        for row in np.flatnonzero(state.finish_reason == 0):
            text = tuple(state.context.tokens[row, : state.context.length[row]].tolist())
            assert proposed.tokens[row].tolist() == greedy_tokens("draft", text, 5)
            proposals += 1
    assert proposals > 20
    for row, prompt in enumerate(prompts):
        assert outputs(states[-1])[row] == greedy_tokens("target", tuple(prompt), len(outputs(states[-1])[row]))


# ---- 26: what fills a window behind its draft ----

LAST = VOCAB - 1
LIKES_LAST = np.where(np.arange(VOCAB) == LAST, 4.0, np.random.default_rng(26).normal(size=(VOCAB, VOCAB)))


@cache
def filled(filler: int, temperature: float, inside: int) -> Any:
    """Ragged drafts of the likely last id and others, then the filler: behind the draft, or its end (`inside`)."""
    drafts = [[LAST, 1, LAST, LAST][: row // 4 % 5] + [filler] * inside for row in range(80)]
    return play_scripts(
        LIKES_LAST,
        [[row % VOCAB] for row in range(80)],
        lambda row, length: drafts[row],
        filler=filler,
        temperature=[0.0 if row % 4 == 0 else temperature for row in range(80)],
    )[-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filler", [0, LAST, VOCAB, 10**6, -(10**6)])
def test_case_26_filler_behind_the_draft_has_no_effect(filler, temperature):
    """-1 would wrap to the last id, which has most of the mass; ids beyond the vocabulary would be clamped to it."""
    found, right = filled(filler, temperature, 0), filled(-1, temperature, 0)
    jax.tree.map(np.testing.assert_array_equal, (found.context, found.stats), (right.context, right.stats))
    assert sum(text.count(LAST) for text in outputs(right)) > 400
    drafted = right.stats.drafted_per_position[:80].sum(axis=1).reshape(-1, 4)
    assert (drafted[::5] == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filler", [-1, VOCAB, 10**6])
def test_case_26_filler_inside_the_draft_is_never_accepted(filler, temperature):
    final, right = filled(filler, temperature, 2), filled(-1, temperature, 2)
    assert (final.context.tokens >= 0).all()
    assert (final.context.tokens < VOCAB).all()
    np.testing.assert_array_equal(final.context.tokens, right.context.tokens)
    for row in range(80):
        assert not final.stats.accepted_per_position[row, row // 4 % 5 :].any()


def test_case_26_laws_behind_the_draft_have_no_effect():
    """Not even NaN: the drafter owes nothing there."""
    rng, rows = np.random.default_rng(3), 40
    target, draft = (np.log(rng.dirichlet(np.ones(5), (rows, size))).astype(np.float32) for size in (4, 3))
    tokens, lengths = rng.integers(0, 5, (rows, 3)), np.arange(rows) // 2 % 4
    keys, start = jax.random.split(jax.random.key(26), rows), jnp.zeros(rows, jnp.int32)
    judge = fast_jit(EachRow((Rejection(), Block())))

    def verdict(junk: float) -> Any:
        laws = np.where(np.arange(3)[:, None] < lengths[:, None, None], draft, np.float32(junk))
        return judge(keys, start, Draft(tokens=tokens, length=jnp.asarray(lengths), log_probs=laws), target)

    right = verdict(-np.log(5))
    assert set(np.asarray(right.num_accepted).tolist()) == {0, 1, 2, 3}
    for junk in (np.nan, np.inf, -np.inf):
        found = verdict(junk)
        np.testing.assert_array_equal(found.num_accepted, right.num_accepted)
        for row, count in enumerate(right.num_accepted):
            assert found.tokens[row, : count + 1].tolist() == right.tokens[row, : count + 1].tolist()


def test_case_26_ended_and_padding_rows_are_frozen_for_sixty_steps():
    """Their text, counters and caches stay what they were, bit for bit, while one row goes on alone."""
    prompts = [[1, 2, 3], *[[row % 11] * (row % 7) for row in range(1, 48)]]
    text = script_of(jnp.zeros((48, 97), jnp.int32), 5)
    ragged = text.replace(length=jnp.where(jnp.arange(48)[:, None] == 0, 0, text.length))
    states = play_history(prompts, ragged, temperature=1.0, max_tokens=[60, *[3] * 47])
    assert len(states) == 61
    early, late = states[4], states[-1]
    assert (early.finish_reason[1:] == LENGTH).all()
    for name in ("context", "cache", "stats", "finish_reason"):
        for old, new in zip(jax.tree.leaves(getattr(early, name)), jax.tree.leaves(getattr(late, name)), strict=True):
            assert old[1:].tobytes() == new[1:].tobytes()
    empty = [row for row, prompt in enumerate(prompts) if not prompt]
    assert len(empty) == 6
    assert (late.cache.keys[0][empty] == -1).all()
    assert (late.stats.steps[empty] == 0).all()


# ---- 27: padding ----

PAD = 5
PADDED = [[PAD, 7, PAD], [1, 2, PAD, 1, 2, PAD, 9, 1, 2], [*range(10, 20), 10, 11, PAD, PAD, 3, 10, 11]]
PENALTIES: list[dict[str, float]] = [
    {"repetition_penalty": 1.4},
    {},
    {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
]
WEIGHTS = tiny_params()
BY_NGRAM = DecodeConfig(
    target=TINY, drafter=NGramDrafter(num_tokens=3, prompt_lookup_max=3), verifier=Greedy(), pad_id=PAD, log_probs=True
)


@pytest.fixture(scope="module")
def padded() -> list[Any]:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    options = {name: [row.get(name, getattr(Sampling(), name)) for row in PENALTIES] for name in names}
    sampling = sampling_params(3, max_tokens=12, **options)
    prompt = pad(PADDED, 32, pad_id=PAD)
    return play(Params(target=WEIGHTS), jax.random.key(0), *prompt, sampling, config=BY_NGRAM, max_new_tokens=12)


@pytest.mark.parametrize("row", range(3))
def test_case_27_padding_moves_no_position_and_enters_no_count(padded, row):
    """The padding token is also a word of the prompts; the reference reads each prompt without padding."""
    prompt, final = PADDED[row], padded[-1]
    sampling = Sampling(temperature=0.0, **PENALTIES[row])

    @cache
    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        return reference.forward(WEIGHTS, TINY.config, tokens)[-1]

    def propose(tokens: tuple[int, ...]) -> tuple[list[int], None]:
        found = reference.ngram_draft(tokens, 1, 3, len(tokens))
        room = len(prompt) + 12 - len(tokens) - 1
        return [found[i % len(found)] for i in range(min(3, room))] if found else [], None

    def law(tokens: tuple[int, ...]) -> np.ndarray:
        return reference.law(logits(tokens), sampling, tokens, len(prompt))

    steps = reference.speculative_decode(law, propose, prompt, reference.greedy_verdict, None, max_tokens=12)
    text = reference.emitted_tokens(steps)
    assert outputs(final)[row] == text
    assert final.stats.drafted[row] == sum(len(step.draft) for step in steps)
    assert final.stats.accepted[row] == sum(step.accepted for step in steps)
    for index, token in enumerate(text):
        right = np.log(reference.softmax(logits((*prompt, *text[:index]))))[token]
        np.testing.assert_allclose(final.log_probs.raw[row, len(prompt) + index], right, rtol=1e-5, atol=1e-5)


# ---- 40: vocabularies of unequal width ----

REAL, NARROW, WIDE = 59, 61, 64
WIDTH_ROWS = 20_000
FORBIDDEN = np.arange(WIDTH_ROWS) % 2 == 1
"""Rows that forbid the ids from 59 on, which no text has; the others let the target draw them."""


def width_laws(width: int, seed: int) -> np.ndarray:
    """A Markov chain on few ids, some of them at the end of the vocabulary."""
    ids = [token for token in (0, 5, 57, 58, 59, 60, 61, 63) if token < width]
    laws = np.zeros((width, width))
    laws[:, ids] = np.random.default_rng(seed).dirichlet(np.ones(len(ids)), width)
    return laws


def width_setup(draft_width: int, target_width: int, verifier: Any) -> tuple[DecodeConfig, Params, Any, Any]:
    model = TableModel(vocab_size=draft_width)
    config = DecodeConfig(
        target=TableModel(vocab_size=target_width),
        drafter=ModelDrafter(model=model, num_tokens=2, vocab_size=target_width),
        verifier=verifier,
    )
    with np.errstate(divide="ignore"):
        tables = [jnp.asarray(np.log(width_laws(*x)), jnp.float32) for x in ((target_width, 1), (draft_width, 2))]
    bias = jnp.stack([jnp.zeros(target_width), logit_bias(target_width, bad_token_ids=range(REAL, target_width))])
    both = sampling_params(2, temperature=1.0, max_tokens=3, logit_bias=bias)
    sampling, params = spread(both, FORBIDDEN.astype(int)), Params(target=tables[0], draft=tables[1])
    prompts = repeated([5], WIDTH_ROWS)
    state = begin(params, jax.random.key(40), *prompts, sampling, config=config, max_new_tokens=3)
    return config, params, sampling, state


@pytest.mark.parametrize(
    ("draft_width", "target_width", "verifier"), [(NARROW, WIDE, Rejection()), (WIDE, NARROW, Block())]
)
def test_case_40_vocabularies_of_unequal_width(draft_width, target_width, verifier):
    """Nothing beyond either vocabulary is proposed, q is 0 there, and the target keeps its law with all its ids."""
    config, params, sampling, state = width_setup(draft_width, target_width, verifier)
    draft = propose(params, state, sampling, config=config)
    probs, tokens = np.exp(np.asarray(draft.log_probs, np.float64)), np.asarray(draft.tokens)
    assert probs.shape == (WIDTH_ROWS, 2, target_width)
    assert (probs[:, :, min(draft_width, target_width) :] == 0).all()
    assert (probs[FORBIDDEN, :, REAL:] == 0).all()
    np.testing.assert_allclose(probs.sum(axis=-1), 1, atol=1e-6)
    assert tokens.max() == 60
    assert tokens[FORBIDDEN].max() == 58

    output = snapshot(proceed(params, state, sampling, config=config)).context.tokens[:, 1:4]
    for rows, allowed in ((FORBIDDEN, REAL), (~FORBIDDEN, target_width)):
        laws = width_laws(target_width, 1)[:, :allowed]
        laws = np.pad(laws / laws.sum(axis=1, keepdims=True), ((0, 0), (0, target_width - allowed)))
        pairs = laws[5][:, None] * laws
        counts = np.zeros(pairs.shape)
        np.add.at(counts, tuple(output[rows, :2].T), 1)
        assert g_test(counts, pairs) > 1e-4
    assert output[~FORBIDDEN].max() == (63 if target_width == WIDE else 60)
