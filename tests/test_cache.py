"""Writes into the key/value cache, in the form each backend uses."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import tiny_config, tiny_params

from specjax import cache as kv
from specjax import decode
from specjax.decode import DecodeConfig
from specjax.drafters.model import ModelDrafter
from specjax.models.transformer import Transformer
from specjax.sampling import sampling_params
from specjax.testing.compiling import compiler_options
from specjax.types import Params
from specjax.verify import Rejection

TINY = Transformer(tiny_config())

HEADS, WIDTH, CAPACITY = 2, 4, 16
STARTS = [[0], [13, -1, 4], [14, 15, 16, 0]]
"""First positions of the rows of each case; -1 is a row without tokens, and some windows reach past the buffer."""


def write(start, window, dtype, platform):
    """The cache after a first write that fills it and a second of `window` tokens, of which row r keeps r fewer."""
    batch = len(start)
    old, new = (np.random.default_rng(seed).normal(size=(batch, HEADS, CAPACITY, WIDTH)) for seed in (1, 2))
    columns, count = np.arange(window), window - np.arange(batch)[:, None]
    first = np.array(start)[:, None]
    positions = np.where((columns < count) & (first >= 0), first + columns, -1)
    cache = kv.init_cache(batch, CAPACITY, HEADS, WIDTH, 2, dtype)
    append = jax.jit(kv.append) if platform == "cpu" else append_by_scatter
    everywhere = jnp.tile(jnp.arange(CAPACITY), (batch, 1))
    cache = append(cache, [(jnp.asarray(old), jnp.asarray(-old))] * 2, everywhere, jnp.zeros((batch, CAPACITY, 1)))
    entries = [(jnp.asarray(new[:, :, :window]), jnp.asarray(-new[:, :, :window]))] * 2
    cache = append(cache, entries, jnp.asarray(positions), jnp.zeros((batch, window, 1)))
    right = old.copy()
    for row, column in zip(*np.nonzero((positions >= 0) & (positions < CAPACITY)), strict=True):
        right[row, :, positions[row, column]] = new[row, :, column]
    return cache, right


def append_by_scatter(cache, entries, positions, hidden):
    """`append`, lowered for another backend and run here."""
    buffers = list(zip(cache.keys, cache.values, strict=True))
    entries = [tuple(kv.stored(entry, cache.keys[0].dtype) for entry in pair) for pair in entries]
    keys, values = zip(*kv.scatter(buffers, entries, positions), strict=True)
    return cache.replace(keys=tuple(keys), values=tuple(values))


@pytest.mark.parametrize("platform", ["cpu", "default"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", [1, 5])
def test_writes_go_by_position_and_nowhere_else(window, start, dtype, platform):
    cache, right = write(start, window, dtype, platform)
    right = np.asarray(jnp.asarray(right, dtype), np.float32)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        assert kv.read(keys).dtype == dtype
        np.testing.assert_array_equal(np.asarray(kv.read(keys), np.float32), right)
        np.testing.assert_array_equal(np.asarray(kv.read(values), np.float32), -right)


def test_more_tokens_than_slots_are_refused():
    cache = kv.init_cache(1, 30, HEADS, WIDTH, 1, jnp.float32)
    assert cache.keys[0].shape[2] == 2 * kv.TILE
    entry = jnp.zeros((1, HEADS, 33, WIDTH))
    with pytest.raises(ValueError, match="at most 32"):
        kv.append(cache, [(entry, entry)], jnp.arange(33)[None], jnp.zeros((1, 33, 1)))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_copies_no_cache(batch):
    """Whichever window it takes, and drafting or not: neither the target's buffers nor the draft model's are copied."""
    drafter = ModelDrafter(model=TINY, num_tokens=3, vocab_size=61)
    config = DecodeConfig(target=TINY, drafter=drafter, verifier=Rejection())
    params, sampling = Params(target=tiny_params(), draft=tiny_params(1)), sampling_params(batch, max_tokens=8)
    given = params, jax.random.key(0), jnp.zeros((batch, 512), jnp.int32), jnp.ones(batch, jnp.int32), sampling
    state = jax.eval_shape(partial(decode.prefill, config=config, max_new_tokens=8), *given)
    steps = jax.jit(partial(decode.decode_steps, config=config), donate_argnums=1, compiler_options=compiler_options(0))
    text = steps.lower(params, state, sampling, jnp.int32(1), jnp.int32(1)).compile().as_text()
    shape = ",".join(map(str, state.cache.keys[0].shape))
    assert f"f32[{shape}]" in text
    assert not re.findall(rf"= f32\[{shape}\]\S* copy\(.*", text)


def test_reading_a_prompt_widens_no_table():
    """A loop over pieces looks up its tokens in the bfloat16 table as it is: no float32 copy of it is made first."""
    config = tiny_config(vocab_size=2**14)
    given = DecodeConfig(target=Transformer(config), prefill_chunk=16)
    params = Params(target=jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_params(0, config)))
    prefill = jax.jit(partial(decode.prefill, config=given, max_new_tokens=8))
    arguments = (
        params,
        jax.random.key(0),
        jnp.zeros((1, 64), jnp.int32),
        jnp.full(1, 64),
        sampling_params(1, max_tokens=8),
    )
    memory = prefill.lower(*arguments).compile(compiler_options=compiler_options(0)).memory_analysis()
    assert memory.temp_size_in_bytes < params.target["embed"].size


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_write_copies_no_buffer(batch, dtype):
    """The compiled program updates every buffer in place: nothing of a buffer's size is copied or converted."""
    big = kv.init_cache(batch, 512, HEADS, WIDTH, 2, dtype)
    entry = jnp.zeros((batch, HEADS, 3, WIDTH))
    positions, hidden = jnp.tile(jnp.arange(3), (batch, 1)), jnp.zeros((batch, 3, 1))
    compiled = jax.jit(kv.append, donate_argnums=0).lower(big, [(entry, entry)] * 2, positions, hidden).compile()
    shape = f"[{batch},{HEADS},512,{WIDTH}]"
    made = [line for line in compiled.as_text().splitlines() if f"{shape}" in line.split("=")[-1].split("(")[0]]
    heavy = [
        line for line in made if any(f" {name}(" in line for name in ("copy", "convert", "bitcast-convert", "scatter"))
    ]
    assert made
    assert not heavy, heavy
