"""The same text read one token at a time and in windows, by models whose logits betray any slip of cache or place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import fast_jit, pad
from harness import HistoryModel, history_params

from specjax import sampling_params
from specjax.jobs.replay import CHUNK, replay, scores_at
from specjax.types import Context

MODEL, SALT = HistoryModel(vocab_size=11), history_params(5)
KEYS = jax.random.split(jax.random.key(1), 3)
PROMPTS, COUNTS = [[3, 1, 4, 1, 5], [9], []], [CHUNK + 9, 2, 0]
SAMPLING = {"temperature": 0.5, "frequency_penalty": 0.3, "top_k": 6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offbeat(HistoryModel):
    """Another model in calls of three tokens: one logit is higher by a half."""

    def apply(self, params, tokens, positions, cache):
        output, cache = super().apply(params, tokens, positions, cache)
        extra = 0.5 * (tokens.shape[1] == 3) * (jnp.arange(self.vocab_size) == 7)
        return output.replace(logits=output.logits + extra), cache


pytestmark = pytest.mark.usefixtures("quickly")


def texts():
    rng = np.random.default_rng(0)
    return [[*prompt, *rng.integers(0, 11, count).tolist()] for prompt, count in zip(PROMPTS, COUNTS, strict=True)]


def context_of():
    tokens, length = pad(texts(), 96)
    return Context(tokens=tokens, length=length, prompt_length=jnp.array(list(map(len, PROMPTS))))


apply = fast_jit(lambda target, *values: target.apply(*values), static_argnums=0)


def chunks_of(*, target=MODEL, widths=(2, 5), **sampling):
    prompts, length = pad([prompt[:-1] for prompt in PROMPTS], 8)
    positions = jnp.where(jnp.arange(8) < length[:, None], jnp.arange(8), -1)
    _, cache = apply(target, SALT, prompts, positions, target.init_cache(SALT, 3, 96))
    rows = sampling_params(3, max_tokens=CHUNK + 9, **(sampling or SAMPLING))
    return list(replay(SALT, cache, context_of(), rows, target=target, widths=widths)), rows


def test_a_token_at_a_time_gives_the_logits_after_each_prefix():
    chunks, _ = chunks_of()
    assert [chunk.first for chunk in chunks] == [0, CHUNK]
    for row, count in enumerate(COUNTS):
        for index in {0, 1, CHUNK - 1, CHUNK, CHUNK + 8} & set(range(count)):
            chunk = next(chunk for chunk in chunks if chunk.holds(index))
            wanted = MODEL.logits_after(SALT, texts()[row][: len(PROMPTS[row]) + index])
            np.testing.assert_array_equal(chunk.plain.logits[row, index - chunk.first], wanted)


def test_windows_of_any_width_read_the_same():
    for chunk in chunks_of()[0]:
        assert set(chunk.deviations) == {2, 5}
        for deviation in chunk.deviations.values():
            there = chunk.first + np.arange(CHUNK) < np.array(COUNTS)[:, None]
            np.testing.assert_array_equal(deviation.exists, there)
            assert (deviation.logits[there] == 0).all()
            assert (deviation.total_variation[there] == 0).all()
            assert (deviation.magnitude[there] <= MODEL.scale).all()


def test_a_model_that_reads_windows_otherwise_is_seen_at_every_place():
    for chunk in chunks_of(target=Offbeat(vocab_size=11), widths=(2, 3), temperature=1.0)[0]:
        good, bad = chunk.deviations[2], chunk.deviations[3]
        assert (good.logits[good.exists] == 0).all()
        np.testing.assert_allclose(bad.logits[bad.exists], 0.5, atol=1e-6)
        logits = np.asarray(chunk.plain.logits, np.float64)
        laws = [np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (logits, logits + 0.5 * (np.arange(11) == 7))]
        wanted = np.abs(laws[0] - laws[1]).sum(-1) / 2
        np.testing.assert_allclose(bad.total_variation[bad.exists], wanted[bad.exists], atol=1e-6)


def test_scores_are_what_the_draw_compared():
    chunks, rows = chunks_of()
    context = context_of()
    for row, index in ((0, 0), (0, CHUNK + 8), (1, 1)):
        chunk = next(chunk for chunk in chunks if chunk.holds(index))
        scores = scores_at(chunk, row, index, keys=KEYS, context=context, sampling=rows)
        text = texts()[row][: len(PROMPTS[row]) + index]
        logits = MODEL.logits_after(SALT, text).astype(np.float64)
        counts = np.bincount(text[len(PROMPTS[row]) :], minlength=11)
        scaled = (logits - 0.3 * counts) / 0.5
        np.testing.assert_allclose(scores.log_probs, scaled - np.log(np.exp(scaled).sum()), atol=1e-5)
        np.testing.assert_array_equal(scores.logits, logits.astype(np.float32))
        np.testing.assert_array_equal(scores.kept, scaled >= np.sort(scaled)[-6])
        target = jax.random.fold_in(jax.random.fold_in(KEYS[row], 0), len(text))
        np.testing.assert_array_equal(scores.noise, jax.random.gumbel(target, (11,), mode="high"))
        assert (scores.temperature, scores.top_k, scores.top_p, scores.min_p) == (0.5, 6, 1.0, 0.0)


def test_scores_of_a_greedy_row_have_no_noise_and_no_filter():
    chunks, rows = chunks_of(temperature=0.0, presence_penalty=0.7)
    scores = scores_at(chunks[0], 1, 1, keys=KEYS, context=context_of(), sampling=rows)
    logits = MODEL.logits_after(SALT, texts()[1][:2]).astype(np.float64)
    logits[texts()[1][1]] -= 0.7
    np.testing.assert_allclose(scores.log_probs, logits - np.log(np.exp(logits).sum()), atol=1e-5)
    assert (scores.noise == 0).all()
    assert scores.kept.all()
    assert scores.temperature == 1.0


def test_no_output_no_chunks():
    context = dataclasses.replace(context_of(), length=context_of().prompt_length)
    cache = MODEL.init_cache(SALT, 3, 96)
    assert list(replay(SALT, cache, context, sampling_params(3, max_tokens=1), target=MODEL, widths=(2,))) == []
