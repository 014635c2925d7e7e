"""Slots that are refilled while the others go on. Cases 23, 62 and 68."""

import dataclasses

import numpy as np
import pytest
from line_decoder import KNOWN, decoder_of, prompts_of
from programs import compilations

from specjax import compiled
from specjax.jobs import batching
from specjax.jobs.batching import Request, SlotBatch
from specjax.jobs.completion import complete
from specjax.verify import Block

TEXTS = [KNOWN, "x", "hij012", "a" * 15, "zz9", "0", "4" * 11, KNOWN[3:], "f", "1"]
LONG = "ab" * 10
"""Of the next bucket."""

pytestmark = pytest.mark.usefixtures("quickly")


def sampled(**options):
    return decoder_of(temperature=1.0, sharpness=7.0, verifier=Block(), log_probs=False, **options)


def requests(decoder, prompts):
    return [Request(prompt=prompt, sampling=decoder.sampling) for prompt in prompts]


def play(slots, requests):
    """Completions by id, and the ids in the order of finishing."""
    rows = [row for finished in slots.complete(requests) for row in finished]
    assert len({row.prompt.id for row in rows}) == len(rows)
    return {row.prompt.id: row for row in rows}, [row.prompt.id for row in rows]


def alone(decoder, prompts):
    return {row.prompt.id: row for batch in complete(decoder, prompts) for row in batch.completions}


def assert_equal(rows, wanted):
    assert rows.keys() == wanted.keys()
    for name, row in rows.items():
        assert (row.token_ids, row.text, row.finish_reason) == (
            wanted[name].token_ids,
            wanted[name].text,
            wanted[name].finish_reason,
        )
        for one, other in zip(vars(row.stats).values(), vars(wanted[name].stats).values(), strict=True):
            assert one.tolist() == other.tolist()


@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_row_is_what_it_is_alone(num_slots):
    """In any order, in slots that grow in the middle, in few slots and in many."""
    decoder, prompts = sampled(), prompts_of(*TEXTS[:6], LONG, *TEXTS[6:])
    wanted = alone(decoder, prompts)
    for order in (prompts, prompts[::-1]):
        rows, _ = play(SlotBatch(decoder, num_slots), requests(decoder, order))
        assert_equal(rows, wanted)


def test_parameters_of_each_row():
    decoder, prompts = sampled(), prompts_of(*TEXTS)
    own = [
        dataclasses.replace(
            decoder.sampling,
            temperature=0.5 + index % 3,
            top_p=0.9,
            max_new_tokens=index,
            seed=index,
            stop=("b", "zz") if index % 2 else (),
        )
        for index in range(len(TEXTS))
    ]
    asked = [Request(prompt=prompt, sampling=sampling) for prompt, sampling in zip(prompts, own, strict=True)]
    rows, _ = play(SlotBatch(decoder, 3), asked)
    for prompt, sampling in zip(prompts, own, strict=True):
        wanted = alone(dataclasses.replace(decoder, sampling=sampling), [prompt])
        assert_equal({prompt.id: rows[prompt.id]}, wanted)
    assert {row.finish_reason for row in rows.values()} == {"stop", "length"}


def test_case_68_a_fast_row_gives_its_slot_away_while_a_slow_one_goes_on():
    """Row 0 writes the known line with full drafts; row 1 has a slot to itself until it is done."""
    decoder = decoder_of(log_probs=False)
    prompts = prompts_of("q", KNOWN, KNOWN, KNOWN)
    rows, order = play(SlotBatch(decoder, 2), requests(decoder, prompts))
    assert order.index(1) < order.index(0)
    assert [int(rows[index].stats.steps) for index in (1, 2, 3)] == [3, 3, 3]
    assert int(rows[0].stats.steps) > 3
    assert order.index(1) < order.index(2) < order.index(3)


def test_a_call_ends_when_a_row_is_done_or_after_so_many_steps(monkeypatch):
    """12 new tokens: 3 steps of 5, 5 and 2 for the line; the last rows are left alone to their ends."""
    calls, decode_steps = [], compiled.decode_steps

    def spy(params, state, sampling, num_steps, least=1, *, config):
        before = int(state.stats.steps.sum())
        state = decode_steps(params, state, sampling, num_steps, least, config=config)
        calls.append((num_steps, least, int(state.stats.steps.sum()) - before))
        return state

    monkeypatch.setattr(compiled, "decode_steps", spy)
    decoder = decoder_of(log_probs=False)
    slots = SlotBatch(decoder, 2, max_steps=2)
    play(slots, requests(decoder, prompts_of(*[KNOWN] * 3)))
    assert [call[0] for call in calls[:4]] == [0] * 4  # compiles, and learns what a call costs
    assert calls[4:] == [(2, 2, 4), (2, 2, 2), (2, 1, 2), (2, 1, 1)]
    assert slots.num_calls == 4


def test_case_62_nothing_is_compiled_for_lengths_in_a_bucket_or_few_rows():
    decoder = sampled()
    slots = SlotBatch(decoder, 3)
    play(slots, requests(decoder, prompts_of(LONG, *TEXTS)))
    spent = slots.compile_time_s
    with compilations() as programs:
        play(slots, requests(decoder, prompts_of(*TEXTS[::-1], LONG[1:])))
        play(slots, requests(decoder, prompts_of("7")))
    assert programs == []
    assert slots.compile_time_s == spent > 0


def test_stopping_ends_with_what_is_done():
    decoder, slots = sampled(), SlotBatch(sampled(), 2)
    asked = requests(decoder, prompts_of(*TEXTS))
    rows = [row for finished in slots.complete(asked, lambda: slots.num_calls == 2) for row in finished]
    assert 0 < len(rows) < len(TEXTS)
    assert slots.num_calls == 2
    wanted = alone(decoder, prompts_of(*TEXTS))
    assert_equal({row.prompt.id: row for row in rows}, {row.prompt.id: wanted[row.prompt.id] for row in rows})


def test_stopping_while_slots_are_filled_reads_no_other_prompt(monkeypatch):
    read, start = [], SlotBatch._start
    monkeypatch.setattr(SlotBatch, "_start", lambda *arguments: read.append(0) or start(*arguments))
    decoder = sampled()
    slots = SlotBatch(decoder, 3)
    assert list(slots.complete(requests(decoder, prompts_of(*TEXTS)), lambda: len(read) == 2)) == [[]]
    assert (len(read), slots.num_calls) == (2, 0)


def test_requests_that_fail_take_nothing_with_them_that_is_done():
    decoder = sampled()

    def asked():
        yield from requests(decoder, prompts_of(*TEXTS[:4]))
        raise ValueError("no more")

    done, texts = [], prompts_of(*TEXTS)

    def take():
        for finished in SlotBatch(decoder, 2).complete(asked()):
            done.extend(finished)

    with pytest.raises(ValueError, match="no more"):
        take()
    assert len(done) == len({row.prompt.id for row in done}) == 3  # the fourth runs when a slot is free for a fifth
    wanted = alone(decoder, texts)
    assert_equal({row.prompt.id: row for row in done}, {row.prompt.id: wanted[row.prompt.id] for row in done})


def test_no_requests():
    assert list(SlotBatch(sampled(), 2).complete([])) == [[]]


def test_measured_pace_leaves_the_tokens(monkeypatch):
    """Steps are timed once, before the first row; a wide step that costs ten plain ones is then never taken."""
    times = []
    monkeypatch.setattr(batching, "measure_costs", lambda *_: times.append(0) or np.array([[1.0, 0], [10, 0]]))
    decoder = decoder_of(log_probs=False, measured_pace=True)
    slots = SlotBatch(decoder, 2)
    rows, _ = play(slots, requests(decoder, prompts_of(*[KNOWN] * 3)))
    assert times == [0]
    assert slots.step_times_s == (1.0, 10.0)
    assert {row.text for row in rows.values()} == {"123abcdefghi"}
    assert [int(rows[index].stats.drafted) for index in range(3)] == [0] * 3


def test_slots_that_go_on_begin_as_wide_as_earlier_ones():
    """So that a job which is started again needs no program that it had not, though only short prompts are left."""
    decoder, (long, short) = sampled(), prompts_of(LONG, "ab")
    config = dataclasses.replace(decoder.config, prefill_chunk=200)  # as 5 slots, no other test's: all is compiled here
    decoder = dataclasses.replace(decoder, config=config)
    before, _ = play(SlotBatch(decoder, 5), requests(decoder, [long, short]))
    with compilations() as programs:
        found, _ = play(SlotBatch(decoder, 5, longest=len(long.token_ids)), requests(decoder, [short]))
    assert programs == []
    assert found[short.id].token_ids == before[short.id].token_ids


def test_the_clock_sees_the_host_and_compilation_apart():
    """A clock that ticks at every look: no time of the host is negative, and what is compiled is in neither."""
    decoder, now = sampled(), [0.0]

    def clock():
        now[0] += 1
        return now[0]

    slots = SlotBatch(decoder, 2, clock=clock)
    play(slots, requests(decoder, prompts_of("a", "b", "c")))
    assert slots.compile_time_s > 0
    own = slots.host_time_s - (2 * 2 + slots.num_calls) * slots.dispatch_time_s
    assert 0 < own < now[0] - slots.compile_time_s


def test_the_host_is_charged_for_its_own_work_and_for_calling_programs(monkeypatch):
    """Encoding a row takes a second, reading its prompt a hundred, as where a call runs before it returns; ten seconds
    are a call of the decoder, with or without steps."""
    decoder, now = sampled(), [0.0]

    def slow(owner, name, seconds):
        function = getattr(owner, name)

        def run(*given, **options):
            now[0] += seconds
            return function(*given, **options)

        monkeypatch.setattr(owner, name, run)

    slow(batching, "batch_rows", 1)
    slow(batching, "begin", 100)
    slow(compiled, "decode_steps", 10)
    slots = SlotBatch(decoder, 1, clock=lambda: now[0])
    play(slots, requests(decoder, prompts_of("a", "b", "c")))
    assert slots.dispatch_time_s == 10
    assert slots.compile_time_s == 1 + 100 + 10 + 3 * 10
    assert slots.host_time_s == 2 + (2 * 2 + slots.num_calls) * 10
    now[0] += 1000  # nobody's: between two uses of the same slots
    play(slots, requests(decoder, prompts_of("d")))
    assert slots.host_time_s == 3 + (2 * 3 + slots.num_calls) * 10
