"""The decoder step by step: every invariant after every step, and every token against the slow reference."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from decoding import EachRow, begin, generated, outputs, pad, play, proceed, row_noise, snapshot
from harness import (
    ContraryDrafter,
    HistoryModel,
    OracleDrafter,
    Script,
    ScriptedDrafter,
    SelfDrafter,
    TableModel,
    history_params,
    tiny_config,
    tiny_params,
)
from reference_transformer import rms_norm

import specjax
from specjax import (
    DecodeConfig,
    EarlyExitDrafter,
    FinishReason,
    ModelDrafter,
    NGramDrafter,
    NoDrafter,
    Params,
    Rejection,
    Transformer,
    decode,
    make_pace,
    sampling_params,
)

K, WIDTH, NEW, V = 3, 9, 10, 11
HISTORY, TARGET, OTHER = HistoryModel(vocab_size=V), history_params(7), history_params(8)
TABLE = jnp.asarray(np.random.default_rng(3).normal(size=(V, V)).astype(np.float32) * 2)
KEYS = jax.random.split(jax.random.key(42), 12)
PROMPTS = [
    [1, 2, 1, 2, 1],
    [3],
    [5, 6, 5, 6, 5],
    [9, 8, 7, 6, 5, 4, 3, 2, 1],
    [2, 2, 2],
    [0, 1, 0],
    [4, 4],
    [7, 8, 9, 7, 8, 9],
    [0],
    [6, 5, 6],
    [10, 10, 1, 10, 10],
    [],
]
"""Row r is judged by rule r modulo four (greedy, exact match, rejection, block); the last row is padding."""
BIAS = np.random.default_rng(0).normal(size=V).astype(np.float32)
BIAS[4] = -np.inf
ROWS: dict[str, Any] = {
    "temperature": [0, 1, 1, 0.7, 0, 0.7, 1.3, 1, 0, 0, 1e-6, 1],
    "top_k": [0, 5, 0, 3, 0, 0, 0, 4, 2, 0, 0, 0],
    "top_p": [1, 1, 0.9, 1, 1, 0.8, 1, 0.95, 1, 0.5, 1, 1],
    "min_p": [0, 0, 0, 0.05, 0, 0.02, 0, 0, 0.5, 0, 0.1, 0],
    "repetition_penalty": [1, 1, 1, 1, 1.3, 1, 1.2, 0.8, 1, 1.5, 1, 1],
    "presence_penalty": [0, 0, 0.5, 0, 0.7, 0, 0, -0.4, 0, 0, 0, 0],
    "frequency_penalty": [0.6, 0, 0, 0, 0.3, 0.8, 0, 0.5, 0, 0, 0, 0],
    "min_tokens": [0, 0, 4, 0, 2, 0, 0, 5, 0, 3, 0, 0],
    "max_tokens": [10, 10, 10, 10, 7, 10, 3, 10, 1, 10, 10, 10],
    "stop_token_ids": [[], [], [6, 7], [10], [1, 2, 3], [], [], [0, 1, 2, 3, 5], [], [8], [], []],
}
SAMPLING = sampling_params(12, **ROWS, logit_bias=jnp.asarray(BIAS))
VERDICTS = (
    reference.greedy_verdict,
    reference.exact_match_verdict,
    reference.rejection_verdict,
    reference.block_verdict,
)
LIVE = range(11)

Proposal = Callable[[tuple[int, ...]], tuple[Sequence[int], Any]]


def config_of(drafter: Any, target: Any = HISTORY, **options: Any) -> DecodeConfig:
    return DecodeConfig(target=target, drafter=drafter, verifier=EachRow(), **options)


def run(params: Params, config: DecodeConfig, *, prompts=PROMPTS, sampling=SAMPLING, keys=KEYS, pace=None) -> list[Any]:
    return play(params, keys, *pad(prompts, WIDTH), sampling, pace, config=config, max_new_tokens=NEW)


# ---- The reference, row by row ----


@cache
def noise(row: int) -> reference.Noise:
    return row_noise(KEYS[row], V, shared=row % 4 == 1)


def row_sampling(row: int, bias: Any = BIAS) -> reference.Sampling:
    options = {name: values[row] for name, values in ROWS.items() if name != "max_tokens"}
    return reference.Sampling(**options | {"stop_token_ids": tuple(options["stop_token_ids"]), "logit_bias": bias})


def processed(logits_after: Callable[[Sequence[int]], Any], row: int, bias: Any = BIAS) -> reference.Model:
    """The law that row `row` samples from, given a model's logits."""
    return lambda tokens: reference.law(logits_after(tokens), row_sampling(row, bias), tokens, len(PROMPTS[row]))


def reference_steps(row: int, target: reference.Model, propose: Proposal, noises=noise) -> list[reference.Step]:
    end = len(PROMPTS[row]) + ROWS["max_tokens"][row]

    def cut(tokens: tuple[int, ...]) -> tuple[Sequence[int], Any]:
        draft, q = propose(tokens)
        room = end - len(tokens) - 1
        return draft[:room], None if q is None else q[:room]

    options = {"max_tokens": ROWS["max_tokens"][row], "stop_token_ids": ROWS["stop_token_ids"][row]}
    return reference.speculative_decode(target, cut, PROMPTS[row], VERDICTS[row % 4], noises(row), **options)


def history_law(row: int) -> reference.Model:
    return processed(lambda tokens: HISTORY.logits_after(TARGET, tokens), row)


def table_law(row: int) -> reference.Model:
    return processed(lambda tokens: TABLE[tokens[-1]], row)


def nothing(row: int) -> Proposal:
    return reference.no_draft


def looked_up(row: int) -> Proposal:
    def propose(tokens: tuple[int, ...]) -> tuple[Sequence[int], None]:
        found = reference.ngram_draft(tokens, 1, 4, len(tokens))
        return [found[i % len(found)] for i in range(K)] if found else [], None

    return propose


def sampled_from(salt: jax.Array) -> Callable[[int], Proposal]:
    def proposal(row: int) -> Proposal:
        drafter = processed(lambda tokens: HISTORY.logits_after(salt, tokens), row)
        return reference.sample_draft(drafter, K, noise(row))

    return proposal


def table_path(choose: Callable[[np.ndarray], int]) -> Callable[[int], Proposal]:
    def follow(tokens: tuple[int, ...]) -> tuple[list[int], None]:
        draft = list(tokens[-1:])
        for _ in range(K):
            draft.append(choose(np.asarray(TABLE)[draft[-1]]))
        return draft[1:], None

    return lambda row: follow


def tempered(row: int) -> Proposal:
    """What `SelfDrafter` knows of the row's parameters: its temperature."""
    sampling = reference.Sampling(temperature=ROWS["temperature"][row])
    return reference.sample_draft(lambda tokens: reference.law(TABLE[tokens[-1]], sampling, tokens, 0), K, noise(row))


def scripted(row: int) -> Proposal:
    tokens, length, laws = (np.asarray(x[row]) for x in jax.tree.leaves(spotty_script()))

    def propose(text: tuple[int, ...]) -> tuple[list[int], Any]:
        count = length[len(text)]
        return tokens[len(text)][:count].tolist(), np.exp(laws[len(text)][:count].astype(np.float64))

    return propose


def scripted_surely(row: int) -> Proposal:
    propose = scripted(row)
    return lambda text: (propose(text)[0], None)


# ---- Every drafter ----


@cache
def spotty_script() -> Script:
    """Ragged proposals, some from the row's plain text and some wrong, of made-up laws, with -1 behind them."""
    rng = np.random.default_rng(5)
    text = played("none")[-1].context.tokens
    size = text.shape[1]
    truth = text[:, np.minimum(np.arange(size)[:, None] + np.arange(K), size - 1)]
    tokens = np.where(rng.random(truth.shape) < 0.7, truth, rng.integers(0, V, truth.shape))
    length = rng.integers(0, K + 1, text.shape)
    laws = np.log(rng.dirichlet(np.full(V, 0.7), truth.shape).astype(np.float32))
    laws = np.where(np.arange(V) == (tokens[..., None] + 1) % V, -np.inf, laws)
    tokens = np.where(np.arange(K) < length[..., None], tokens, -1)
    script = Script(tokens=tokens.astype(np.int32), length=length.astype(np.int32), log_probs=laws)
    return jax.tree.map(jnp.asarray, script)


TRANSFORMER = Transformer(tiny_config(num_layers=2))
WEIGHTS = tiny_params()
DEEP = config_of(EarlyExitDrafter(target=TRANSFORMER, exit_layer=1, num_tokens=K), TRANSFORMER)
UNBIASED = sampling_params(12, **ROWS)


def history(drafter: Any, draft: Any = None, **options: Any) -> tuple[Params, DecodeConfig]:
    return Params(target=TARGET, draft=draft), config_of(drafter, **options)


def table(drafter: Any) -> tuple[Params, DecodeConfig]:
    return Params(target=TABLE), config_of(drafter, TableModel(vocab_size=V))


SETUPS: dict[str, Callable[[], tuple[Params, DecodeConfig]]] = {
    "none": lambda: history(NoDrafter()),
    "ngram": lambda: history(NGramDrafter(num_tokens=K, prompt_lookup_max=4), windows=(0, 2, K)),
    "model": lambda: history(ModelDrafter(model=HISTORY, num_tokens=K, vocab_size=V), OTHER, log_probs=True),
    "self": lambda: history(ModelDrafter(model=HISTORY, num_tokens=K, vocab_size=V), TARGET, log_probs=True),
    "scripted": lambda: history(ScriptedDrafter(num_tokens=K), spotty_script()),
    "scripted surely": lambda: history(ScriptedDrafter(num_tokens=K), spotty_script().replace(log_probs=None)),
    "oracle": lambda: table(OracleDrafter(num_tokens=K)),
    "contrary": lambda: table(ContraryDrafter(num_tokens=K)),
    "table self": lambda: table(SelfDrafter(num_tokens=K)),
}
PROPOSALS: dict[str, Callable[[int], Proposal]] = {
    "none": nothing,
    "ngram": looked_up,
    "model": sampled_from(OTHER),
    "self": sampled_from(TARGET),
    "scripted": scripted,
    "scripted surely": scripted_surely,
    "oracle": table_path(lambda logits: int(np.argmax(logits))),
    "contrary": table_path(lambda logits: int(np.argmin(logits))),
    "table self": tempered,
}


@cache
def played(name: str) -> list[Any]:
    return run(*SETUPS[name]())


def assert_equals_reference(final: Any, steps: list[list[reference.Step]]) -> None:
    assert outputs(final) == [*[reference.emitted_tokens(row) for row in steps], []]
    assert final.stats.steps.tolist() == [*[len(row) for row in steps], 0]
    assert final.stats.drafted.tolist() == [*[sum(len(step.draft) for step in row) for row in steps], 0]
    assert final.stats.accepted.tolist() == [*[sum(step.accepted for step in row) for row in steps], 0]


@pytest.mark.parametrize("name", SETUPS)
def test_every_drafter_and_verifier_equals_the_reference(name):
    law = table_law if SETUPS[name]()[1].target == TableModel(vocab_size=V) else history_law
    assert_equals_reference(played(name)[-1], [reference_steps(row, law(row), PROPOSALS[name](row)) for row in LIVE])


def early_exit(tokens: tuple[int, ...]) -> np.ndarray:
    hidden = reference.hidden_states(WEIGHTS, TRANSFORMER.config, tokens)[1]
    normed = rms_norm(hidden, WEIGHTS["norm"], TRANSFORMER.config.norm_epsilon)
    return normed[-1] @ np.asarray(WEIGHTS["unembed"], np.float64).T


def deep_logits(tokens: tuple[int, ...]) -> np.ndarray:
    return reference.forward(WEIGHTS, TRANSFORMER.config, tokens)[-1]


def test_early_exit_equals_the_reference():
    final = run(Params(target=WEIGHTS), DEEP, sampling=UNBIASED)[-1]
    noises = [row_noise(KEYS[row], 61, shared=row % 4 == 1) for row in LIVE]

    def steps(row: int) -> list[reference.Step]:
        propose = reference.sample_draft(processed(cache(early_exit), row, None), K, noises[row])
        return reference_steps(row, processed(cache(deep_logits), row, None), propose, lambda row: noises[row])

    assert_equals_reference(final, [steps(row) for row in LIVE])
    text, length = jnp.asarray(final.context.tokens), final.cache.length
    positions = jnp.where(jnp.arange(text.shape[1]) < length[:, None], jnp.arange(text.shape[1]), -1)
    fresh = decoding.fast_jit(TRANSFORMER.apply)(
        WEIGHTS, text, positions, TRANSFORMER.init_cache(WEIGHTS, *text.shape)
    )[1]
    kept = np.arange(fresh.keys[0].shape[2]) < length[:, None]
    for seen, right in zip(final.cache.keys + final.cache.values, fresh.keys + fresh.values, strict=True):
        np.testing.assert_allclose(seen.swapaxes(1, 2)[kept], right.swapaxes(1, 2)[kept], rtol=1e-4, atol=1e-5)


# ---- Rows know nothing of one another ----


@pytest.mark.parametrize("name", ["ngram", "model", "scripted"])
def test_a_row_among_padding_rows_is_the_row_in_the_batch(name):
    params, config = SETUPS[name]()
    together = played(name)[-1]
    for row in LIVE:
        alone = run(params, config, prompts=[prompt if r == row else [] for r, prompt in enumerate(PROMPTS)])[-1]
        assert_same_rows(alone, together, [row], [row])


def assert_same_rows(first: Any, second: Any, rows: Sequence[int], others: Sequence[int]) -> None:
    """Text, log-probabilities, reasons and counters, bit for bit."""
    for name in ("context", "finish_reason", "stats", "log_probs", "limit"):
        for one, two in zip(jax.tree.leaves(getattr(first, name)), jax.tree.leaves(getattr(second, name)), strict=True):
            np.testing.assert_array_equal(one[list(rows)], two[list(others)])


def pick_rows(rows: Sequence[int]) -> Any:
    return jax.tree.map(lambda column: column[jnp.asarray(rows)], SAMPLING)


def test_a_row_alone_is_the_row_in_the_batch():
    params, config = SETUPS["model"]()
    config = dataclasses.replace(config, verifier=Rejection())
    for row in (2, 6, 10):
        alone = run(params, config, prompts=[PROMPTS[row]], sampling=pick_rows([row]), keys=KEYS[row : row + 1])[-1]
        assert_same_rows(alone, played("model")[-1], [0], [row])


def test_permuting_rows_permutes_the_outputs():
    order = [8, 5, 2, 11, 4, 9, 6, 3, 0, 1, 10, 7]  # each row keeps its rule
    params, config = SETUPS["model"]()
    final = run(
        params, config, prompts=[PROMPTS[r] for r in order], sampling=pick_rows(order), keys=KEYS[np.array(order)]
    )
    assert_same_rows(final[-1], played("model")[-1], range(12), order)


def test_a_single_key_is_folded_by_row():
    keys = decode.row_keys(jax.random.key(3), 4)
    right = [jax.random.key_data(jax.random.fold_in(jax.random.key(3), row)) for row in range(4)]
    np.testing.assert_array_equal(jax.random.key_data(keys), right)
    np.testing.assert_array_equal(jax.random.key_data(decode.row_keys(keys, 4)), right)


# ---- The same steps in other clothes ----


@pytest.mark.parametrize("name", SETUPS)
def test_while_loop_is_the_loop_of_steps(name):
    params, config = SETUPS[name]()
    state = begin(params, KEYS, *pad(PROMPTS, WIDTH), SAMPLING, config=config, max_new_tokens=NEW)
    whole = snapshot(proceed(params, state, SAMPLING, config=config))
    jax.tree.map(np.testing.assert_array_equal, whole, played(name)[-1])


@pytest.fixture
def compiled_pieces(monkeypatch):
    """The pieces that are compiled already, in place of those which `generate` and `stream` are put together from."""
    monkeypatch.setattr(decode, "prefill", begin)
    monkeypatch.setattr(decode, "decode_steps", proceed)
    monkeypatch.setattr(specjax.compiled, "_prefill", begin)
    monkeypatch.setattr(specjax.compiled, "_decode_steps", decoding.decode_steps)


@pytest.mark.usefixtures("compiled_pieces")
def test_generate_is_prefill_and_all_steps():
    (params, config), final = SETUPS["model"](), played("model")[-1]
    output = decode.generate(params, KEYS, *pad(PROMPTS, WIDTH), SAMPLING, config=config, max_new_tokens=NEW)
    assert generated(output) == outputs(final)
    assert output.tokens.shape == output.log_probs.raw.shape == (12, NEW)
    jax.tree.map(np.testing.assert_array_equal, output.stats, final.stats)
    np.testing.assert_array_equal(output.finish_reason, final.finish_reason)
    for row, length in enumerate(output.length.tolist()):
        start = len(PROMPTS[row])
        assert (output.tokens[row, length:] == 0).all()
        for found, kept in zip(jax.tree.leaves(output.log_probs), jax.tree.leaves(final.log_probs), strict=True):
            np.testing.assert_array_equal(found[row, :length], kept[row, start : start + length])
            assert not found[row, length:].any()


@pytest.mark.usefixtures("compiled_pieces")
def test_stream_shows_the_steps_of_generate():
    params, config = SETUPS["model"]()
    arguments = params, KEYS, *pad(PROMPTS, WIDTH), SAMPLING
    whole = decode.generate(*arguments, config=config, max_new_tokens=NEW)
    seen = list(specjax.stream(*arguments, config=config, max_new_tokens=NEW))
    jax.tree.map(np.testing.assert_array_equal, seen[-1], whole)
    assert len(seen) == whole.stats.steps.max()
    for index, output in enumerate(seen):
        np.testing.assert_array_equal(output.stats.steps, jnp.minimum(whole.stats.steps, index + 1))
        for early, late in zip(generated(output), generated(whole), strict=True):
            assert late[: len(early)] == early
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(arguments))


def test_autoregressive_is_decoding_without_a_drafter():
    params, config = SETUPS["model"]()
    output = decoding.autoregressive(params, KEYS, *pad(PROMPTS, WIDTH), SAMPLING, config=config, max_new_tokens=NEW)
    rows = [0, 1, 4, 5, 8, 9]  # greedy and exact match: the plain text, whatever the drafter
    for name in ("none", "ngram", "model", "self", "scripted", "scripted surely"):
        final = outputs(played(name)[-1])
        assert [generated(output)[row] for row in rows] == [final[row] for row in rows]
    assert (output.stats.steps == output.stats.emitted).all()
    assert output.stats.drafted_per_position.shape == (12, 0)


@pytest.mark.parametrize("chunk", [1, 7])
def test_prefill_in_chunks_reads_the_same_prompt(chunk):
    params, config = SETUPS["model"]()
    config = dataclasses.replace(config, verifier=specjax.ExactMatch(), prefill_chunk=chunk)
    prompt, length = pad(PROMPTS, WIDTH)
    state = decoding.prefill(params, KEYS, prompt, length, SAMPLING, config=config, max_new_tokens=NEW)
    chunked, whole = decoding.snapshot(state), played("model")[0]
    assert_same_rows(chunked, whole, range(12), range(12))
    jax.tree.map(np.testing.assert_array_equal, chunked.cache, whole.cache)
    jax.tree.map(np.testing.assert_array_equal, chunked.draft_state, whole.draft_state)


def test_one_target_call_serves_a_step(monkeypatch):
    """The switch holds one branch for each window size, and each of them calls the target once."""
    calls, apply = [], HistoryModel.apply

    def counted(self, params, tokens, positions, cache):
        calls.append(tokens.shape)
        return apply(self, params, tokens, positions, cache)

    monkeypatch.setattr(HistoryModel, "apply", counted)
    params, config = SETUPS["scripted"]()
    config = dataclasses.replace(config, windows=(0, 1, K))
    prompt = pad(PROMPTS, WIDTH)
    prefill = partial(decode.prefill, sampling=SAMPLING, config=config, max_new_tokens=NEW)
    state = jax.eval_shape(prefill, params, KEYS, *prompt)
    calls.clear()
    jax.eval_shape(partial(decode.decode_step, sampling=SAMPLING, config=config), params, state)
    assert calls == [(12, 1), (12, 2), (12, K + 1)]


# ---- Log-probabilities, broken rows, pace ----


def test_log_probs_of_the_emitted_tokens():
    final = played("model")[-1]
    for row in LIVE:
        start, end = final.context.prompt_length[row], final.context.length[row]
        text = final.context.tokens[row].tolist()
        for column in range(start, end):
            logits = HISTORY.logits_after(TARGET, text[:column])
            raw = np.log(reference.softmax(logits.astype(np.float64)))[text[column]]
            law = history_law(row)(tuple(text[:column]))[text[column]]
            np.testing.assert_allclose(final.log_probs.raw[row, column], raw, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(final.log_probs.processed[row, column], np.log(law), rtol=1e-4, atol=1e-5)
        outside = np.delete(np.arange(final.context.tokens.shape[1]), np.arange(start, end))
        assert not final.log_probs.raw[row, outside].any()
        assert not final.log_probs.processed[row, outside].any()


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["oracle", "contrary", "table self"])
def test_broken_logits_end_their_row_and_no_other(name, broken):
    """What was decided before the broken position is kept, nothing is emitted from it, and other rows go on."""
    params, config = SETUPS[name]()
    whole = played(name)[-1]
    state = max(range(V), key=lambda token: sum(token in text for text in outputs(whole)))
    final = run(params.replace(target=TABLE.at[state].set(broken)), config)[-1]
    met = 0
    for row in LIVE:
        if state not in [*PROMPTS[row][-1:], *outputs(whole)[row][:-1]]:
            assert_same_rows(final, whole, [row], [row])
        elif row % 4 < 2 or state == PROMPTS[row][-1]:  # the text up to there does not hang on the draft
            path = [*PROMPTS[row][-1:], *outputs(whole)[row]]
            assert outputs(final)[row] == path[1 : path.index(state) + 1]
            assert final.finish_reason[row] == FinishReason.NAN
            met += 1
    assert met > 2


def test_rows_do_not_draft_what_does_not_pay():
    params, config = SETUPS["scripted surely"]()
    final = run(params, config, pace=make_pace(12, jnp.array([1.0, 100.0])))[-1]
    assert final.stats.drafted.tolist() == [0] * 12
    assert final.stats.steps.tolist() == final.stats.emitted.tolist()
    plain = played("none")[-1]
    assert outputs(final) == outputs(plain)
    cheap = run(params, config, pace=make_pace(12, jnp.array([1.0, 1.0])))[-1]
    assert_same_rows(cheap, played("scripted surely")[-1], range(12), range(12))


def test_draft_of_another_shape_is_refused():
    params, config = SETUPS["scripted"]()
    narrow = params.replace(draft=params.draft.replace(log_probs=params.draft.log_probs[..., :-1]))
    with pytest.raises(ValueError, match=r"log_probs \(12, 3, 11\) or None, got .* \(12, 3, 10\)"):
        run(narrow, config)
