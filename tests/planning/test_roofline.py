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
    speedup,
)
from specjax.planning.hardware import Chip
from specjax.planning.roofline import Model, Pair, Work, estimated_bytes, exchange_seconds, seconds
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
    bound_by_memory = Work(traffic=Traffic(num_bytes=2e6), flops=1e9)
    assert seconds(bound_by_memory, CHIP, 4) == 2
    assert seconds(Work(traffic=Traffic(num_bytes=2e6, collectives=exchanged), flops=3e9), CHIP, 4) == 3 + 1.5 + 0.3
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


def test_what_a_compiled_step_moved_beyond_its_least_scales_the_others():
    pair = Pair(target=model(), draft=model(num_layers=1), context=10)
    least = [pair.plain(2).traffic.num_bytes, pair.step(2, 3).traffic.num_bytes]
    programs = {
        "plain": {"fits": True, "step": {"bytes": 1.5 * least[0]}},
        "speculative": {"fits": True, "step": {"bytes": 2 * least[1]}},
    }
    modelled = model_batch(pair, programs, CHIP, 2, 3)
    assert modelled["bytes_over_least"] == {"plain": 1.5, "speculative": 2}
    assert modelled["plain_step_s"] == pytest.approx(1.5 * least[0] / 1e6)
    assert modelled["spec_step_s"] == pytest.approx(2 * least[1] / 1e6)
    assert modelled["step_s_by_window"].keys() == set(WINDOWS)
    assert modelled["speedup"][0.5] == pytest.approx(1.875 * 1.5 * least[0] / (2 * least[1]))
    assert set(modelled["break_even_rows_per_device"].values()) <= {*BATCHES, None}


def test_the_estimate_of_memory():
    pair = Pair(target=model(), draft=model(num_layers=1), context=10)
    caches = 2 * (2 + 1) * 2 * 20 * 2 * 8 * 4
    weights = pair.target.num_bytes() + pair.draft.num_bytes()
    assert estimated_bytes(pair, 20, 2, 3) == weights + caches + 3 * 4 * 2 * 4 * 61
    room = dataclasses.replace(CHIP, hbm_bytes=estimated_bytes(pair, 20, 8, 3))
    assert most_rows(pair, 20, 3, room) == 8
    assert most_rows(pair, 20, 3, dataclasses.replace(CHIP, hbm_bytes=weights)) is None


def test_a_step_that_does_not_fit_or_was_not_compiled_is_modelled_by_its_least():
    pair = Pair(target=model(), draft=model(num_layers=1), context=10)
    programs = {"speculative": {"fits": False}}
    assert model_batch(pair, programs, CHIP, 2, 3)["bytes_over_least"] == {"plain": 1, "speculative": 1}
