"""The n-gram drafter against the slow reference, on text with many repeats."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from decoding import fast_jit

from specjax import Context, NGramDrafter
from specjax.pace import GRADES

ROWS, WIDTH = 72, 32
"""Most tests draft eagerly, where each operation is compiled once for each shape: they share this one."""


def draft(drafter, rows):
    drafts = draft_of(drafter, *padded([*rows, *[[]] * (ROWS - len(rows))], WIDTH))
    return jax.tree.map(lambda leaf: np.asarray(leaf)[: len(rows)], drafts)


def padded(rows, width):
    tokens = [[*row, *[0] * (width - len(row))] for row in rows]
    return jnp.asarray(tokens, jnp.int32), jnp.asarray([len(row) for row in rows], jnp.int32)


def draft_of(drafter, tokens, length):
    context = Context(tokens=tokens, length=length, prompt_length=length)
    return drafter.draft(None, None, None, context, None, None)[0]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (1, 4), (2, 3), (3, 3), (2, 6)])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_equals_the_reference(sizes, num_tokens):
    drafter = NGramDrafter(num_tokens=num_tokens, prompt_lookup_min=sizes[0], prompt_lookup_max=sizes[1])
    random = np.random.default_rng(0)
    rows = [random.integers(0, vocab, length).tolist() for vocab in (2, 3, 6) for length in range(1, 25)]
    got = draft(drafter, rows)
    wanted = [reference.ngram_draft(row, *sizes, num_tokens) for row in rows]
    assert [got.tokens[i, : got.length[i]].tolist() for i in range(len(rows))] == wanted
    assert any(wanted)
    assert not all(wanted)


def test_padding_and_the_suffix_itself_never_match():
    """Pad id 0 fills the buffer, and is a real token of the text too."""
    got = draft(NGramDrafter(num_tokens=3), [[5, 0], [0], [1, 2, 3], [0, 4, 0]])
    assert got.length.tolist() == [0, 0, 0, 3]
    assert got.tokens[3].tolist() == [4, 0, 4]


def test_equal_matches_vote_before_the_most_recent_wins():
    rows = [[7, 1, 7, 2, 7, 1, 7, 3, 7], [7, 1, 7, 2, 7], [8, 7, 1, 9, 7, 2, 9, 7, 2, 8, 7]]
    drafter = NGramDrafter(num_tokens=1, prompt_lookup_max=2)
    assert draft(drafter, rows).tokens[:, 0].tolist() == [1, 2, 1]
    assert draft(NGramDrafter(num_tokens=1, prompt_lookup_max=1), rows).tokens[:, 0].tolist() == [1, 2, 2]


def test_equal_votes_go_to_the_match_that_reaches_furthest():
    """Beyond the suffix that was asked for, and up to four tokens: then the most recent wins again."""
    rows = [[6, 7, 1, 8, 7, 2, 6, 7], [6, 7, 1, 8, 7, 2, 9, 7], [5, 4, 3, 2, 1, 8, 0, 4, 3, 2, 1, 9, 5, 4, 3, 2, 1]]
    got = draft(NGramDrafter(num_tokens=1, prompt_lookup_max=1), rows)
    assert got.tokens[:, 0].tolist() == [1, 2, 9]
    assert got.evidence.tolist() == [1, 0, GRADES - 1]


def test_evidence_is_how_far_the_match_reaches():
    rows = [[1, 9, 1], [1, 2, 9, 1, 2], [1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5], [1, 2, 3]]
    for most in (1, 4):
        drafter = NGramDrafter(num_tokens=2, prompt_lookup_max=most)
        assert draft(drafter, rows).evidence.tolist() == [0, 1, GRADES - 1, 0]


def test_counts_take_little_memory():
    drafter, rows, width = NGramDrafter(num_tokens=4), 256, 64
    run = jax.jit(lambda tokens: draft_of(drafter, tokens, jnp.full(rows, width)))
    memory = run.lower(jax.ShapeDtypeStruct((rows, width), jnp.int32)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 40_000 * rows  # 4,096 counts of 4 bytes, scattered from one buffer to another


def test_drafts_do_not_hang_on_the_width_of_the_buffer():
    """It is that of the longest neighbour. Ids of this text share counts in tables of up to 1,024 of them."""
    rows = [[100, 5, 100, 1029, 100, 7, 100]]
    run = fast_jit(partial(draft_of, NGramDrafter(num_tokens=1)))
    for width in (16, 64, 65, 128, 512, 5000):
        assert run(*padded(rows, width)).tokens.tolist() == [[7]]


def test_large_ids_are_counted_apart():
    row = [70_000, 90_001, 70_000, 90_002, 70_000, 90_001, 70_000, 90_003, 70_000]
    got = draft(NGramDrafter(num_tokens=1, prompt_lookup_max=1), [row])
    assert got.tokens.tolist() == [[90_001]]


def test_runs_under_jit_with_equal_results():
    drafter = NGramDrafter(num_tokens=4)
    rows = [[1, 2, 1, 2, 1], [3, 3, 3]]
    eager = draft(drafter, rows)
    jitted = fast_jit(partial(draft_of, drafter))(*padded(rows, WIDTH))
    assert (eager.tokens == np.asarray(jitted.tokens)).all()
    assert (eager.length == np.asarray(jitted.length)).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_tokens": 0},
        {"num_tokens": 2, "prompt_lookup_min": 0},
        {"num_tokens": 2, "prompt_lookup_max": 1, "prompt_lookup_min": 2},
    ],
)
def test_refuses_settings_that_mean_nothing(wrong):
    with pytest.raises(ValueError, match="expected num_tokens >= 1"):
        NGramDrafter(**wrong)
