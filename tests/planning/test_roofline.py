"""The least a pass can cost, times and gains, each worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from harness import tiny_config

from specjax.models.params import is_shape, param_shapes
from specjax.planning.gain import (
    BATCHES,
    WINDOWS,
    best_window,
    break_even,
    expected_tokens,
    model_batch,
    most_rows,
    overheads,
    speedup,
    step_times,
)
from specjax.planning.hardware import Chip
from specjax.planning.roofline import Model, Pair, Work, busy_seconds, estimated_bytes, exchange_seconds
from specjax.planning.traffic import Traffic

CHIP = Chip(hbm_bytes=1e9, hbm_bandwidth=1e6, flops=1e9, link_bandwidth=1e3)
LAYERS, HEAD = 2 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32), 61 * 32


def model(parts=1, **changes):
    config = tiny_config(**changes)
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), param_shapes(config), is_leaf=is_shape
    )
    return Model(config=config, params=shapes, kv_heads=2, parts=parts)


def test_the_least_of_a_pass():
    """Two rows of three tokens behind ten: 2 layers, 2 KV heads of width 8, 61 ids, all in float32."""
    work, cache, logits = model().least(2, 3, 10), 2 * 2 * 2 * 10 * 2 * 8 * 4, 4 * 2 * 3 * 61
    assert work.traffic == Traffic(num_bytes=4 * (LAYERS + HEAD) + cache + logits)
    assert work.flops == 2 * (LAYERS + HEAD) * 6 + 4 * 6 * 13 * 32 * 2
    assert model().num_bytes() == 4 * (LAYERS + 2 * HEAD + 32)


def test_a_pass_without_logits_reads_no_head():
    work = model(tied_embeddings=True).least(2, 3, 10, head=False)
    assert work.traffic.num_bytes == 4 * LAYERS + 2 * 2 * 2 * 10 * 2 * 8 * 4
    with_head = model(tied_embeddings=True).least(2, 3, 10)
    assert with_head.traffic.num_bytes - work.traffic.num_bytes == 4 * HEAD + 4 * 2 * 3 * 61


def test_a_cut_model_sums_twice_a_layer_and_once_for_the_embedding():
    sums, logits = (5, 5 * 4 * 6 * 32), 4 * 6 * 61
    work = model(parts=2).least(2, 3, 10)
    assert work.traffic.collectives == {"all-reduce": sums, "all-to-all": (1, logits / 2)}
    assert model(parts=2).least(2, 3, 10, head=False).traffic.collectives.keys() == {"all-reduce"}


def test_a_speculative_step_drafts_each_token_and_reads_the_window():
    pair = Pair(target=model(), draft=model(num_layers=1), context=10)
    assert pair.drafting(2, 3) == pair.draft.least(2, 1, 10) * 3
    assert pair.verify(2, 3) == pair.target.least(2, 4, 10) + pair.draft.least(2, 4, 10, head=False)
    assert pair.step(2, 3) == pair.verify(2, 3) + pair.drafting(2, 3)
    assert pair.step(2, 0) == pair.target.least(2, 1, 10)
    assert pair.read(2, 9) == pair.target.least(2, 9, 10, head=False) + pair.draft.least(2, 9, 10, head=False)


def test_a_step_waits_for_the_slower_of_memory_and_compute_then_for_the_links():
    exchanged = {"all-reduce": (2, 1000.0), "all-gather": (1, 400.0)}
    assert busy_seconds(Work(traffic=Traffic(num_bytes=2e6), flops=1e9), CHIP) == 2
    assert busy_seconds(Work(traffic=Traffic(num_bytes=2e6), flops=3e9), CHIP) == 3
    assert busy_seconds(Work(traffic=Traffic(num_bytes=2e6), flops=3e9), CHIP, 2.0) == 4
    assert exchange_seconds(Traffic(collectives=exchanged), CHIP, 4) == 1.5 + 0.3
    assert exchange_seconds(Traffic(collectives={"all-to-all": (1, 400.0)}), CHIP, 4) == 0.4
    small = Traffic(collectives={"all-reduce": (10, 1e-9), "all-gather": (10, 1e-9)})
    assert exchange_seconds(small, CHIP, 8) == pytest.approx(10 * 8e-6 + 10 * 4e-6)


def test_expected_tokens():
    assert [expected_tokens(0.5, window) for window in (0, 1, 2)] == [1, 1.5, 1.75]
    assert expected_tokens(1.0, 4) == 5


def test_the_best_window():
    times = {0: 1.0, 1: 1.2, 2: 1.4, 4: 2.0}
    assert speedup(times, 0.5, 2) == pytest.approx(1.75 / 1.4)
    assert [best_window(times, rate) for rate in (0.1, 0.5, 0.9)] == [0, 1, 4]


def test_break_even_is_the_first_batch_at_which_nothing_gains():
    assert break_even(lambda rows: {0: 1.0, 1: 1 + rows / 100}, 0.5) == 64
    assert break_even(lambda rows: {0: 1.0, 1: 3.0}, 0.5) == 1
    assert break_even(lambda rows: {0: 1.0, 1: 1.0}, 0.5) is None
    assert break_even(lambda rows: {0: 1.0, 1: 1 + rows / 100}, 0.5, BATCHES[:6]) is None


PAIR = Pair(target=model(), draft=model(num_layers=1), context=10)
CUT = Pair(target=model(parts=2), draft=model(num_layers=1), context=10)


def compiled(pair, moved, collectives=None):
    """Figures of steps of two rows, the second with a window of 3, that moved so many times the least."""
    works = {"plain": pair.plain(2), "speculative": pair.step(2, 3)}
    return {
        name: {"fits": True, "step": {"bytes": times * works[name].traffic.num_bytes, "collectives": collectives or {}}}
        for name, times in moved.items()
    }


def test_what_a_compiled_step_moved_beyond_its_least_scales_the_others():
    least = [PAIR.plain(2).traffic.num_bytes, PAIR.step(2, 3).traffic.num_bytes]
    modelled = model_batch(PAIR, compiled(PAIR, {"plain": 1.5, "speculative": 2}), CHIP, 2, 3, most=4)
    overheads = {name: {"num_bytes": over, "exchange": 1} for name, over in (("plain", 1.5), ("speculative", 2))}
    assert modelled["over_least"] == overheads
    assert modelled["plain_step_s"] == pytest.approx(1.5 * least[0] / 1e6)
    assert modelled["spec_step_s"] == pytest.approx(2 * least[1] / 1e6)
    assert modelled["step_s_by_window"].keys() == set(WINDOWS)
    assert modelled["speedup"][0.5] == pytest.approx(1.875 * 1.5 * least[0] / (2 * least[1]))


@pytest.mark.parametrize("name", ["plain", "speculative"])
def test_one_compiled_step_speaks_for_both(name):
    """Otherwise the other would be as cheap as nothing can be, and the speed-up off by the whole overhead."""
    exchanged = {"all-reduce": {"count": 10, "bytes": 1e5}}
    one = overheads(CUT, compiled(CUT, {name: 3}, exchanged), CHIP, 2, 3)
    assert one.plain == one.speculative
    assert one.plain.num_bytes == 3
    alone, least = (model_batch(PAIR, programs, CHIP, 2, 3, most=4) for programs in (compiled(PAIR, {name: 3}), {}))
    assert alone["speedup"] == pytest.approx(least["speedup"])


@pytest.mark.parametrize("refused", ["prefill", "plain", "speculative"])
def test_nothing_is_modelled_of_a_batch_that_does_not_fit(refused):
    programs = compiled(PAIR, {"plain": 1, "speculative": 1}) | {refused: {"fits": False}}
    assert model_batch(PAIR, programs, CHIP, 2, 3, most=4) is None


def test_collectives_take_as_long_as_the_compiled_ones():
    """Twice the least of them, in a step that moves its least bytes: they take twice their time, the rest does not."""
    work, (count, size) = CUT.plain(2), CUT.plain(2).traffic.collectives["all-reduce"]
    logits = work.traffic.collectives["all-to-all"]
    twice = {"all-reduce": {"count": 2 * count, "bytes": 2 * size}}
    twice |= {"all-to-all": {"count": 2 * logits[0], "bytes": 2 * logits[1]}}
    times = step_times(CUT, overheads(CUT, compiled(CUT, {"plain": 1}, twice), CHIP, 2, 3), CHIP, 2)
    assert times[0] == pytest.approx(busy_seconds(work, CHIP) + 2 * exchange_seconds(work.traffic, CHIP, 2))


def test_the_break_even_is_looked_for_where_rows_fit():
    for most, searched in ((4, 4), (None, 2), (2000, 1024), (1, 2)):
        modelled = model_batch(PAIR, {}, CHIP, 2, 3, most=most)
        assert modelled["searched_rows_per_device"] == searched
        assert all(rows is None or rows <= searched for rows in modelled["break_even_rows_per_device"].values())


def test_layers_read_what_their_sliding_window_sees():
    """One layer sees the last 4 tokens, itself included, the other all 10 and the three new ones."""
    whole, sliding = model().least(2, 3, 10), model(sliding_windows=(4, None)).least(2, 3, 10)
    assert whole.traffic.num_bytes - sliding.traffic.num_bytes == 2 * 2 * (10 - 3) * 2 * 8 * 4
    assert whole.flops - sliding.flops == 4 * 2 * 3 * (13 - 4) * 32


def test_a_float32_product_takes_six_passes():
    assert CHIP.in_dtype("float32").flops == CHIP.flops / 6
    assert CHIP.in_dtype("bfloat16") == CHIP


def test_the_estimate_of_memory():
    pair = Pair(target=model(), draft=model(num_layers=1), context=10)
    caches = 2 * (2 + 1) * 2 * 20 * 2 * 8 * 4
    weights = pair.target.num_bytes() + pair.draft.num_bytes()
    assert estimated_bytes(pair, 20, 2, 3) == weights + caches + 3 * 4 * 2 * 4 * 61
    room = dataclasses.replace(CHIP, hbm_bytes=estimated_bytes(pair, 20, 8, 3))
    assert most_rows(pair, 20, 3, room) == 8
    assert most_rows(pair, 20, 3, dataclasses.replace(CHIP, hbm_bytes=weights)) is None
