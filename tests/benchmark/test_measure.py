"""Pairs of a known text under a clock that counts. Case 67 (what the clock waits for) and 65 (what is counted)."""

import dataclasses
from functools import partial

import jax
import pytest
from measured import LINE, line_decoder, ticking

from specjax.benchmark import phases
from specjax.benchmark.measure import by_turns, measure, num_batches
from specjax.benchmark.phases import Phases, time_phases, total_phases
from specjax.benchmark.questions import Question, read_questions
from specjax.benchmark.summary import summarize_pairs
from specjax.benchmark.synthetic import with_synthetic_acceptance
from specjax.jobs.completion import complete
from specjax.jobs.decoder import plain_decoder
from specjax.jobs.prompts import Prompt, encode_prompts
from specjax.pace import make_pace

LONG = "zzzz" + LINE * 2 + "0"
"""A prompt of the bucket that its second turn is in as well, so that all tests share programs of one shape."""
QUESTIONS = [
    Question(id=1, category="a", turns=(LONG, "3")),
    Question(id=2, category="a", turns=(LONG,)),
    Question(id=3, category="b", turns=(LONG,)),
]

pytestmark = pytest.mark.usefixtures("quickly")


@pytest.fixture(scope="module")
def pairs(quickly):
    return list(measure(line_decoder(), QUESTIONS, batch_size=2, clock=ticking()))


def known_batch(decoder):
    prompts = [Prompt(id=index, content=LONG) for index in range(2)]
    return next(complete(decoder, encode_prompts(decoder.tokenizer, prompts, raw=True), batch_size=2))


def test_batches_are_filled_across_categories_and_turns(pairs):
    ids = [[completion.prompt.id for completion in pair.plain.completions] for pair in pairs]
    assert ids == [["1.1", "2.1"], ["3.1", "1.2"]]
    assert [[question.category for question in pair.questions] for pair in pairs] == [["a", "a"], ["b", "a"]]
    assert num_batches(QUESTIONS, 2) == len(pairs)
    assert num_batches(QUESTIONS, 1) == 4
    assert num_batches(QUESTIONS, 3) == 2
    assert summarize_pairs(pairs)["mean_batch_fill"] == 1.0


def test_systems_run_by_turns_and_the_median_counts():
    order, times = [], iter([3, 10, 1, 30, 2, 20])

    def run(name):
        order.append(name)
        return next(times)

    found = by_turns({name: partial(run, name) for name in "ab"}, 3, float)
    assert order == [*"ababab"]
    assert found == {"a": 2, "b": 20}


@pytest.mark.parametrize(
    ("size", "batches", "fill"), [(1, 33, 1.0), (2, 17, 33 / 34), (4, 9, 33 / 36), (8, 5, 33 / 40)]
)
def test_own_questions_leave_few_rows_empty(size, batches, fill):
    """Of 33 turns in 9 categories; a batch for each category and turn would leave more than half of 8 rows empty."""
    questions = read_questions()
    assert num_batches(questions, size) == batches
    assert sum(len(question.turns) for question in questions) / (batches * size) == fill


def test_both_ways_decode_the_same_prompts(pairs):
    for pair in pairs:
        fast, slow = pair.speculative.completions, pair.plain.completions
        assert [one.prompt for one in fast] == [one.prompt for one in slow]
        assert [one.token_ids for one in fast] == [one.token_ids for one in slow]
        assert [int(one.stats.steps) for one in slow] == [12] * len(slow)
        assert all(one.stats.steps < 12 for one in fast)


def test_a_later_turn_follows_the_plain_reply():
    """Simulated acceptance of a wrong draft makes the speculative one another text."""
    question = Question(id=1, category="a", turns=("z" * 31 + "020", "3"))
    first, then = measure(with_synthetic_acceptance(line_decoder(), 1.0), [question], batch_size=2)
    reply = (LINE * 2)[1:13]
    assert first.plain.completions[0].text == reply != first.speculative.completions[0].text
    (second,) = then.plain.completions
    assert [message["content"] for message in second.prompt.content] == ["z" * 31 + "020", reply, "3"]
    assert [message["role"] for message in second.prompt.content] == ["user", "assistant", "user"]


def test_case_65_what_is_measured_is_the_output(pairs):
    summary = summarize_pairs(pairs)
    for side in ("speculative", "plain"):
        outputs = [one for pair in pairs for one in getattr(pair, side).completions]
        assert summary[side]["num_emitted_tokens"] == sum(len(one.token_ids) for one in outputs) == 48
        assert summary[side]["num_prompts"] == 4
    assert summary["num_equal_outputs"] == 4


def test_phases_of_known_steps():
    """The clock is read before and after each half of a step and once behind it: 1 second each, 1 between them."""
    decoder = line_decoder()
    batch = known_batch(decoder)
    assert int(batch.completions[0].stats.steps) == 3
    found = time_phases(decoder, batch, batch_size=2, clock=ticking())
    assert found == Phases(
        prefill_time_s=1.0,
        draft_time_s=3.0,
        verify_time_s=3.0,
        other_time_s=7.0,
        num_batch_steps=3,
        step_gaps_s=8.0,
        num_step_gaps=2,
    )
    plain = time_phases(plain_decoder(decoder), batch, batch_size=2, clock=ticking())
    assert (plain.draft_time_s, plain.verify_time_s, plain.num_batch_steps) == (0, 12, 12)
    assert total_phases([found, plain]).num_batch_steps == 15
    assert total_phases([]) == Phases()
    assert Phases().draft_step_s is None


def test_case_67_phases_wait_for_the_device(monkeypatch):
    """Everything launched before a look at the clock has been waited for, and compiling lies before the first look."""
    events = []

    def spy(name, function):
        def call(*arguments, **options):
            events.append(name)
            return function(*arguments, **options)

        return call

    for name in ("begin", "draft_step", "verify_step"):
        monkeypatch.setattr(phases, name, spy(name, getattr(phases, name)))
    monkeypatch.setattr(phases.jax, "block_until_ready", spy("wait", jax.block_until_ready))
    decoder = line_decoder()
    batch = known_batch(decoder)
    events.clear()
    time_phases(decoder, batch, batch_size=2, clock=spy("look", ticking()))
    step = ["look", "draft_step", "wait", "look", "verify_step", "wait", "look"]
    assert events == ["begin", *step, "look", "begin", "wait", "look", *[*step, "look"] * 3, "look"]


def test_instrumented_steps_are_those_of_the_run():
    """A paced batch is run again with its own costs: steps that cost nine times the text are not worth drafting for."""
    decoder = line_decoder()
    batch = known_batch(decoder)
    dear = dataclasses.replace(batch, pace=make_pace(2, [[1.0, 0.0], [1.0, 9.0]]))
    assert time_phases(decoder, dear, batch_size=2).num_batch_steps == 12


def test_conversations_that_would_not_fit_are_refused_at_once():
    with pytest.raises(ValueError, match=r"question 1: .* 64 positions, got up to 84"):
        next(measure(line_decoder(max_new_tokens=25), QUESTIONS))


def test_synthetic_acceptance_is_what_was_asked_for():
    """Every window is full and kept, though the text is not the target's: 4 + 1 tokens a step, and no end of text."""
    decoder = with_synthetic_acceptance(line_decoder(), 1.0)
    assert decoder.sampling.ignore_eos
    stats = known_batch(decoder).completions[0].stats
    assert (stats.steps, stats.emitted, stats.histogram.tolist()) == (3, 12, [0, 1, 0, 0, 2])
    hopeless = known_batch(with_synthetic_acceptance(line_decoder(), 0.0)).completions[0]
    assert (hopeless.stats.steps, hopeless.stats.accepted) == (12, 0)
    assert hopeless.text == (LINE * 2)[1:13]
