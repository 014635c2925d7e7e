"""Completions of known texts. Case 17 (stop strings), 62 (no program compiled twice) and 67 (what the clock sees)."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from line_decoder import EOS, KNOWN, WINDOW, decoder_of, prompts_of
from programs import compilations

from specjax import compiled
from specjax.jobs import warmup
from specjax.jobs.completion import Completion, complete
from specjax.jobs.decoder import begin, plain_decoder
from specjax.jobs.settings import Sampling, Settings
from specjax.jobs.summary import compare, comparison_text, completion_row, summarize
from specjax.jobs.warmup import warm_up
from specjax.types import FinishReason, Params
from specjax.verify import Rejection

pytestmark = pytest.mark.usefixtures("quickly")


def completions(decoder, prompts, **options) -> list[Completion]:
    return [row for batch in complete(decoder, prompts, **options) for row in batch.completions]


def one(decoder, text, **options):
    return completions(decoder, prompts_of(text), **options)[0]


def test_without_stop_strings_the_whole_text_comes():
    row = one(decoder_of(), KNOWN)
    assert row.text == "123abcdefghi"
    assert row.token_ids == tuple(row.text.encode())
    assert row.finish_reason == "length"
    assert (row.stats.steps, row.stats.emitted, row.stats.accepted) == (3, 12, 9)
    assert not row.stepwise


@pytest.mark.parametrize(
    ("stop", "text", "steps", "accepted", "histogram"),
    [
        (["ab"], "123", 1, 3, [0, 0, 0, 1, 0]),  # in the middle of the first window
        (["bc"], "123a", 1, 4, [0, 0, 0, 0, 1]),  # the last token of one step and the first of the next
        (["3abcd"], "12", 1, 2, [0, 0, 1, 0, 0]),  # begins a step before it ends
        (["e", "cd"], "123ab", 1, 4, [0, 0, 0, 0, 1]),  # the one that is complete first
        (["1"], "", 0, 0, [0, 0, 0, 0, 0]),
        (["012"], "123abcdefghi", 3, 9, [0, 1, 0, 0, 2]),  # begins in the prompt: no match
    ],
)
def test_case_17_stop_strings_cut_ids_log_probs_and_counts_alike(stop, text, steps, accepted, histogram):
    whole = one(decoder_of(), KNOWN)
    row = one(decoder_of(stop=tuple(stop)), KNOWN)
    count = len(text)
    assert row.text == text
    assert row.token_ids == whole.token_ids[:count]
    assert row.log_probs.raw.tolist() == whole.log_probs.raw[:count].tolist()
    assert row.log_probs.processed.tolist() == whole.log_probs.processed[:count].tolist()
    assert (row.stats.steps, row.stats.emitted, row.stats.accepted) == (steps, count, accepted)
    assert row.stats.histogram.tolist() == histogram
    assert sum(number for _, number in row.timeline.emissions) == count
    assert row.finish_reason == ("length" if text == whole.text else "stop")
    assert completion_row(row)["metrics"]["num_emitted_tokens"] == count


def test_row_of_the_output_file():
    row = one(decoder_of(stop=("cd",)), KNOWN)
    written = json.loads(json.dumps(completion_row(row)))
    assert list(written) == ["id", "prompt", "text", "token_ids", "finish_reason", "logprobs", "metrics"]
    assert written["text"] == "123ab"
    assert len(written["logprobs"]["raw"]) == len(written["logprobs"]["processed"]) == 5
    assert written["metrics"]["mean_acceptance_length"] == 5
    assert written["metrics"]["acceptance_rate_per_position"] == [1.0] * WINDOW
    assert written["metrics"]["num_prompt_tokens"] == len(KNOWN)
    assert "logprobs" not in completion_row(dataclasses.replace(row, log_probs=None))


def test_log_probs_are_those_of_the_library():
    decoder = decoder_of(temperature=0.8, sharpness=4.0)
    row = one(decoder, KNOWN)
    texts = np.array([ord(KNOWN[-1]), *row.token_ids])
    logits = np.asarray(decoder.params.target)[texts[:-1]].astype(np.float64)
    raw = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(row.log_probs.raw, raw[np.arange(len(raw)), texts[1:]], atol=1e-4)


def test_every_piece_is_told_as_it_comes():
    pieces = []
    row = one(decoder_of(), KNOWN, on_text=pieces.append)
    assert pieces == ["123ab", "cdefg", "hi"]
    assert row.stepwise
    pieces.clear()
    one(decoder_of(stop=("defg",)), KNOWN, on_text=pieces.append)
    assert pieces == ["123ab", "c"]


def test_end_of_text():
    decoder = decoder_of()
    logits = np.array(decoder.params.target)
    logits[ord("c"), EOS] += 100
    decoder = dataclasses.replace(decoder, params=Params(target=jnp.asarray(logits)))
    row = one(decoder, KNOWN)
    assert (row.text, row.finish_reason) == ("123abc", "stop")
    assert row.token_ids == (*b"123abc", EOS)
    ignoring = dataclasses.replace(decoder, sampling=dataclasses.replace(decoder.sampling, ignore_eos=True))
    assert len(one(ignoring, KNOWN).token_ids) == 12


def test_logits_that_are_no_law_end_a_row():
    decoder = decoder_of()
    logits = np.array(decoder.params.target)
    logits[ord("c")] = np.nan
    row = one(dataclasses.replace(decoder, params=Params(target=jnp.asarray(logits))), KNOWN)
    assert (row.text, row.finish_reason) == ("123abc", "nan")


def test_nothing_is_asked_for():
    row = one(decoder_of(max_new_tokens=0), KNOWN)
    assert (row.text, row.token_ids, row.finish_reason) == ("", (), "length")
    metrics = completion_row(row)["metrics"]
    assert metrics["ttft_s"] is metrics["output_tokens_per_second"] is metrics["mean_acceptance_length"] is None


TEXTS = ["a", KNOWN, "hij012", "x", "zz9"]
SAMPLED = {"temperature": 1.0, "sharpness": 7.0}


@pytest.mark.parametrize("options", [{}, {"stop": ("b",)}])
def test_a_row_is_the_same_alone_and_in_any_batch(options):
    decoder, prompts = decoder_of(**SAMPLED, **options), prompts_of(*TEXTS)
    alone = completions(decoder, prompts)
    together = completions(decoder, prompts, batch_size=3)
    backwards = completions(decoder, prompts[::-1], batch_size=3)[::-1]
    assert [row.prompt.id for row in together] == [0, 1, 2, 3, 4]
    for rows in (together, backwards):
        assert [row.token_ids for row in rows] == [row.token_ids for row in alone]
        assert [row.finish_reason for row in rows] == [row.finish_reason for row in alone]
        assert [row.stats.histogram.tolist() for row in rows] == [row.stats.histogram.tolist() for row in alone]
    if options:
        assert {row.finish_reason for row in alone} == {"stop", "length"}


def test_a_short_batch_is_filled_up_with_rows_of_no_length(monkeypatch):
    lengths = []

    def spy(decoder, rows, *arguments):
        lengths.append(rows[2].tolist())
        return begin(decoder, rows, *arguments)

    monkeypatch.setattr("specjax.jobs.completion.begin", spy)
    assert len(completions(decoder_of(), prompts_of(*TEXTS), batch_size=3)) == 5
    assert lengths == [[1, 15, 6], [1, 3, 0]]


def test_seed_and_id_decide_what_is_drawn():
    prompts = prompts_of("x", "x")
    first = completions(decoder_of(**SAMPLED), prompts)
    assert first[0].token_ids != first[1].token_ids
    assert [row.token_ids for row in completions(decoder_of(**SAMPLED), prompts)] == [row.token_ids for row in first]
    other = completions(decoder_of(**SAMPLED, seed=1), prompts)
    assert other[0].token_ids != first[0].token_ids


def test_tokens_are_those_of_the_library():
    decoder, prompts = decoder_of(**SAMPLED), prompts_of(KNOWN)
    row = completions(decoder, prompts)[0]
    key = jax.random.key(0)
    for word in (0x5FECEB66, 0xFFC86F38):  # the first of SHA-256 of "0", the id
        key = jax.random.fold_in(key, np.uint32(word))
    tokens, length = compiled.pad_prompts([prompts[0].token_ids])
    sampling = decoder.sampling.rows(1, (EOS,))
    config = decoder.config
    state = compiled.prefill(decoder.params, key[None], tokens, length, sampling, config=config, max_new_tokens=16)
    state = compiled.decode_steps(decoder.params, state, sampling, config=config)
    assert row.token_ids == tuple(state.context.tokens[0, length[0] : state.context.length[0]].tolist())


@pytest.mark.parametrize("measured_pace", [False, True])
def test_nothing_is_compiled_outside_the_warm_up(measured_pace):
    decoder = decoder_of(**SAMPLED, measured_pace=measured_pace)
    batches = complete(decoder, prompts_of(*TEXTS, *TEXTS), batch_size=3)
    assert next(batches).compile_time_s > 0
    with compilations() as programs:
        later = list(batches)
    assert programs == []
    assert [batch.compile_time_s for batch in later] == [0, 0, 0]
    list(complete(decoder_of(), prompts_of("q")))
    with compilations() as programs:
        list(complete(decoder_of(temperature=0.3, top_p=0.5, seed=4, max_new_tokens=9, stop=("e",)), prompts_of("q")))
        list(complete(decoder_of(min_tokens=3, repetition_penalty=1.5), prompts_of("quite"), on_text=print))
    assert "jit(decode_steps)" not in programs
    assert "jit(prefill)" not in programs


@pytest.mark.parametrize("measured_pace", [False, True])
def test_the_warm_up_runs_the_programs_that_are_used(monkeypatch, measured_pace):
    """Shapes, dtypes and weak types of every argument: one that differs would compile again, within what is timed."""
    calls = {"begin": [], "decode_steps": []}

    def spy(name, function):
        def call(decoder_or_params, *arguments, **options):
            leaves, structure = jax.tree.flatten(arguments)
            types = [str(jax.typeof(leaf)) for leaf in leaves if isinstance(leaf, jax.Array)]
            calls[name].append((structure, types, options))
            return function(decoder_or_params, *arguments, **options)

        return call

    for module in ("warmup", "completion"):
        monkeypatch.setattr(f"specjax.jobs.{module}.begin", spy("begin", begin))
    monkeypatch.setattr(compiled, "decode_steps", spy("decode_steps", compiled.decode_steps))
    timed = warmup.measure_costs  # runs, but the clock decides nothing
    monkeypatch.setattr(warmup, "measure_costs", lambda *given: np.ones_like(timed(*given)))
    one(decoder_of(measured_pace=measured_pace), KNOWN, on_text=lambda text: None)
    assert len(calls["begin"]) == 2
    assert len(calls["decode_steps"]) == (10 if measured_pace else 4)
    for seen in calls.values():
        assert all(call == seen[0] for call in seen)


def test_the_warm_up_reads_a_chunk(monkeypatch):
    """The first run of a loop's body is slow; it must not fall into the first prompt's time to first token."""
    lengths = []

    def spy(decoder, rows, *arguments):
        lengths.extend(map(int, rows[2]))
        return begin(decoder, rows, *arguments)

    monkeypatch.setattr("specjax.jobs.warmup.begin", spy)
    next(complete(decoder_of(), prompts_of("a")))
    assert [length - 1 > 0 for length in lengths] == [True]


def test_each_width_is_warmed_up_once(monkeypatch):
    shapes = []

    def spy(decoder, rows, *arguments):
        shapes.append(rows[1].shape)
        if rows[1].shape != (1, 16):
            raise InterruptedError
        return warm_up(decoder, rows, *arguments)

    monkeypatch.setattr("specjax.jobs.completion.warm_up", spy)
    batches = complete(decoder_of(), prompts_of("a", "b", "c" * 17, "d"))
    assert [next(batches).compile_time_s > 0 for _ in range(2)] == [True, False]
    with pytest.raises(InterruptedError):
        next(batches)
    assert shapes == [(1, 16), (1, 24)]


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_decoded():
    prompts = prompts_of("a", "b" * 53)
    with pytest.raises(ValueError, match=r"prompt 1: .* 64 positions, got 53 and 12"):
        next(complete(decoder_of(), prompts))


def test_case_67_what_the_clock_sees():
    """Readings of 1, 2, 3, ...: two around the warm-up, one before the prefill, one after each call, one at the end."""
    batch = next(
        complete(decoder_of(), prompts_of(KNOWN), on_text=lambda text: None, clock=itertools.count(1).__next__)
    )
    assert batch.compile_time_s == 1
    assert batch.completions[0].timeline.start == 3
    assert batch.completions[0].timeline.emissions == ((4, 5), (5, 5), (6, 2))
    assert batch.seconds == 4
    quiet = next(complete(decoder_of(), prompts_of(KNOWN), clock=itertools.count(1).__next__))
    assert quiet.completions[0].timeline.emissions == ((4, 5), (5, 7))
    metrics = summarize([batch])
    assert (metrics["ttft_s"], metrics["itl_s"], metrics["e2e_latency_s"], metrics["tpot_s"]) == (1, 1, 3, 2 / 11)
    assert metrics["output_tokens_per_second"] == 12 / 4
    assert metrics["total_token_throughput"] == (len(KNOWN) + 12) / 4
    assert metrics["compile_time_s"] == 1
    assert summarize([quiet])["itl_s"] is None


def readings(plain, speculative):
    """A clock by which steps take so long: two readings around the warm-up, then two around each timed step."""
    now = 0.0
    yield from (now, now + 1)
    for duration in [plain, speculative] * 3:
        yield now
        now += duration
        yield now
    yield from itertools.count(now)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "verifier": Rejection()}])
def test_step_times_are_measured_in_a_batch_with_padding_rows(options):
    """Padding rows are read by the warm-up alone; their keys are not those of a prompt there."""
    (batch,) = complete(decoder_of(**options, measured_pace=True), prompts_of("q"), batch_size=3)
    assert batch.step_times_s is not None
    assert len(batch.completions) == 1


def test_a_decoder_that_drafts_nothing_has_one_step_time():
    decoder = dataclasses.replace(plain_decoder(decoder_of()), measured_pace=True)
    plain, widest = next(complete(decoder, prompts_of("q"))).step_times_s
    assert 0 < plain == widest


@pytest.mark.parametrize(("speculative", "drafts"), [(1.0, True), (100.0, False)])
def test_measured_step_times_decide_whether_it_pays_to_draft(speculative, drafts):
    clock = readings(1.0, speculative).__next__
    batch = next(complete(decoder_of(measured_pace=True), prompts_of(KNOWN), clock=clock))
    assert batch.step_times_s == (1.0, speculative)
    np.testing.assert_allclose(batch.pace.costs, [[1, 0], [speculative, 0]], rtol=1e-6)
    assert batch.completions[0].text == "123abcdefghi"
    assert (batch.completions[0].stats.drafted > 0) == drafts
    assert summarize([batch])["plain_step_s"] == 1.0
    assert summarize([batch])["spec_step_s"] == speculative


def test_timed_steps_are_a_plain_and_a_speculative_one(monkeypatch):
    drafted, decode_steps = [], compiled.decode_steps

    def spy(params, state, *arguments, **options):
        before = np.array(state.stats.drafted)
        state = decode_steps(params, state, *arguments, **options)
        drafted.append(int((state.stats.drafted - before)[0]))
        return state

    monkeypatch.setattr(compiled, "decode_steps", spy)
    next(complete(decoder_of(measured_pace=True), prompts_of("q")))
    assert drafted[:7] == [0, *[0, WINDOW] * 3]


def test_comparison_with_plain_decoding():
    decoder, prompts = decoder_of(**SAMPLED), prompts_of(*TEXTS)
    run, plain = list(complete(decoder, prompts)), list(complete(plain_decoder(decoder), prompts))
    result = compare(run, plain)
    assert (result.num_prompts, result.differences) == (5, ())
    rates = [summarize(batches)["output_tokens_per_second"] for batches in (run, plain)]
    assert result.speedup == rates[0] / rates[1]
    assert summarize(plain)["mean_acceptance_length"] == 1.0
    assert "tokens: equal for 5 of 5 prompts" in comparison_text(result, Settings())


def test_where_tokens_differ():
    prompts = prompts_of(*TEXTS)
    one, other = (list(complete(decoder_of(**SAMPLED, seed=seed), prompts)) for seed in (0, 1))
    result = compare(one, other)
    assert result.differences
    pairs = zip((b.completions[0] for b in one), (b.completions[0] for b in other), strict=True)
    for first, second in pairs:
        index = dict(result.differences).get(first.prompt.id)
        assert first.token_ids[:index] == second.token_ids[:index]
        assert index is None or first.token_ids[index] != second.token_ids[index]
    shorter = [dataclasses.replace(one[0].completions[0], token_ids=one[0].completions[0].token_ids[:5])]
    cut = [dataclasses.replace(one[0], completions=tuple(shorter))]
    assert compare(cut, one[:1]).differences == compare(one[:1], cut).differences == ((0, 5),)
    name, index = result.differences[0]
    count = len(result.differences)
    exact, sampled = Settings(), Settings(sampling=Sampling(temperature=1.0), verifier=Rejection())
    text = f"different for {count} of 5 prompts, first for id {name!r} at output token {index}"
    assert f"{text} (a window sums" in comparison_text(result, exact)
    assert f"{text} (only their law is the same" in comparison_text(result, sampled)


def test_reasons_have_the_names_of_the_field():
    assert [reason.name.lower() for reason in FinishReason][1:] == ["stop", "length", "nan"]
