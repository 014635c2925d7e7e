"""Rows that take the place of others in a running batch (cases 62 and 68)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import outputs, snapshot
from harness import tiny_params
from programs import NEW, TINY, VOCAB, WIDTH, WINDOW, compilations, table_config

from specjax import compiled, decode
from specjax.decode import DecodeConfig
from specjax.drafters.ngram import NGramDrafter
from specjax.sampling import sampling_params
from specjax.slots import Slots, empty_slots
from specjax.types import FinishReason, Params
from specjax.verify import Rejection

CONFIG = table_config(NGramDrafter(num_tokens=WINDOW), Rejection())
PARAMS = Params(target=jnp.asarray(np.random.default_rng(0).normal(scale=2.0, size=(VOCAB, VOCAB)), jnp.float32))
SLOTS = 3
PROMPTS = [[1, 2, 3, 1, 2, 3], [5], [4, 4], [6, 7, 8], [9, 9, 9, 9]]

INSERT = compiled._insert
"""The library's own program, which is unoptimised in the tests."""

pytestmark = pytest.mark.usefixtures("quickly")


def row(index, *, width=WIDTH, max_tokens=NEW):
    """A prompt, read; its key comes from its index."""
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(PROMPTS[index])] = PROMPTS[index]
    sampling = sampling_params(1, temperature=0.5 + index, max_tokens=max_tokens)
    length, keys = jnp.array([len(PROMPTS[index])]), jax.random.key(index)[None]
    state = compiled.prefill(PARAMS, keys, jnp.asarray(tokens), length, sampling, config=CONFIG, max_new_tokens=NEW)
    return Slots(state=state, sampling=sampling)


def steps(slots, *limits):
    state = compiled.decode_steps(PARAMS, slots.state, slots.sampling, *limits, config=CONFIG)
    return slots.replace(state=state)


def put(slots, rows, slot):
    return compiled.insert(slots, rows, slot, config=CONFIG)


def alone(index, **options):
    return outputs(snapshot(steps(row(index, **options)).state))[0]


def test_empty_slots_do_nothing():
    slots = empty_slots(row(0), SLOTS)
    after = steps(slots)
    assert after.state.finish_reason.tolist() == [FinishReason.LENGTH] * SLOTS
    assert after.state.stats.steps.tolist() == [0] * SLOTS


def test_a_state_that_is_not_of_rows_is_refused():
    first = row(0)
    with pytest.raises(ValueError, match=r"one row in front .* got shapes \[\(3,\)\]"):
        empty_slots(first.replace(state=first.state.replace(draft_state=jnp.zeros(3))), SLOTS)


def test_rows_that_come_later_change_no_other_and_are_what_they_are_alone():
    """Rows 0 to 4 through three slots; buffers of two lengths; every token is that of the row by itself."""
    slots = empty_slots(row(0, width=24), SLOTS)
    for slot, index in enumerate((0, 1, 2)):
        slots = put(slots, row(index, max_tokens=(NEW, 5, 9)[index]), slot)
    slots = steps(slots, 100, SLOTS)
    reasons = np.asarray(slots.state.finish_reason)
    assert (reasons == FinishReason.LENGTH).sum() == 1
    assert reasons[1] == FinishReason.LENGTH
    found = {1: outputs(snapshot(slots.state))[1]}
    before = snapshot(slots.state)
    slots = put(slots, row(3, width=24), 1)
    after = snapshot(slots.state)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if old.shape[0] == SLOTS:
            assert old[[0, 2]].tobytes() == new[[0, 2]].tobytes()
    slots = steps(slots, 2)
    slots = steps(slots, 100, SLOTS)
    found[2] = outputs(snapshot(slots.state))[2]
    slots = steps(put(slots, row(4), 2))
    found[0], found[3], found[4] = outputs(snapshot(slots.state))
    limits = {1: 5, 2: 9}
    for index, tokens in found.items():
        assert tokens == alone(index, max_tokens=limits.get(index, NEW))
    assert [len(found[index]) for index in range(5)] == [NEW, 5, 9, NEW, NEW]


def test_a_slot_that_held_a_longer_text_is_padded():
    slots = steps(put(empty_slots(row(0, width=24), SLOTS), row(0, width=24), 1))
    slots = put(slots, row(1), 1)
    assert slots.state.context.tokens[1].tolist() == PROMPTS[1] + [CONFIG.pad_id] * (24 + NEW + WINDOW)


def test_all_slots_move_into_larger_ones():
    slots = empty_slots(row(0), SLOTS)
    for slot in range(SLOTS):
        slots = put(slots, row(slot), slot)
    slots = steps(slots, 2)
    larger = steps(put(empty_slots(row(0, width=24), SLOTS), slots, 0))
    assert outputs(snapshot(larger.state)) == [alone(index) for index in range(SLOTS)]


def test_costs_belong_to_the_slots_and_history_to_the_row():
    """The row brings its acceptance; what a step costs is the same for all."""
    slots, new = empty_slots(row(0), SLOTS), row(1)
    pace = new.state.pace.replace(acceptance=new.state.pace.acceptance + 0.1, costs=jnp.full((2, 2), 7.0))
    after = put(slots, new.replace(state=new.state.replace(pace=pace)), 2).state.pace
    assert after.costs.tolist() == [[1, 0], [1, 0]]
    np.testing.assert_allclose(after.acceptance[2] - after.acceptance[1], 0.1, rtol=1e-5)


def test_a_row_is_put_in_place_and_no_buffer_is_copied():
    """The compiled program needs no memory beside the slots that it writes into."""
    row, slots = (Slots(state=shapes(width, rows), sampling=sampling_params(rows, max_tokens=NEW)) for width, rows in
                  ((16, 1), (256, SLOTS)))  # fmt: skip
    memory = INSERT.lower(slots, row, jnp.int32(0), pad_id=0).compile().memory_analysis()
    buffers = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(slots.state.cache))
    assert memory.temp_size_in_bytes < buffers / 100
    assert memory.alias_size_in_bytes > buffers


def shapes(width, rows):
    """Of a transformer's state, bfloat16 in its cache."""
    config = DecodeConfig(target=TINY)
    params = Params(target=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny_params()))
    prompt, length = jnp.zeros((rows, width), jnp.int32), jnp.ones(rows, jnp.int32)
    prefill = partial(decode.prefill, config=config, max_new_tokens=NEW)
    return jax.eval_shape(prefill, params, jax.random.key(0), prompt, length, sampling_params(rows, max_tokens=NEW))


def test_one_program_inserts_into_every_slot_and_the_row_can_be_used_again():
    slots, new = put(empty_slots(row(0), SLOTS), row(1), 0), row(1)
    with compilations() as programs:
        for slot in (1, 2, 0):
            slots = put(slots, new, slot)
    assert programs == []
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))


@pytest.mark.parametrize("limits", [(100, SLOTS), (1, 1)])
def test_number_of_steps_and_of_running_rows_share_a_program(limits):
    slots = steps(put(empty_slots(row(0), SLOTS), row(1), 0), 1)
    with compilations() as programs:
        steps(slots, *limits)
    assert programs == []


def test_rows_that_do_not_fit_are_refused():
    slots = empty_slots(row(0), SLOTS)
    with pytest.raises(ValueError, match=r"within 3 slots, got \d+ and 1 from slot 3"):
        put(slots, row(1), 3)
    with pytest.raises(ValueError, match=r"expected at most 54 columns .* got 62"):
        put(slots, row(1, width=24), 0)


def test_parameters_come_with_the_row():
    slots = put(empty_slots(row(0), SLOTS), row(2), 1)
    assert slots.sampling.temperature.tolist() == [0.5, 2.5, 0.5]
