"""Attention over long buffers against a plain softmax in NumPy; tests/models/test_transformer.py holds the rest."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from decoding import fast_jit

from specjax.models import attention

HEADS, GROUPS, WIDTH = 4, 2, 8


def attend(capacity, starts, window, *, sliding=None, way=attention.attend):
    """What `attention.attend` (or another `way`) gives for `window` new tokens a row, and what is right."""
    rng, batch = np.random.default_rng(capacity + sum(starts)), len(starts)
    query = rng.normal(size=(batch, window, HEADS, WIDTH)).astype(np.float32)
    buffers = rng.normal(size=(2, batch, GROUPS, capacity, WIDTH)).astype(np.float32)
    new = rng.normal(size=(2, batch, GROUPS, window, WIDTH)).astype(np.float32)
    positions = np.array(starts)[:, None] + np.arange(window)
    found = fast_jit(way, static_argnames="window")(query, tuple(new), tuple(buffers), positions, window=sliding)
    right = np.zeros((batch, window, HEADS, WIDTH))
    for row, start in enumerate(starts):
        keys, values = np.concatenate([buffers[:, row, :, :start], new[:, row]], axis=2).astype(np.float64)
        for offset in range(window):
            end = start + offset + 1
            seen = slice(0 if sliding is None else max(end - sliding, 0), end)
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                scores = keys[group, seen] @ query[row, offset, head] * WIDTH**-0.5
                right[row, offset, head] = reference.softmax(scores) @ values[group, seen]
    return found, right.reshape(batch, window, -1)


@pytest.mark.parametrize("sliding", [None, 300])
@pytest.mark.parametrize(
    ("capacity", "starts"),
    [(300, [0, 299]), (1100, [3, 256]), (1100, [257, 9]), (1100, [511, 513]), (1100, [1093, 255]), (4096, [2049, 40])],
)
def test_a_cpu_reads_as_far_as_the_longest_row(capacity, starts, sliding):
    found, right = attend(capacity, starts, 7, sliding=sliding)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", [attention.attend_in_blocks, attention.attend_head_by_head])
@pytest.mark.parametrize("sliding", [None, 300])
@pytest.mark.parametrize(
    ("capacity", "starts", "window"),
    [(300, [0, 299], 7), (1100, [3, 256], 7), (1100, [1060, 3], 40), (2500, [2049, 40], 7)],
)
def test_accelerators_read_larger_blocks(capacity, starts, window, sliding, way):
    """Here on CPU: in the third and the last case the last block begins inside the one before it."""
    found, right = attend(capacity, starts, window, sliding=sliding, way=partial(way, size=attention.BLOCK))
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("way", "size"),
    [
        (attention.attend, attention.SMALL_BLOCK),
        (partial(attention.attend_in_blocks, size=1024), 1024),
        (partial(attention.attend_head_by_head, size=1024), 1024),
    ],
)
def test_only_blocks_that_hold_something_are_read(way, size):
    """Broken slots would poison even a masked read (0 * NaN)."""
    way = fast_jit(way)
    buffers = jnp.full((2, 1, GROUPS, 2 * size, WIDTH), jnp.nan).at[:, :, :, :size].set(0.5)
    new, query = jnp.ones((2, 1, GROUPS, 1, WIDTH)), jnp.ones((1, 1, HEADS, WIDTH))
    for start, healthy in ((size, True), (size + 1, False)):
        found = way(query, (new[0], new[1]), (buffers[0], buffers[1]), jnp.array([[start]]))
        assert bool(jnp.isfinite(found).all()) == healthy


@pytest.mark.parametrize(("sliding", "healthy"), [(None, False), (45, True), (46, False)])
def test_blocks_before_a_sliding_window_are_not_read(sliding, healthy):
    """The first block is broken; a row at 300 and one that is padding. A window of 45 begins at slot 256."""
    size = attention.SMALL_BLOCK
    buffers = jnp.full((2, 2, GROUPS, 2 * size, WIDTH), 0.5).at[:, :, :, :size].set(jnp.nan)
    new, query = jnp.ones((2, 2, GROUPS, 1, WIDTH)), jnp.ones((2, 1, HEADS, WIDTH))
    found = attention.attend(
        query, (new[0], new[1]), (buffers[0], buffers[1]), jnp.array([[300], [-1]]), window=sliding
    )
    assert bool(jnp.isfinite(found[0]).all()) == healthy


@pytest.mark.parametrize("starts", [[0, 0], [0, 5]])
def test_a_long_block_at_the_beginning_of_a_text(starts):
    found, right = attend(64, starts, 40)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("starts", "reads"), [([0, 0], False), ([0, 1], True), ([-1, 0], False), ([-1, -1], False)])
def test_a_piece_of_a_prompt_with_nothing_before_it_reads_no_cache(starts, reads):
    """Broken slots would poison even a masked read (0 * NaN)."""
    buffers = jnp.full((2, 2, GROUPS, 64, WIDTH), jnp.nan)
    new, query = jnp.ones((2, 2, GROUPS, 32, WIDTH)), jnp.ones((2, 32, HEADS, WIDTH))
    positions = jnp.array([jnp.arange(start, start + 32) if start >= 0 else jnp.full(32, -1) for start in starts])
    found = attention.attend(query, (new[0], new[1]), (buffers[0], buffers[1]), positions)
    assert bool(jnp.isfinite(found).all()) != reads
