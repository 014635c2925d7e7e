"""What the TPU compiler makes of the decoding loop for v5e 2x4, at small shapes. Needs libtpu, no TPU."""

import dataclasses

import pytest

from specjax.models.config import TransformerConfig
from specjax.planning.plan import Request, make_plan

pytest.importorskip("libtpu", reason="the compiler for TPUs is not installed (extra tpu-plan)")

TARGET = TransformerConfig(
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=3,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_positions=4096,
)
DRAFT = dataclasses.replace(TARGET, num_layers=1, num_heads=8, tied_embeddings=True)
WINDOW, CONTEXT = 4, 1024


@pytest.fixture(scope="module", params=["shard_map", "pmap"])
def batch(request):
    """The figures of eight rows under one driver."""
    plan = make_plan(
        Request(
            target_name="small",
            draft_name="smaller",
            target=TARGET,
            draft=DRAFT,
            topology="v5e:2x4",
            batch_sizes=(8,),
            context=CONTEXT,
            max_new_tokens=256,
            num_speculative_tokens=WINDOW,
            parallel=request.param,
        ),
        print,
    )
    return plan["batches"][0]


def test_everything_fits(batch):
    assert all(program["fits"] for program in batch["programs"].values())


def test_a_verify_step_sums_twice_a_layer(batch):
    collectives = batch["programs"]["speculative"]["verify"]["collectives"]
    assert collectives["all-reduce"]["count"] == 2 * TARGET.num_layers + 1


def test_a_plain_step_exchanges_no_more(batch):
    collectives = batch["programs"]["plain"]["step"]["collectives"]
    assert collectives["all-reduce"]["count"] == 2 * TARGET.num_layers + 1


@pytest.mark.parametrize("name", ["plain", "speculative"])
def test_the_loop_does_not_speak_to_the_host(batch, name):
    assert batch["programs"][name]["step"]["host_transfers"] == 0


@pytest.mark.parametrize("name", ["plain", "speculative"])
def test_the_state_lives_on_in_its_own_buffers(batch, name):
    program = batch["programs"][name]
    cache = 2 * TARGET.num_layers * 8 * CONTEXT * 128 * 2
    assert program["memory"]["aliased"] >= cache
    assert program["memory"]["results"] - program["memory"]["aliased"] < 0.01 * cache
    assert not program["cache_copies"]


def test_a_verify_step_moves_little_beyond_its_least(batch):
    moved, least = batch["programs"]["speculative"]["verify"]["bytes"], batch["least"]["verify"]["bytes"]
    assert 0.5 * least < moved <= 1.25 * least
