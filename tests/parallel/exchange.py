"""Program: what a decoding step moves and takes at the vocabulary of Llama 3 over 8 virtual devices (docs/tpu.md).

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu PYTHONPATH=. python tests/parallel/exchange.py

For each drafter: megabytes that a device receives and accesses in the compiled program, the body of each loop counted
once; its temporaries; and the fastest step of seven in milliseconds, all devices on the cores of this machine.
"""

import dataclasses
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.decode import DecodeConfig
from specjax.models.config import TransformerConfig
from specjax.models.params import init_params
from specjax.parallel import sharded
from specjax.parallel.mesh import MODEL, make_mesh
from specjax.parallel.specs import on_mesh

VOCAB, ROWS, WINDOW, PROMPT, NEW = 128_256, 8, 4, 16, 100
BYTES = {"pred": 1, "u8": 1, "u16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
KINDS = "all-reduce|all-gather|all-to-all"


def model(num_layers):
    return specjax.Transformer(
        TransformerConfig(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=512,
            num_layers=num_layers,
            num_heads=8,
            num_kv_heads=8,
            head_dim=32,
            max_positions=256,
        )
    )


def received(text):
    """Bytes of the results of each kind of exchange."""
    found = dict.fromkeys(KINDS.split("|"), 0)
    for shapes, kind in re.findall(rf"= (.*?) ({KINDS})(?:-start)?\(", text):
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            found[kind] += BYTES[dtype] * int(np.prod([int(size) for size in sizes.split(",") if size]))
    return {kind: count / 1e6 for kind, count in found.items()}


def measure(drafter, params, draft=None):
    driver = sharded.ShardMap(make_mesh(1, 8))
    config = on_mesh(DecodeConfig(target=model(2), drafter=drafter, verifier=specjax.Rejection()), draft=draft)
    params = driver.place(params, config)
    sampling = specjax.sampling_params(ROWS, temperature=1.0, max_tokens=NEW)
    prompt, length = jnp.tile(jnp.arange(1, 5), (ROWS, PROMPT // 4)), jnp.full(ROWS, PROMPT)
    start = params, jax.random.key(0), prompt, length, sampling
    state = driver.prefill(*start, config=config, max_new_tokens=NEW)
    sampling, once = driver.to_devices(sampling), (jnp.int32(1), jnp.int32(1))
    program = sharded._decode_steps.lower(params, state, sampling, *once, driver=driver, config=config).compile()
    times = []
    for _ in range(7):
        state = jax.block_until_ready(dataclasses.replace(state, finish_reason=jnp.zeros_like(state.finish_reason)))
        began = time.perf_counter()
        state = jax.block_until_ready(driver.decode_steps(params, state, sampling, 1, config=config))
        times.append(time.perf_counter() - began)
    temporaries = program.memory_analysis().temp_size_in_bytes
    accessed = program.cost_analysis()["bytes accessed"]
    figures = {"accessed_mb": accessed / 1e6, "temporary_mb": temporaries / 1e6, "step_ms": 1e3 * min(times)}
    return {"received_mb": received(program.as_text())} | figures


def main():
    target, small = (init_params(jax.random.key(0), model(layers).config, dtype=jnp.bfloat16) for layers in (2, 1))
    by_model = specjax.ModelDrafter(model=model(1), num_tokens=WINDOW, vocab_size=VOCAB)
    alone, both = specjax.Params(target=target), specjax.Params(target=target, draft=small)
    found = {
        "ngram": measure(specjax.NGramDrafter(num_tokens=WINDOW), alone),
        "model": measure(by_model, both),
        "model, sharded": measure(by_model, both, MODEL),
        "early exit": measure(specjax.EarlyExitDrafter(target=model(2), exit_layer=1, num_tokens=WINDOW), alone),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
