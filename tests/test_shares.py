"""Rows dealt over a mesh axis: here the axis of a `vmap`; on devices in tests/parallel."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import fast_jit

from specjax.shares import Share, by_rows
from specjax.types import ModelOutput

WIDTH = 8


def inputs(batch):
    rng = np.random.default_rng(batch)
    logits = jnp.asarray(rng.normal(size=(batch, 3, WIDTH)), jnp.float32)
    return logits, jnp.arange(batch) + 10, jax.random.split(jax.random.key(0), batch)


def rank(logits, names, keys):
    """Results of every kind: numbers, truths, and noise from keys."""
    noise = jax.vmap(partial(jax.random.gumbel, shape=(WIDTH,)))(keys)
    return {"best": jnp.argmax(logits + noise[:, None], axis=-1), "odd": names % 2 == 1, "name": names}


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize(("batch", "devices"), [(8, 4), (3, 4), (1, 2), (5, 2), (4, 1)])
def test_every_device_learns_what_one_alone_would_find(batch, devices, cut):
    logits, *rows = inputs(batch)
    right = fast_jit(rank)(logits, *rows)
    parts = jnp.stack(jnp.split(logits, devices, axis=2)) if cut else jnp.stack([logits] * devices)

    def decide(part):
        output = ModelOutput(logits=part, axis="model" if cut else None)
        return by_rows(rank, output, *rows, axis="model")

    found = fast_jit(jax.vmap(decide, axis_name="model"))(parts)
    for device in range(devices):
        jax.tree.map(lambda one, other, device=device: np.testing.assert_array_equal(one[device], other), found, right)


def test_each_device_has_the_work_of_its_share():
    logits, names, _ = inputs(5)
    seen = []

    def work(logits, names):
        seen.append((logits.shape, names.shape))
        return names

    parts = jnp.stack(jnp.split(logits, 4, axis=2))
    jax.vmap(lambda part: by_rows(work, ModelOutput(logits=part, axis="m"), names), axis_name="m")(parts)
    assert seen == [((2, 3, WIDTH), (2,))]


def test_a_share_stays_where_it_is():
    """A law that was computed for a share is met again by the same rows, and was never joined."""
    logits, names, _ = inputs(6)

    def draft(logits):
        return Share(logits * 2)

    def verify(logits, names, law):
        return jnp.abs(law - 2 * logits).max(axis=(1, 2)) + names

    def decide(part):
        output = ModelOutput(logits=part, axis="m")
        law = by_rows(draft, output)
        return law.rows, by_rows(verify, output, names, law)

    laws, found = jax.vmap(decide, axis_name="m")(jnp.stack(jnp.split(logits, 2, axis=2)))
    assert laws.shape == (2, 3, 3, WIDTH)
    np.testing.assert_array_equal(found, [names, names])


def test_without_an_axis_nothing_is_dealt():
    logits, *rows = inputs(3)
    right = rank(logits, *rows)
    jax.tree.map(np.testing.assert_array_equal, by_rows(rank, ModelOutput(logits=logits), *rows), right)
