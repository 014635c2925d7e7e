"""Program: the texts of many combinations of driver, mesh, KV heads, rule and drafter against a single device's.

It runs all combinations there are on 8 devices (docs/tpu.md has the command); the tests run some, through `cases.py`.
"""

import dataclasses
import functools
import itertools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from harness import tiny_config, tiny_params

import specjax
from specjax.decode import DecodeConfig
from specjax.jobs.placement import MESH_DRIVERS
from specjax.parallel.mesh import MODEL, make_mesh
from specjax.parallel.specs import on_mesh

NEW, ROWS, WINDOW = 10, 4, 3
DRAFT = tiny_config(num_layers=1, num_heads=2, num_kv_heads=1)
RULES = {
    "greedy": (specjax.Greedy(), [0.0] * ROWS),
    "exact_match": (specjax.ExactMatch(), [0.0, 1.0, 0.0, 0.7]),
}


def inputs(temperature):
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, 61, (ROWS, 8)), jnp.int32)
    length = jnp.array([8, 5, 3, 7])
    sampling = specjax.sampling_params(ROWS, temperature=temperature, max_tokens=[NEW, NEW, 4, NEW])
    return jax.random.key(3), prompt, length, sampling


def decoder(kv_heads, rule, drafter):
    target = specjax.Transformer(tiny_config(num_kv_heads=kv_heads, intermediate_size=50))
    drafters = {
        "none": specjax.NoDrafter(),
        "ngram": specjax.NGramDrafter(num_tokens=WINDOW),
        "model": specjax.ModelDrafter(model=specjax.Transformer(DRAFT), num_tokens=WINDOW, vocab_size=61),
        "early_exit": specjax.EarlyExitDrafter(target=target, exit_layer=1, num_tokens=WINDOW),
    }
    drafter = drafters[drafter.removesuffix("_sharded")]
    return DecodeConfig(target=target, drafter=drafter, verifier=RULES[rule][0], prefill_chunk=8)


@functools.cache
def params(kv_heads):
    target = tiny_params(0, tiny_config(num_kv_heads=kv_heads, intermediate_size=50))
    return specjax.Params(target=target, draft=tiny_params(1, DRAFT))


@functools.cache
def expected(kv_heads, rule):
    """What one device writes without speculation: one program for each number of KV heads."""
    config = decoder(kv_heads, "exact_match", "none")
    arguments = inputs(RULES[rule][1])
    return np.asarray(specjax.generate(params(kv_heads), *arguments, config=config, max_new_tokens=NEW).tokens)


def texts(driver, data, model, kv_heads, rule, drafter, by):
    driver = MESH_DRIVERS[driver](make_mesh(data, model))
    config = decoder(kv_heads, rule, drafter)
    config = on_mesh(config, draft=MODEL if drafter.endswith("_sharded") else None)
    placed = params(kv_heads) if "model" in drafter else dataclasses.replace(params(kv_heads), draft=None)
    placed, arguments = driver.place(placed, config), inputs(RULES[rule][1])
    if by == "generate":
        return np.asarray(driver.generate(placed, *arguments, config=config, max_new_tokens=NEW).tokens)
    pace = specjax.make_pace(ROWS, jnp.array([1.0, 1.2]))
    state = driver.prefill(placed, *arguments, pace, config=config, max_new_tokens=NEW)
    sampling = driver.to_devices(arguments[-1])
    state = driver.decode_steps(placed, state, sampling, 2, config=config)
    state = dataclasses.replace(state, finish_reason=driver.to_devices(driver.to_host(state.finish_reason)))
    context = driver.to_host(driver.decode_steps(placed, state, sampling, config=config).context)
    return np.stack([row[start : start + NEW] for row, start in zip(context.tokens, arguments[2], strict=True)])


def every_combination():
    meshes = [(data, model) for data in (1, 2) for model in (1, 2, 4, 8) if data * model <= 8]
    chosen = itertools.product(MESH_DRIVERS, meshes, (1, 2, 4), RULES)
    return [(driver, *mesh, heads, rule, "ngram", "generate") for driver, mesh, heads, rule in chosen]


def compare(combinations):
    """Whether each text is that of one device."""
    results = []
    for combination in combinations:
        began = time.process_time()
        found, wanted = texts(*combination), expected(combination[3], combination[4])
        results.append(bool((found == wanted).all()))
        print(*combination, results[-1], f"{time.process_time() - began:.1f} s", file=sys.stderr, flush=True)
        if len(results) % 8 == 0:
            jax.clear_caches()  # a process holds so many programs at most
    return results


if __name__ == "__main__":
    sys.exit(0 if all(compare(every_combination())) else 1)
