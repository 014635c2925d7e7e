"""Speculative decoding beside plain decoding: the same prompts under one seed, and one prompt under many keys."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.compiled import decode_steps, pad_prompts
from specjax.jobs.checks import Checks
from specjax.jobs.completion import Batch, Completion, batch_rows, complete
from specjax.jobs.decoder import Decoder, Rows, begin, plain_decoder
from specjax.jobs.prompts import Prompt
from specjax.jobs.replay import Deviation, places_in, replay, scores_at
from specjax.jobs.settings import Settings, record
from specjax.jobs.summary import compare
from specjax.report.divergence import Divergence, at_edge, explain
from specjax.report.goodness_of_fit import GTest, law_test, two_sample_test
from specjax.report.levels import (
    Judgement,
    SampleCheck,
    TextCheck,
    divergence_record,
    failures,
    judge_bits,
    judge_distribution,
    judge_tokens,
    outcome,
)
from specjax.types import Context, DecodeState, SamplingParams

ROWS = 64
"""Keys drawn together."""


def with_window(decoder: Decoder, num_speculative_tokens: int) -> Decoder:
    """The same decoder with another K."""
    drafter: Any = decoder.config.drafter
    drafter = dataclasses.replace(drafter, num_tokens=num_speculative_tokens)
    return dataclasses.replace(decoder, config=dataclasses.replace(decoder.config, drafter=drafter))


# ---- The same prompts under one seed ----


def compare_texts(
    decoder: Decoder, prompts: Sequence[Prompt], windows: Sequence[int], settings: Settings
) -> Iterator[dict[int, TextCheck]]:
    """Decodes prompts plainly and at each K, a batch at a time, reads the plain text both ways and the others plainly.

    Args:
      decoder: one that drafts at every step.
      prompts: encoded ones.
      windows: each K, at least 1.
      settings: what the decoder was built from.

    Returns:
      For each batch, what was found at each K.
    """
    plain, size = plain_decoder(decoder), settings.batch_size
    runs = {window: complete(with_window(decoder, window), prompts, batch_size=size) for window in windows}
    starts = range(0, len(prompts), size)
    for first, written in zip(starts, complete(plain, prompts, batch_size=size), strict=True):
        batches = {window: next(run) for window, run in runs.items()}
        rows = batch_rows(plain, prompts[first : first + size], size)
        yield _compare_batch(plain, rows, written, batches, settings)


def _compare_batch(
    plain: Decoder, rows: Rows, written: Batch, batches: dict[int, Batch], settings: Settings
) -> dict[int, TextCheck]:
    """What one batch shows at each K, beside what plain decoding has written."""
    sampling = plain.sampling.rows(settings.batch_size, plain.eos_ids)
    state = begin(plain, rows, sampling, None)
    context = _with_output(state.context, written.completions)
    parted = {window: _divergences(plain, batch, written) for window, batch in batches.items()}
    deviations: dict[int, list[Deviation]] = {window: [] for window in batches}
    widths = [window + 1 for window in batches]
    target, params = plain.config.target, plain.params.target
    for chunk in replay(params, state.cache, context, sampling, target=target, widths=widths):
        for window, divergences in parted.items():
            deviations[window].append(chunk.deviations[window + 1])
            for row, divergence in divergences.items():
                if settings.promises_equal_tokens and chunk.holds(divergence.index):
                    scores = scores_at(chunk, row, divergence.index, keys=rows[0], context=context, sampling=sampling)
                    divergences[row] = explain(divergence, scores, settings.dtype)
    placed = {window: _places(plain, rows, state, sampling, batch, settings) for window, batch in batches.items()}
    return {
        window: _text_check(written, batch, parted[window], deviations[window], placed[window])
        for window, batch in batches.items()
    }


def _places(
    plain: Decoder, rows: Rows, state: DecodeState, sampling: SamplingParams, batch: Batch, settings: Settings
) -> np.ndarray:
    """`[m]`, where each token written with drafts falls in the law that plain decoding has for it.

    NaN: the law forbids it, and not by a hair. Nothing is placed where the law is certain, nor where texts are cut
    before stop strings, since what is left of them would tell what followed.
    """
    found, context = [np.zeros(0)], _with_output(state.context, batch.completions)
    if not settings.sampling.temperature or settings.sampling.stop:
        return found[0]
    for chunk in replay(plain.params.target, state.cache, context, sampling, target=plain.config.target, widths=[]):
        places, exists = places_in(chunk, rows[0], context)
        for row, place in np.argwhere(exists & np.isnan(places)):
            index = chunk.first + int(place)
            scores = scores_at(chunk, row, index, keys=rows[0], context=context, sampling=sampling)
            exists[row, place] = not at_edge(scores, batch.completions[row].token_ids[index], settings.dtype)
        found.append(places[exists])
    return np.concatenate(found)


def _with_output(context: Context, completions: Sequence[Completion]) -> Context:
    """The prompts with their output behind them."""
    tokens, length = np.array(context.tokens), np.array(context.prompt_length)
    for row, completion in enumerate(completions):
        end = length[row] + len(completion.token_ids)
        tokens[row, length[row] : end] = completion.token_ids
        length[row] = end
    return dataclasses.replace(context, tokens=jnp.asarray(tokens), length=jnp.asarray(length))


def _divergences(decoder: Decoder, batch: Batch, written: Batch) -> dict[int, Divergence]:
    """The first divergence of each row that has one, not explained yet."""
    places = dict(compare([batch], [written]).differences)
    pairs = enumerate(zip(batch.completions, written.completions, strict=True))
    return {
        row: _divergence(decoder, other, plain, places[plain.prompt.id])
        for row, (other, plain) in pairs
        if plain.prompt.id in places
    }


def _divergence(decoder: Decoder, other: Completion, plain: Completion, index: int) -> Divergence:
    ids = [dict(enumerate(completion.token_ids)).get(index) for completion in (plain, other)]
    pieces = [b"" if item is None else decoder.tokenizer.token_bytes(item, skip_special_tokens=False) for item in ids]
    texts = [piece.decode(errors="replace") for piece in pieces]
    return Divergence(
        prompt_id=plain.prompt.id,
        index=index,
        plain_id=ids[0],
        other_id=ids[1],
        plain_text=texts[0],
        other_text=texts[1],
    )


def _text_check(
    written: Batch,
    batch: Batch,
    divergences: dict[int, Divergence],
    deviations: Sequence[Deviation],
    places: np.ndarray,
) -> TextCheck:
    compared = [
        divergences[row].index + 1 if row in divergences else len(completion.token_ids)
        for row, completion in enumerate(written.completions)
    ]
    columns = {
        name: np.concatenate([np.zeros(0), *(getattr(part, name)[part.exists] for part in deviations)])
        for name in ("logits", "magnitude", "total_variation")
    }
    return TextCheck(
        num_prompts=len(compared),
        num_tokens=sum(compared),
        num_draft_tokens=sum(int(completion.stats.drafted) for completion in batch.completions),
        num_accepted_tokens=sum(int(completion.stats.accepted) for completion in batch.completions),
        divergences=tuple(divergences.values()),
        logit_differences=columns["logits"],
        magnitudes=columns["magnitude"],
        total_variations=columns["total_variation"],
        places=places,
    )


# ---- One prompt under many keys ----


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Sample:
    tokens: np.ndarray
    """`[N, T]`, the first tokens of each row; -1 after its end."""
    num_draft_tokens: int
    num_accepted_tokens: int


def compare_samples(decoder: Decoder, prompt: Prompt, checks: Checks) -> Iterator[tuple[int, SampleCheck]]:
    """Tests the law of the first tokens at each K, against plain decoding under other keys and against the law itself.

    Args:
      decoder: one that drafts at every step.
      prompt: encoded.
      checks: each K, how many rows (rounded up to whole batches), and how many first tokens: the joint laws of the
        first one, of the first two, ... are compared.
    """
    plain, batches = plain_decoder(decoder), -(-checks.num_keys // ROWS)
    keys = jax.random.split(jax.random.key(decoder.sampling.seed), (1 + len(checks.windows), batches, ROWS))
    baseline = _draw(plain, prompt, keys[0], checks.joint_tokens)
    law = _first_law(plain, prompt)
    for window, own_keys in zip(checks.windows, keys[1:], strict=True):
        sample = _draw(with_window(decoder, window), prompt, own_keys, checks.joint_tokens)
        yield (
            window,
            SampleCheck(
                num_rows=len(sample.tokens),
                num_draft_tokens=sample.num_draft_tokens,
                num_accepted_tokens=sample.num_accepted_tokens,
                tests=_tests(sample.tokens, baseline.tokens, law),
            ),
        )


def _tests(tokens: np.ndarray, baseline: np.ndarray, law: np.ndarray) -> dict[str, GTest]:
    counts = range(1, tokens.shape[1] + 1)
    against_plain = {
        f"first {count} against plain": two_sample_test(tokens[:, :count], baseline[:, :count]) for count in counts
    }
    return {"first 1 against its law": law_test(tokens[:, 0], law), **against_plain}


def _draw(decoder: Decoder, prompt: Prompt, keys: jax.Array, num_tokens: int) -> _Sample:
    """The first tokens of a prompt under `[batches, ROWS]` keys, each window with room for all of its draft."""
    most = max(num_tokens + decoder.config.drafter.num_tokens, decoder.sampling.min_tokens)
    decoder = dataclasses.replace(decoder, sampling=dataclasses.replace(decoder.sampling, max_new_tokens=most))
    sampling = decoder.sampling.rows(ROWS, decoder.eos_ids)
    start = begin(decoder, (keys[0], *pad_prompts([prompt.token_ids] * ROWS)), sampling, None)
    columns = len(prompt.token_ids) + np.arange(num_tokens)
    drawn, drafted, accepted = [], 0, 0
    for own_keys in keys:
        state = jax.tree.map(jnp.copy, dataclasses.replace(start, keys=own_keys))
        state = decode_steps(decoder.params, state, sampling, num_tokens, config=decoder.config)
        ended = columns >= np.asarray(state.context.length)[:, None]
        drawn.append(np.where(ended, -1, np.asarray(state.context.tokens)[:, columns]))
        drafted += int(state.stats.drafted.sum())
        accepted += int(state.stats.accepted.sum())
    return _Sample(tokens=np.concatenate(drawn), num_draft_tokens=drafted, num_accepted_tokens=accepted)


def _first_law(plain: Decoder, prompt: Prompt) -> np.ndarray:
    """The law `[V]` of a prompt's first output token, as a plain step computes it."""
    rows, sampling = batch_rows(plain, [prompt], 1), plain.sampling.rows(1, plain.eos_ids)
    state = begin(plain, rows, sampling, None)
    context = dataclasses.replace(state.context, length=state.context.length + 1)
    chunks = replay(plain.params.target, state.cache, context, sampling, target=plain.config.target, widths=[])
    return np.exp(np.asarray(next(chunks).plain.log_probs[0, 0], np.float64))


# ---- Verdicts ----


def judge(settings: Settings, text: TextCheck, sample: SampleCheck | None) -> tuple[Judgement, ...]:
    """The verdicts on the three levels at one K."""
    greedy, dtype = settings.sampling.temperature == 0, settings.dtype
    return (
        judge_distribution(sample, text, dtype=dtype, greedy=greedy),
        judge_tokens(text, promised=settings.promises_equal_tokens),
        judge_bits(text, dtype=dtype),
    )


def report(
    settings: Settings, checks: Checks, texts: Mapping[int, TextCheck], judgements: Mapping[int, Sequence[Judgement]]
) -> dict[str, Any]:
    """Everything that was found, for JSON.

    Args:
      settings: what was decoded.
      checks: how much was compared.
      texts: by K.
      judgements: by K.
    """
    return {
        "passed": outcome(judgements),
        "failures": failures(judgements),
        "settings": record(settings),
        "checks": dataclasses.asdict(checks),
        "environment": _environment(),
        "results": [
            {
                "num_speculative_tokens": window,
                **{judgement.level: _judgement_record(judgement) for judgement in judgements[window]},
                "divergences": [divergence_record(divergence) for divergence in text.divergences],
            }
            for window, text in texts.items()
        ],
    }


def _judgement_record(judgement: Judgement) -> dict[str, Any]:
    return {"passed": judgement.passed, "summary": judgement.summary, **judgement.numbers}


def _environment() -> dict[str, Any]:
    return {
        "jax": jax.__version__,
        "devices": [device.device_kind for device in jax.devices()],
        **{name: getattr(jax.config, name) for name in ("jax_default_matmul_precision", "jax_default_prng_impl")},
    }
