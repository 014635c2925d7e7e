import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from specjax.report.divergence import Divergence
from specjax.report.goodness_of_fit import GTest
from specjax.report.levels import (
    SampleCheck,
    TextCheck,
    divergence_record,
    divergence_table,
    failures,
    judge_bits,
    judge_distribution,
    judge_tokens,
    level_table,
    outcome,
    pool_texts,
    unjudged,
    verdict,
)

TIE = Divergence(
    prompt_id="[a]",
    index=5,
    plain_id=1,
    other_id=2,
    plain_text="[b]",
    other_text="c",
    gap=5e-5,
    top2_gap=5e-5,
    allowed=1e-4,
)
FAULT = dataclasses.replace(TIE, prompt_id=7, gap=0.5, edge=0.2)
FLOAT32 = {"dtype": "float32", "greedy": False}
SOUND, BIASED, SMALL = (GTest(statistic=1.0, degrees=1, p_value=p) for p in (0.3, 1e-5, None))


def text_of(*divergences, drafted=9, differences=(1e-6, 2e-6), variations=(1e-6, 3e-6), places=()):
    return TextCheck(
        num_prompts=3,
        num_tokens=40,
        num_draft_tokens=drafted,
        num_accepted_tokens=4,
        divergences=divergences,
        logit_differences=np.array(differences, float),
        magnitudes=np.full(len(differences), 20.0),
        total_variations=np.array(variations, float),
        places=np.array(places, float),
    )


def sample_of(*tests, drafted=9):
    named = {f"test {index}": test for index, test in enumerate(tests)}
    return SampleCheck(num_rows=128, num_draft_tokens=drafted, num_accepted_tokens=1, tests=named)


def printed(table):
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("divergences", "passed"), [((), True), ((TIE,), True), ((TIE, FAULT), False), ((FAULT,), False)]
)
def test_tokens_may_part_at_ties_only(divergences, passed):
    judgement = judge_tokens(text_of(*divergences), promised=True)
    assert judgement.passed is passed
    assert judgement.numbers["num_equal_prompts"] == 3 - len(divergences)
    assert judgement.numbers["num_beyond_rounding"] == (FAULT in divergences)
    assert (
        "id 7, output token 5: 1 '[b]' plainly, 2 'c' with drafts, gap 0.5 (allowed 0.0001)" in judgement.summary
    ) is (not passed)


def test_tokens_are_not_judged_where_they_are_not_promised_or_nothing_was_drafted():
    judgement = judge_tokens(text_of(FAULT), promised=False)
    assert judgement.passed is None
    assert judgement.summary.startswith("not promised here: 2 of 3 prompts equal")
    assert judgement.numbers["num_beyond_rounding"] is None
    judgement = judge_tokens(text_of(drafted=0), promised=True)
    assert judgement.passed is None
    assert judgement.summary.startswith("nothing to verify")


def test_tokens_that_differ_fail_even_if_nothing_was_drafted():
    assert judge_tokens(text_of(FAULT, drafted=0), promised=True).passed is False


@pytest.mark.parametrize(
    ("tests", "drafted", "passed"),
    [
        ((SOUND, SOUND), 9, True),
        ((SOUND, BIASED), 9, False),
        ((SOUND, SMALL), 9, True),
        ((SMALL, SMALL), 9, None),
        ((SOUND,), 0, None),
    ],
)
def test_distribution_passes_if_something_was_tested_and_all_of_it_passed(tests, drafted, passed):
    judgement = judge_distribution(sample_of(*tests, drafted=drafted), text_of(), dtype="float32", greedy=False)
    assert judgement.passed is passed
    assert judgement.numbers["num_rows"] == 128


def test_distribution_fails_where_the_laws_differ():
    wrong = text_of(variations=(0.0, 3e-4))
    for sample in (None, sample_of(SOUND), sample_of(SOUND, drafted=0)):
        assert judge_distribution(sample, wrong, dtype="float32", greedy=False).passed is False
    assert judge_distribution(sample_of(SOUND), wrong, dtype="bfloat16", greedy=False).passed is True
    nothing = text_of(variations=(float("nan"), 0.0))
    assert judge_distribution(sample_of(SOUND), nothing, dtype="float32", greedy=False).passed is False


def test_distribution_without_keys_is_not_judged():
    assert judge_distribution(None, text_of(), dtype="float32", greedy=False).passed is None


EVEN = np.linspace(0, 1, 400, endpoint=False)


@pytest.mark.parametrize(
    ("places", "drafted", "passed"),
    [
        (EVEN, 9, True),
        (EVEN**2, 9, False),
        (np.append(EVEN, np.nan), 9, False),
        (EVEN[:100], 9, None),
        (EVEN**2, 0, None),
    ],
)
def test_distribution_looks_at_where_tokens_fall_in_their_laws(places, drafted, passed):
    text = text_of(places=places, drafted=drafted)
    judgement = judge_distribution(None, text, dtype="float32", greedy=False)
    assert judgement.passed is passed
    assert judgement.numbers["places"]["num_tokens"] == len(places)
    biased = judge_distribution(sample_of(BIASED), text, dtype="float32", greedy=False)
    assert biased.passed is False


def test_distribution_of_greedy_rows_is_left_to_the_tokens():
    judgement = judge_distribution(None, text_of(variations=(1.0, 0.0, 0.0, 0.0)), dtype="float32", greedy=True)
    assert judgement.passed is None
    assert "another one at 25.000% of 4 places" in judgement.summary


@pytest.mark.parametrize(
    ("dtype", "difference", "passed"),
    [("float32", 4.8e-4, True), ("float32", 4.9e-4, False), ("bfloat16", 0.99, True), ("bfloat16", 1.01, False)],
)
def test_bits_allow_some_steps_at_the_largest_logit(dtype, difference, passed):
    judgement = judge_bits(text_of(differences=(0.0, difference, 1e-9)), dtype=dtype)
    assert judgement.passed is passed
    assert judgement.numbers["num_equal_places"] == 1
    assert judgement.numbers["num_beyond_rounding"] == (not passed)
    assert judgement.numbers["max_logit_difference"] == difference


def test_broken_logits_fail():
    judgement = judge_bits(text_of(differences=(float("nan"), 0.0)), dtype="float32")
    assert judgement.passed is False
    assert judgement.numbers["max_logit_difference"] is None


def test_bits_without_any_output_are_not_judged():
    assert judge_bits(text_of(differences=()), dtype="float32").passed is None


def test_batches_are_pooled():
    pooled = pool_texts([text_of(TIE), text_of(FAULT, differences=(1.0,), variations=(0.5,), places=(0.25,))])
    assert (pooled.num_prompts, pooled.num_tokens, pooled.num_draft_tokens, pooled.num_accepted_tokens) == (
        6,
        80,
        18,
        8,
    )
    assert pooled.divergences == (TIE, FAULT)
    assert pooled.logit_differences.tolist() == [1e-6, 2e-6, 1.0]
    assert pooled.places.tolist() == [0.25]
    assert pooled.magnitudes.tolist() == [20.0] * 3
    assert pooled.total_variations.tolist() == [1e-6, 3e-6, 0.5]


def test_verdict_names_every_failure_and_counts_the_rest():
    good, bad = judge_bits(text_of(), dtype="float32"), judge_tokens(text_of(FAULT), promised=True)
    equal, open_question = judge_tokens(text_of(), promised=True), judge_distribution(None, text_of(), **FLOAT32)
    levels = {1: [open_question, equal, good], 4: [equal]}
    assert verdict(levels) == "passed: 3 of 4 verdicts, 1 not judged"
    assert (failures(levels), unjudged(levels), outcome(levels)) == ([], [], True)
    lines = verdict({1: [good], 4: [bad], 8: [bad]}).splitlines()
    assert [line.split(":")[:2] for line in lines] == [["failed", " K = 4, tokens"], ["failed", " K = 8, tokens"]]
    assert len(failures({4: [bad]})) == 1
    assert outcome({1: [good], 4: [bad]}) is False


def test_what_only_logits_were_read_of_is_not_judged():
    """They say nothing about drafts."""
    good, equal = judge_bits(text_of(), dtype="float32"), judge_tokens(text_of(), promised=True)
    law, tokens = judge_distribution(None, text_of(), **FLOAT32), judge_tokens(text_of(drafted=0), promised=True)
    levels = {1: [equal, good], 4: [law, tokens, good], 8: [law, tokens]}
    assert (unjudged(levels), outcome(levels)) == ([4, 8], None)
    assert verdict(levels) == "not judged: neither law nor tokens at K = 4, 8"


def test_records_are_json():
    impossible = GTest(statistic=float("inf"), degrees=3, p_value=0.0)
    judgement = judge_distribution(
        sample_of(impossible), text_of(variations=(float("nan"),)), dtype="float32", greedy=False
    )
    assert judgement.passed is False
    for record in (judgement.numbers, divergence_record(TIE), judge_bits(text_of(), dtype="float32").numbers):
        json.dumps(record, allow_nan=False)
    assert divergence_record(TIE)["within_rounding"] is True
    assert divergence_record(FAULT)["within_rounding"] is False


def test_tables():
    judgements = {4: [judge_bits(text_of(), dtype="float32"), judge_tokens(text_of(FAULT), promised=True)]}
    lines = [line for line in printed(level_table(judgements)).splitlines() if line.startswith("│ 4")]
    assert [line.split("│")[2].strip() for line in lines] == ["bits", "tokens"]
    assert [line.split("│")[3].strip() for line in lines] == ["passed", "FAILED"]
    ended = dataclasses.replace(FAULT, other_id=None, gap=None, edge=None)
    rows = printed(divergence_table({8: text_of(TIE, ended)})).splitlines()
    cells = [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows if row.startswith("│ 8")]
    assert cells == [
        ["8", "[a]", "5", "1 '[b]'", "2 'c'", "5e-05", "5e-05", "-", "0.0001"],
        ["8", "7", "5", "1 '[b]'", "-", "-", "5e-05", "-", "0.0001"],
    ]
