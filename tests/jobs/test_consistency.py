"""Sound decoders pass all three levels; each that is broken on purpose fails the level that it breaks, at the place."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from decoding import row_noise
from harness import TableDrafter, TableModel
from reference import ngram_draft, softmax
from small_jobs import quick_programs
from vocabularies import byte_tokenizer

from specjax import sampling as sampling_module
from specjax.decode import DecodeConfig
from specjax.drafters.ngram import NGramDrafter
from specjax.jobs import consistency
from specjax.jobs.checks import Checks
from specjax.jobs.consistency import compare_samples, compare_texts, judge, report, with_window
from specjax.jobs.decoder import Decoder
from specjax.jobs.keys import row_keys
from specjax.jobs.prompts import Prompt
from specjax.jobs.settings import Sampling, Settings
from specjax.report.goodness_of_fit import uniformity_test
from specjax.report.levels import pool_texts
from specjax.sampling import Role, categorical, window_keys
from specjax.types import Params
from specjax.verify import Block, ExactMatch, Greedy, Rejection

V, K, NEW = 8, 4, 14
TARGET, DRAFT = np.random.default_rng(3).normal(size=(2, V, V)).astype(np.float32) - 3 * np.eye(V, dtype=np.float32)
"""Logits by the last token, which is seldom repeated."""
PROMPTS = [
    Prompt(id=name, content="", token_ids=ids)
    for name, ids in (("a", (0, 1, 2, 3, 4, 5, 6, 7, 0)), ("b", (7, 6, 5, 4, 3, 2, 1, 0, 3)), ("c", (*range(V), 2, 1)))
]
"""Each token has occurred, so the n-gram drafter always proposes something."""
LEAN = 5
"""The token that broken windows prefer."""


@pytest.fixture(autouse=True, scope="module")
def quickly():
    """Programs that compile quickly, and many keys in a batch."""
    with quick_programs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(consistency, "ROWS", 1600)
        yield


# ---- Broken on purpose ----


@dataclasses.dataclass(frozen=True)
class AcceptAll(ExactMatch):
    """Keeps every draft."""

    def __call__(self, keys, start, draft, log_probs):
        own = super().__call__(keys, start, draft, log_probs).tokens
        drafted = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
        kept = jnp.arange(own.shape[1]) < draft.length[:, None]
        return (
            super()
            .__call__(keys, start, draft, log_probs)
            .replace(tokens=jnp.where(kept, drafted, own), num_accepted=draft.length)
        )


@dataclasses.dataclass(frozen=True)
class ResidualIsP(Rejection):
    """Replaces a rejected token by a draw from p, not from norm((p - q)+)."""

    def __call__(self, keys, start, draft, log_probs):
        verdict = super().__call__(keys, start, draft, log_probs)
        own = categorical(window_keys(keys, start, log_probs.shape[1], Role.RESIDUAL), log_probs)
        at_end = jnp.arange(own.shape[1]) == verdict.num_accepted[:, None]
        rejected = (verdict.num_accepted < draft.length)[:, None]
        return verdict.replace(tokens=jnp.where(at_end & rejected, own, verdict.tokens))


@dataclasses.dataclass(frozen=True)
class AcceptAllLater(Rejection):
    """Keeps every draft from the fifth output token on, or the sixth."""

    def __call__(self, keys, start, draft, log_probs):
        right, wrong = super().__call__(keys, start, draft, log_probs), AcceptAll()(keys, start, draft, log_probs)
        late = start >= max(len(prompt.token_ids) for prompt in PROMPTS) + 4
        return right.replace(
            tokens=jnp.where(late[:, None], wrong.tokens, right.tokens),
            num_accepted=jnp.where(late, wrong.num_accepted, right.num_accepted),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaningTable(TableModel):
    """A target whose calls of several tokens may differ from its calls of one: a logit is higher by `lean`."""

    def apply(self, params, tokens, positions, cache):
        output, cache = super().apply(params["table"], tokens, positions, cache)
        leans = (tokens.shape[1] > 1) & (jnp.arange(self.vocab_size) == LEAN)
        return output.replace(logits=output.logits + jnp.where(leans, params["lean"], 0.0)), cache


# ---- Helpers ----


def decoder_of(verifier, *, drafter=None, target=None, table=TARGET, lean=0.0, eos_ids=(), **options):
    """Sampled at temperature 1 unless told otherwise; drafts from the text itself."""
    return Decoder(
        params=Params(target={"table": jnp.asarray(table), "lean": jnp.float32(lean)}, draft=jnp.asarray(DRAFT)),
        config=DecodeConfig(
            target=LeaningTable(vocab_size=V) if target is None else target,
            drafter=NGramDrafter(num_tokens=K) if drafter is None else drafter,
            verifier=verifier,
        ),
        tokenizer=byte_tokenizer(),
        eos_ids=eos_ids,
        sampling=Sampling(**{"temperature": 1.0, "max_new_tokens": NEW} | options),
    )


def settings_of(decoder, **options):
    return Settings(sampling=decoder.sampling, verifier=decoder.config.verifier, **{"batch_size": 2} | options)


def texts_of(decoder, *, windows=(K,), **options):
    batches = list(compare_texts(decoder, PROMPTS, windows, settings_of(decoder, **options)))
    assert len(batches) == -(-len(PROMPTS) // options.get("batch_size", 2))
    return {window: pool_texts([batch[window] for batch in batches]) for window in windows}


def sample_of(decoder, *, num_keys=6400):
    checks = Checks(windows=(decoder.config.drafter.num_tokens,), num_keys=num_keys)
    return dict(compare_samples(decoder, PROMPTS[0], checks))[checks.windows[0]]


def verdicts(decoder, text, sample=None, **options):
    judgements = judge(settings_of(decoder, **options), text, sample)
    assert [judgement.level for judgement in judgements] == ["distribution", "tokens", "bits"]
    return [judgement.passed for judgement in judgements]


def greedy_text(prompt, count, *, lean=0.0):
    """The argmax of every row of the table in turn."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(np.argmax(TARGET[text[-1]] + lean * (np.arange(V) == LEAN))))
    return text[len(prompt) :]


# ---- Tokens and bits ----


@pytest.mark.parametrize(
    ("verifier", "windows", "options"),
    [
        (ExactMatch(), (1, K), {}),
        (ExactMatch(), (1, K), {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.02, "frequency_penalty": 0.4}),
        (Greedy(), (K,), {"temperature": 0.0}),
        (Rejection(), (K,), {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 3}),
    ],
)
def test_sound_decoders_are_equal_to_the_last_bit(verifier, windows, options):
    decoder = decoder_of(verifier, eos_ids=(2,), **options)
    for window, text in texts_of(decoder, windows=windows).items():
        assert (text.num_prompts, text.divergences) == (3, ())
        assert text.num_draft_tokens >= text.num_tokens / (window + 1)
        assert text.num_tokens == len(text.logit_differences) == len(text.total_variations)
        assert (text.logit_differences == 0).all()
        assert (text.total_variations == 0).all()
        assert verdicts(decoder, text)[1:] == [True, True]


def test_tokens_are_not_judged_where_only_the_law_is_promised():
    decoder = decoder_of(Rejection())
    text = texts_of(decoder)[K]
    assert verdicts(decoder, text) == [None, None, True]
    assert text.divergences
    assert all(divergence.gap is None for divergence in text.divergences)


def test_a_verifier_that_accepts_everything_parts_where_the_draft_is_wrong():
    decoder = decoder_of(AcceptAll(), temperature=0.0)
    text = texts_of(decoder)[K]
    assert verdicts(decoder, text) == [None, False, True]
    found = {divergence.prompt_id: divergence for divergence in text.divergences}
    assert set(found) == {"a", "b", "c"}
    for prompt in PROMPTS:
        divergence, plain = found[prompt.id], greedy_text(prompt.token_ids, NEW)
        draft = ngram_draft(prompt.token_ids, 1, 4, K)
        index = next(index for index in range(K) if draft[index] != plain[index])
        logits = TARGET[(*prompt.token_ids, *plain)[len(prompt.token_ids) + index - 1]]
        assert (divergence.index, divergence.plain_id, divergence.other_id) == (index, plain[index], draft[index])
        assert (divergence.plain_text, divergence.other_text) == (chr(plain[index]), chr(draft[index]))
        assert divergence.gap == pytest.approx(logits[plain[index]] - logits[draft[index]], abs=1e-5)
        assert divergence.top2_gap == pytest.approx(np.diff(np.sort(logits)[-2:])[0], abs=1e-5)
        assert not divergence.within_rounding
    assert text.num_tokens == sum(divergence.index + 1 for divergence in text.divergences)


def test_a_target_that_reads_windows_otherwise_fails_tokens_and_bits():
    decoder = decoder_of(ExactMatch(), lean=3.0, temperature=0.0)
    text = texts_of(decoder)[K]
    assert verdicts(decoder, text) == [None, False, False]
    np.testing.assert_allclose(text.logit_differences, 3.0, atol=1e-5)
    wanted = []
    for prompt in PROMPTS:
        plain, leaning = (greedy_text(prompt.token_ids, NEW, lean=lean) for lean in (0.0, 3.0))
        places = [index for index in range(NEW) if plain[index] != leaning[index]]
        wanted += [(prompt.id, index, plain[index], leaning[index]) for index in places[:1]]
    assert [(item.prompt_id, item.index, item.plain_id, item.other_id) for item in text.divergences] == wanted
    assert len(wanted) >= 2
    assert all(0.1 < divergence.gap < 3 and not divergence.within_rounding for divergence in text.divergences)


def test_gaps_of_sampled_rows_are_those_of_the_perturbed_scores():
    temperature = 0.7
    decoder = decoder_of(ExactMatch(), lean=2.0, temperature=temperature, seed=5)
    text = texts_of(decoder)[K]
    assert verdicts(decoder, text)[1:] == [False, False]
    wanted = []
    for prompt in PROMPTS:
        key = row_keys(5, [prompt.id])[0]
        noise, ids = row_noise(key, V), list(prompt.token_ids)
        for index in range(NEW):
            scores = TARGET[ids[-1]].astype(np.float64) / temperature + noise.gumbel("plain", len(ids), 0)
            ids.append(int(np.argmax(scores)))
            other = int(np.argmax(scores + 2.0 / temperature * (np.arange(V) == LEAN)))
            if other != ids[-1]:
                best = np.sort(scores)[::-1] * temperature
                wanted.append(
                    (prompt.id, index, ids[-1], other, best[0] - scores[other] * temperature, best[0] - best[1])
                )
                break
    found = [
        (item.prompt_id, item.index, item.plain_id, item.other_id, item.gap, item.top2_gap) for item in text.divergences
    ]
    assert [item[:4] for item in found] == [item[:4] for item in wanted]
    np.testing.assert_allclose([item[4:] for item in found], [item[4:] for item in wanted], atol=1e-4)
    assert len(wanted) >= 2


@pytest.mark.parametrize(("apart", "passed"), [(4e-5, True), (4e-4, False)])
def test_a_tie_may_fall_either_way_and_nothing_else(apart, passed):
    table = TARGET.copy()
    table[:, 1] = table.max(axis=1) + 1
    table[:, LEAN] = table[:, 1] - np.float32(apart)
    decoder = decoder_of(ExactMatch(), lean=2 * apart, table=table, temperature=0.0)
    text = texts_of(decoder)[K]
    assert verdicts(decoder, text)[1] is passed
    assert [(item.index, item.plain_id, item.other_id) for item in text.divergences] == [(0, 1, LEAN)] * 3
    assert [item.gap for item in text.divergences] == pytest.approx([apart] * 3, rel=0.05)
    assert text.logit_differences.max() == pytest.approx(2 * apart, rel=0.05)
    assert verdicts(decoder, texts_of(decoder, dtype="bfloat16")[K], dtype="bfloat16")[1] is True


def test_windows_without_a_law_fail_every_level():
    decoder = decoder_of(ExactMatch(), lean=float("nan"))
    text = texts_of(decoder)[K]
    assert [(item.index, item.other_id) for item in text.divergences] == [(0, None)] * 3
    assert verdicts(decoder, text) == [False, False, False]


def test_bad_bookkeeping_in_windows_is_seen_in_the_laws_alone(monkeypatch):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OwnTable(LeaningTable):
        """Shares no compiled program with another test."""

    counts = sampling_module._counts

    def stale(tokens, first, seen, vocab_size):
        return jnp.broadcast_to(counts(tokens, first, seen[:, :1], vocab_size), (*seen.shape, vocab_size))

    monkeypatch.setattr(sampling_module, "_counts", stale)
    decoder = decoder_of(Rejection(), target=OwnTable(vocab_size=V), frequency_penalty=1.0)
    text = texts_of(decoder)[K]
    assert verdicts(decoder, text) == [False, None, True]
    assert text.total_variations.mean() > 0.01


def test_a_stop_string_ends_what_is_compared():
    whole = texts_of(decoder_of(ExactMatch()))[K]
    decoder = decoder_of(ExactMatch(), stop=(chr(3),))
    text = texts_of(decoder)[K]
    assert text.num_tokens == len(text.logit_differences) < whole.num_tokens
    assert text.divergences == ()


def test_nothing_to_compare_is_not_judged():
    decoder = decoder_of(ExactMatch(), max_new_tokens=0)
    text = texts_of(decoder)[K]
    assert text.num_tokens == 0
    assert verdicts(decoder, text) == [None, None, None]


# ---- Distribution ----


@pytest.mark.parametrize(
    ("verifier", "drafter"),
    [(Rejection(), NGramDrafter(num_tokens=K)), (Block(), TableDrafter(num_tokens=K))],
)
def test_sound_verifiers_keep_the_law(verifier, drafter):
    decoder = decoder_of(verifier, drafter=drafter)
    sample = sample_of(decoder, num_keys=3000)
    assert sample.num_rows == 3200
    assert list(sample.tests) == ["first 1 against its law", *(f"first {n} against plain" for n in (1, 2, 3))]
    assert all(test.passed for test in sample.tests.values())
    assert sample.tests["first 1 against its law"].degrees >= 5
    assert sample.tests["first 3 against plain"].degrees >= 25
    assert sample.num_draft_tokens >= K * sample.num_rows
    assert 0 < sample.num_accepted_tokens < sample.num_draft_tokens


@pytest.mark.parametrize(
    ("verifier", "options"),
    [
        (AcceptAll(), {}),
        (ResidualIsP(), {"drafter": TableDrafter(num_tokens=K)}),
        (Rejection(), {"lean": 0.5}),
    ],
)
def test_what_bends_the_law_fails_every_test_of_it(verifier, options):
    tests = sample_of(decoder_of(verifier, **options)).tests
    assert [test.passed for test in tests.values()] == [False] * 4


def test_levels_fail_by_themselves():
    decoder = decoder_of(AcceptAll())
    text, sample = texts_of(decoder)[K], sample_of(decoder)
    assert verdicts(decoder, text, sample) == [False, False, True]
    assert verdicts(decoder_of(Rejection()), text, sample) == [False, None, True]


def test_the_law_of_the_first_token_is_the_processed_one(monkeypatch):
    seen = {}

    def law_test(tokens, probs):
        seen.update(tokens=tokens, probs=probs)

    monkeypatch.setattr("specjax.jobs.consistency.law_test", law_test)
    sample_of(decoder_of(Rejection(), temperature=0.5, top_k=3), num_keys=1)
    wanted = softmax(TARGET[PROMPTS[0].token_ids[-1]].astype(np.float64) / 0.5)
    wanted = np.where(wanted >= np.sort(wanted)[-3], wanted, 0)
    np.testing.assert_allclose(seen["probs"], wanted / wanted.sum(), atol=1e-6)
    assert set(seen["tokens"]) <= set(np.flatnonzero(wanted))


def test_rows_that_end_early_are_compared_too():
    decoder = decoder_of(Rejection(), eos_ids=(1, 4, 5))
    sample = sample_of(decoder, num_keys=3000)
    assert all(test.passed for test in sample.tests.values())
    assert sample.tests["first 2 against plain"].degrees < V * V


def test_samples_of_different_windows_and_of_plain_decoding_share_no_keys(monkeypatch):
    seen = []

    def two_sample_test(first, second):
        seen.append((first, second))

    monkeypatch.setattr("specjax.jobs.consistency.two_sample_test", two_sample_test)
    checks = Checks(windows=(1, K), num_keys=1, joint_tokens=3)
    list(compare_samples(decoder_of(ExactMatch()), PROMPTS[0], checks))
    drawn = [seen[2][0], seen[5][0], seen[2][1]]
    assert all((one != other).any(axis=1).mean() > 0.5 for one in drawn for other in drawn if one is not other)
    np.testing.assert_array_equal(seen[2][1], seen[5][1])


# ---- Where the tokens of the texts fall in their laws ----

LONG = 120
"""Output tokens of each prompt."""


@pytest.mark.parametrize(
    ("verifier", "drafter"),
    [(Rejection(), NGramDrafter(num_tokens=K)), (Block(), TableDrafter(num_tokens=K))],
)
def test_tokens_of_sound_verifiers_follow_their_laws(verifier, drafter):
    decoder = decoder_of(verifier, drafter=drafter, max_new_tokens=LONG, eos_ids=(3,), top_p=0.95)
    text = texts_of(decoder)[K]
    assert 0 < len(text.places) <= 3 * LONG
    assert uniformity_test(text.places).passed is not False


def test_a_bias_behind_the_third_token_is_seen_in_the_texts():
    """The tests of the first tokens do not see it."""
    decoder = decoder_of(AcceptAllLater(), max_new_tokens=LONG)
    text, sample = texts_of(decoder)[K], sample_of(decoder)
    assert len(text.places) == 3 * LONG
    assert all(test.passed for test in sample.tests.values())
    assert verdicts(decoder, text, sample) == [False, None, True]
    assert uniformity_test(text.places).p_value < 1e-6
    sound = decoder_of(Rejection(), max_new_tokens=LONG)
    assert verdicts(sound, texts_of(sound)[K], sample_of(sound)) == [True, None, True]


@pytest.mark.parametrize(("apart", "passed"), [(4e-5, True), (4e-4, False)])
def test_a_token_that_its_law_forbids_by_more_than_a_hair_fails(apart, passed):
    """Windows keep another likeliest token than plain steps do."""
    table = TARGET.copy()
    table[:, 1] = table.max(axis=1) + 1
    table[:, LEAN] = table[:, 1] - np.float32(apart)
    text = texts_of(decoder_of(Rejection(), lean=2 * apart, table=table, top_k=1))[K]
    assert np.isnan(text.places).any() == (not passed)
    assert (uniformity_test(text.places).passed is not False) == passed


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"stop": (chr(3),)}])
def test_nothing_is_placed_where_it_would_mean_nothing(options):
    assert texts_of(decoder_of(ExactMatch(), **options))[K].places.size == 0


# ---- Windows and the record ----


def test_another_window_changes_nothing_else():
    decoder = decoder_of(Rejection())
    other = with_window(decoder, 7)
    assert other.config.drafter == NGramDrafter(num_tokens=7)
    assert with_window(other, K).config == decoder.config


def test_the_record_says_what_was_compared_and_what_failed():
    decoder = decoder_of(AcceptAll(), temperature=0.0)
    settings, checks = settings_of(decoder), Checks(windows=(1, K), num_keys=0)
    texts = texts_of(decoder, windows=(1, K))
    judgements = {window: judge(settings, text, None) for window, text in texts.items()}
    record = json.loads(json.dumps(report(settings, checks, texts, judgements), allow_nan=False))
    assert record["passed"] is False
    assert [line.split(":")[0] for line in record["failures"]] == ["K = 1, tokens", f"K = {K}, tokens"]
    assert record["checks"] == {"windows": [1, K], "num_keys": 0, "joint_tokens": 3}
    assert record["settings"]["sampling"]["temperature"] == 0.0
    assert record["environment"]["devices"]
    one, four = record["results"]
    assert (one["num_speculative_tokens"], four["num_speculative_tokens"]) == (1, K)
    assert four["tokens"]["num_prompts"] == 3
    assert four["tokens"]["num_beyond_rounding"] == 3
    assert four["bits"]["max_logit_difference"] == 0.0
    assert [item["prompt_id"] for item in four["divergences"]] == ["a", "b", "c"]
    assert all(item["within_rounding"] is False for item in four["divergences"])
