"""What the TPU compiler makes of the decoding loop for v5e 2x4, at small shapes. Needs libtpu, and no TPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import SingleDeviceSharding

from specjax.cache import TILE
from specjax.decode import without_speculation
from specjax.models.attention import BLOCK
from specjax.models.config import TransformerConfig
from specjax.models.params import init_params
from specjax.models.transformer import Transformer
from specjax.parallel.mesh import make_mesh
from specjax.planning.counts import attention, count_loop, made_like
from specjax.planning.figures import compile_steps
from specjax.planning.hardware import check_topology, describe
from specjax.planning.hlo import parse_program
from specjax.planning.memory import Refusal, compile_or_refuse
from specjax.planning.plan import Request, make_plan, model_pair
from specjax.planning.programs import Workload, lower
from specjax.planning.traffic import Count

pytest.importorskip("libtpu", reason="the compiler for TPUs is not installed (extra tpu-plan)")

ROWS, CONTEXT, WINDOW = 8, 500, 4
TARGET = TransformerConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=2,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_positions=4096,
)
DRAFT = dataclasses.replace(TARGET, hidden_size=512, intermediate_size=1024, num_layers=1, num_heads=8)
REQUEST = Request(
    target_name="small",
    draft_name="smaller",
    target=TARGET,
    draft=DRAFT,
    topology="v5e:2x4",
    batch_sizes=(ROWS,),
    context=CONTEXT,
    max_new_tokens=100,
    num_speculative_tokens=WINDOW,
)


def programs(parallel, **changes):
    """The programs of eight rows, lowered."""
    mesh = make_mesh(1, 8, devices=describe("v5e:2x4"))
    work = Workload(
        config=REQUEST.decoder(),
        dtype=jnp.bfloat16,
        batch_size=ROWS,
        prompt_width=CONTEXT - 100,
        max_new_tokens=100,
    )
    return lower(dataclasses.replace(work, **changes), mesh, parallel)


@pytest.fixture(scope="module", params=["shard_map", "pmap"])
def compiled(request):
    """Figures of the speculative steps under one driver, and the least that its verify step can move."""
    lowered = programs(request.param)
    figures = compile_steps(lowered, WINDOW, CONTEXT)
    return figures, model_pair(REQUEST, lowered).verify(ROWS, WINDOW).traffic


def test_a_verify_step_sums_twice_a_layer(compiled):
    """And once for the embedding; the draft model is whole on every device. Logits are exchanged once, for rows."""
    collectives = compiled[0]["verify"]["collectives"]
    sums, few = 2 * TARGET.num_layers + 1, 4 * ROWS * (WINDOW + 1) * 128
    assert sums <= collectives["all-reduce"]["count"] <= sums + 1
    assert collectives["all-reduce"]["bytes"] < sums * 1.6 * 4 * ROWS * (WINDOW + 1) * TARGET.hidden_size + few
    assert collectives["all-to-all"]["count"] == 1
    assert collectives["all-gather"]["bytes"] <= few


def test_the_loop_does_not_speak_to_the_host(compiled):
    assert compiled[0]["host_transfers"] == 0


def test_the_state_lives_on_in_its_own_buffers(compiled):
    memory, cache = compiled[0]["memory"], 2 * ROWS * CONTEXT * 128 * 2 * (TARGET.num_layers + 8 * DRAFT.num_layers)
    assert memory["aliased"] >= cache
    assert memory["results"] - memory["aliased"] < 0.001 * cache


def test_no_buffer_of_the_cache_is_laid_out_anew(compiled):
    """A copy from the chip's own memory back to HBM is where the compiler chose to write; others would be waste."""
    assert not [name for name in compiled[0]["cache_copies"] if not name.startswith("copy-start")]


def test_a_plain_step_copies_no_cache_either():
    """Of 4,097 slots, in more layers than fit on the chip: whole tiles, or two loops lay them out unlike each other."""
    small = dataclasses.replace(TARGET, hidden_size=256, intermediate_size=256, vocab_size=2048, num_layers=8)
    config = without_speculation(dataclasses.replace(REQUEST, target=small).decoder())
    lowered = programs("shard_map", config=config, prompt_width=3996)
    figures = compile_steps(lowered, 0, 4096)
    assert lowered.capacity % TILE == 0
    assert not [name for name in figures["cache_copies"] if not name.startswith("copy-start")]


def test_a_verify_step_moves_little_beyond_its_least(compiled):
    figures, least = compiled
    assert 0.9 * least.num_bytes < figures["verify"]["bytes"] <= 1.25 * least.num_bytes
    assert figures["verify"]["bytes_dearest"] <= 1.5 * least.num_bytes


def test_temporaries_hold_no_padded_logits(compiled):
    logits = ROWS * (WINDOW + 1) * TARGET.vocab_size * 4
    caches = 2 * ROWS * CONTEXT * 128 * 2 * (TARGET.num_layers + 8 * DRAFT.num_layers)
    assert compiled[0]["memory"]["temporaries"] < 8 * logits + 2 * caches


def test_a_mesh_that_is_no_box_of_the_slice_is_refused():
    with pytest.raises(ValueError, match=r"expected as many devices as a box .* \(8, for example\), got 1 x 3"):
        make_mesh(1, 3, devices=describe("v5e:2x4"))


@pytest.mark.parametrize(("topology", "sizes"), [("v6e:4x4", (2, 8)), ("v5e:2x4", (4, 2)), ("v5p:2x2x4", (1, 16))])
def test_axes_may_share_an_axis_of_the_slice(topology, sizes):
    """JAX's own choice refuses the first: no axis of the slice has 8 chips."""
    assert tuple(make_mesh(*sizes, devices=describe(topology)).shape.values()) == sizes


@pytest.mark.parametrize("topology", ["v4:2x2x2", "v5e:4x4", "v5p:2x2x4", "v6e:2x4"])
def test_a_device_is_a_chip(topology):
    """As on their VMs. Both cores of a v4 chip are one device, whose memory is what the compiler says it is."""
    chip, count = check_topology(topology)
    devices = describe(topology)
    assert len(devices) == len({tuple(device.coords) for device in devices}) == count
    too_much = jax.ShapeDtypeStruct((2**37,), jnp.uint8, sharding=SingleDeviceSharding(devices[0]))
    refusal = compile_or_refuse(jax.jit(lambda x: x + 1).lower(too_much))
    assert isinstance(refusal, Refusal)
    assert refusal.available == pytest.approx(chip.hbm_bytes, rel=1e-3)


def test_what_does_not_fit_is_refused_with_its_size():
    refusal = compile_or_refuse(programs("shard_map", prompt_width=400_000).prefill)
    assert isinstance(refusal, Refusal)
    assert refusal.available == 15.75 * 2**30
    assert refusal.excess > 0


def passes(num_tokens, capacity, **sizes):
    """Passes over so many tokens a row, one after the other in a program's loop: how to count one, and its cache."""
    config = dataclasses.replace(TARGET, hidden_size=256, intermediate_size=256, vocab_size=256, **sizes)
    model, device = Transformer(config), SingleDeviceSharding(describe("v5e:2x4")[0])

    def run(params, tokens, length, cache):
        def step(carry):
            output, cache = model.apply(params, carry[0], carry[1][:, None] + jnp.arange(num_tokens), carry[2])
            return output.logits.argmax(axis=-1), carry[1] + num_tokens, cache

        return lax.while_loop(lambda carry: carry[1].max() < 4096, step, (tokens, length, cache))

    params = jax.eval_shape(lambda: init_params(jax.random.key(0), config, dtype=jnp.bfloat16))
    cache = jax.eval_shape(lambda: model.init_cache(params, ROWS, capacity))
    shapes = params, jnp.zeros((ROWS, num_tokens), jnp.int32), jnp.zeros(ROWS, jnp.int32), cache
    given = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), shapes)
    program = parse_program(jax.jit(run, donate_argnums=3).lower(*given).compile().as_text())

    def moved(context):
        return count_loop(program, attention(capacity, context), Count.DEAREST).num_bytes

    return moved, made_like(program, cache)


@pytest.mark.parametrize(("heads", "layers"), [(1, 16), (4, 12)])
def test_a_cache_is_read_as_far_as_there_is_text(heads, layers):
    """A pass over five tokens, its caches too large for the chip: it reads what holds text."""
    moved, copies = passes(WINDOW + 1, 4096 + WINDOW + 1, num_layers=layers, num_heads=4, num_kv_heads=heads)
    block = 2 * layers * ROWS * heads * BLOCK * TARGET.head_dim * 2
    assert moved(4096) - moved(100) == pytest.approx(3 * block, rel=0.01)
    assert moved(100) < 1.5 * block
    assert not copies


def test_the_scores_of_a_prompt_stay_on_the_chip():
    """A piece of 256 tokens at the end of 4,096: its scores are many times the size of the cache.

    Of that the compiler copies keys and values once to another layout (326 MB in all, and 229 where 4,101 slots leave a
    tile that is not full, which a plain step pays for with twice its traffic).
    """
    moved, _ = passes(256, 4096 + WINDOW + 1, num_layers=1, num_heads=32, num_kv_heads=8)
    cache, scores = 2 * ROWS * 8 * 4096 * 128 * 2, 4 * ROWS * 32 * 256 * 4096
    assert cache < moved(4096) < scores / 3


def test_a_whole_plan():
    config = dataclasses.replace(TARGET, num_layers=1, hidden_size=512, intermediate_size=1024, vocab_size=4096)
    said = []
    (plan,) = make_plan(dataclasses.replace(REQUEST, target=config, draft=config, context=128), said.append)
    (batch,) = plan["batches"]
    assert [line.split()[-1] for line in said] == ["prefill", "plain", "speculative"]
    assert all(program["fits"] for program in batch["programs"].values())
    assert batch["modelled"]["speedup"][0.9] > batch["modelled"]["speedup"][0.3] > 0
