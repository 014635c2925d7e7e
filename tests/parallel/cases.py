"""Program: texts on 8 devices (`texts.py`), and cases 26, 50, 58 and 62 of bug reports on meshes, in one process."""

import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import texts
from harness import Script, ScriptedDrafter, tiny_config, tiny_params
from jax.sharding import PartitionSpec as P
from programs import compilations
from texts import NEW, ROWS, WINDOW, inputs

import specjax
from specjax.decode import DecodeConfig
from specjax.models.transformer import Transformer
from specjax.parallel.drivers import SINGLE_DEVICE
from specjax.parallel.mesh import MODEL, make_mesh
from specjax.parallel.sharded import ShardMap
from specjax.parallel.specs import on_mesh, param_specs
from specjax.shares import by_rows

WIDTH = 8
COLUMNS = WIDTH + NEW
LAST = 60
STOP, FORBIDDEN = 41, tuple(range(20, 40))
TINY = tiny_config(num_layers=1)
TIES = tiny_config(num_layers=1, vocab_size=8)
"""Over two devices ids 2 and 5 lie apart."""


ODD = {
    "biased": tiny_config(num_layers=1, attention_bias=True, attention_output_bias=True, mlp_bias=True),
    "sliding": tiny_config(num_layers=2, sliding_windows=(3, None)),
}
"""Architectures with more to them than heads."""


def scripted(config, windows=None):
    drafter = ScriptedDrafter(num_tokens=WINDOW)
    return on_mesh(DecodeConfig(target=Transformer(config), drafter=drafter, prefill_chunk=WIDTH, windows=windows))


def script(tokens, lengths):
    """Row r drafts the first `lengths[r]` of its `tokens`, at every length of its text."""
    tokens = np.broadcast_to(np.asarray(tokens, np.int32)[:, None], (ROWS, COLUMNS, WINDOW))
    return Script(tokens=jnp.asarray(tokens), length=jnp.tile(jnp.asarray(lengths, jnp.int32)[:, None], COLUMNS))


def generate(driver, params, arguments, config):
    output = driver.generate(driver.place(params, config), *arguments, config=config, max_new_tokens=NEW)
    return {"tokens": output.tokens, "accepted": output.stats.accepted, "drafted": output.stats.drafted}


def fillers():
    """What two meshes write for ragged drafts with each filler behind them; the last id has most of the mass."""
    bias = jnp.where(jnp.arange(TINY.vocab_size) == LAST, 6.0, 0.0)
    sampling = specjax.sampling_params(ROWS, temperature=[0.0, 1.0, 1.0, 0.7], max_tokens=NEW, logit_bias=bias)
    arguments, found = (*inputs(0.0)[:-1], sampling), {}
    for model in (1, 2):
        driver = ShardMap(make_mesh(1, model))
        for filler in (-1, 0, LAST, TINY.vocab_size, 10**6):
            drafts = [([LAST, 1, LAST][:length] + [filler] * WINDOW)[:WINDOW] for length in range(ROWS)]
            params = specjax.Params(target=tiny_params(0, TINY), draft=script(drafts, range(ROWS)))
            found[f"{model} {filler}"] = generate(driver, params, arguments, scripted(TINY))
    return found


def tied_params():
    """Logits that are one number of bfloat16 times one weight: ids 2 and 5 have the largest, exactly alike."""
    params = tiny_params(0, TIES, dtype=jnp.bfloat16)
    weights = jnp.zeros_like(params["unembed"]).at[:, 0].set(jnp.array([1, 2, 4, 3, 0.5, 4, 2.5, 1.5], jnp.bfloat16))
    return {**params, "embed": params["embed"].at[:, 0].set(64.0), "unembed": weights}


def ties():
    """Texts for every window of scripted drafts, 0 to 3, and for drafts of the target itself."""
    driver, target = ShardMap(make_mesh(1, 2)), tied_params()
    certain = {"temperature": [0.0, 1.0, 0.0, 0.5], "top_k": [0, 1, 4, 1]}
    arguments, found = (*inputs(0.0)[:-1], specjax.sampling_params(ROWS, max_tokens=NEW, **certain)), {}
    prompt = arguments[1] % TIES.vocab_size
    arguments = arguments[0], prompt, *arguments[2:]
    for window in range(WINDOW + 1):
        drafts = script([[2, 5, 2], [5, 2, 2], [2, 2, 5], [2, 2, 2]], [window] * ROWS)
        params = specjax.Params(target=target, draft=drafts)
        found[f"scripted {window}"] = generate(driver, params, arguments, scripted(TIES, tuple(range(WINDOW + 1))))
    drafter = specjax.ModelDrafter(model=Transformer(TIES), num_tokens=WINDOW, vocab_size=TIES.vocab_size)
    config = on_mesh(DecodeConfig(target=Transformer(TIES), drafter=drafter, prefill_chunk=WIDTH), draft=MODEL)
    found["model"] = generate(driver, specjax.Params(target=target, draft=target), arguments, config)
    return found


def logits(config, model):
    """Of a chunk of 5 tokens and of 3 more behind it; on a single device without a mesh, if `model` is 0."""
    target = Transformer(config, axis=MODEL if model else None)
    params = specjax.Params(target=tiny_params(0, config))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (2, 8)), jnp.int32)

    def read(params):
        cache, found = target.init_cache(params.target, 2, 16), []
        for columns in (slice(0, 5), slice(5, 8)):
            positions = jnp.broadcast_to(jnp.arange(8)[columns], (2, columns.stop - columns.start))
            seen, cache = target.apply(params.target, tokens[:, columns], positions, cache)
            found.append(by_rows(lambda logits: logits, seen))
        return jnp.concatenate(found, axis=1)

    if model:
        config, mesh = DecodeConfig(target=target), make_mesh(1, model)
        params = ShardMap(mesh).place(params, config)
        read = jax.shard_map(read, mesh=mesh, in_specs=(param_specs(config),), out_specs=P(), check_vma=False)
    return np.asarray(jax.jit(read)(params))


def logit_errors():
    """The largest difference from a single device's logits, by architecture and devices; and how large those are."""
    heads, found = {kv_heads: tiny_config(num_kv_heads=kv_heads, num_layers=1) for kv_heads in (1, 2, 4)}, {}
    for name, config in (heads | ODD).items():
        right = logits(config, 0)
        found[f"{name} spread"] = right.std()
        devices = (2,) if name in ODD else (1, 2, 4, 8)
        found |= {f"{name} {model}": abs(logits(config, model) - right).max() for model in devices}
    plain = logits(tiny_config(num_layers=2), 0)
    return found | {"sliding matters": abs(logits(ODD["sliding"], 0) - plain).max()}


def shares():
    """Three rows, sampled by every transform, on one device and on four that share the rows, of a vocabulary in parts.

    Each device has the whole of the draft model.
    """
    key, prompt, length, _ = inputs(0.0)
    shaped = {"temperature": [1.0, 0.7, 0.0], "top_k": [20, 0, 0], "top_p": [1.0, 0.9, 1.0], "min_p": [0.0, 0.01, 0.0]}
    shaped |= {"repetition_penalty": [1.2, 1.0, 1.5], "presence_penalty": 0.3, "frequency_penalty": [0.0, 0.2, 0.1]}
    shaped |= {"min_tokens": [0, 4, NEW], "stop_token_ids": [[STOP], [3, 5, STOP], [7]]}
    bias = specjax.logit_bias(61, bias={STOP: 1.0}, bad_token_ids=FORBIDDEN)
    sampling = specjax.sampling_params(3, max_tokens=NEW, logit_bias=bias, **shaped)
    arguments = key, prompt[:3], length[:3], sampling
    drafter = specjax.ModelDrafter(model=Transformer(texts.DRAFT), num_tokens=WINDOW, vocab_size=61)
    options = {"verifier": specjax.Block(), "prefill_chunk": WIDTH, "log_probs": True}
    alone = DecodeConfig(target=Transformer(TINY), drafter=drafter, **options)
    params, found = specjax.Params(target=tiny_params(0, TINY), draft=tiny_params(1, texts.DRAFT)), {}
    for driver, config in ((SINGLE_DEVICE, alone), (ShardMap(make_mesh(1, 4)), on_mesh(alone))):
        output = driver.generate(driver.place(params, config), *arguments, config=config, max_new_tokens=NEW)
        counts = {"accepted": output.stats.accepted, "drafted": output.stats.drafted}
        ends = {"reasons": output.finish_reason, "log_probs": output.log_probs.processed}
        found[type(driver).__name__] = {"tokens": output.tokens, **counts, **ends}
    return found


def recompilations():
    """Programs compiled for a first batch, and then for others of the same shapes."""
    driver, config = ShardMap(make_mesh(2, 2)), on_mesh(texts.decoder(2, "exact_match", "ngram"))
    params = driver.place(specjax.Params(target=texts.params(2).target), config)
    batches = [inputs([0.0, 1.0, 0.0, 0.7])]
    for seed, length, temperature in ((4, [1, 8, 2, 3], 0.0), (5, [8] * 4, 1.5), (6, [3, 0, 0, 0], 0.3)):
        sampling = specjax.sampling_params(
            ROWS, temperature=temperature, top_p=0.9, max_tokens=seed, stop_token_ids=(seed,)
        )
        batches.append((jax.random.key(seed), batches[0][1][::-1], jnp.array(length), sampling))
    run = partial(driver.generate, params, config=config, max_new_tokens=NEW)
    found = []
    for some in (batches[:1], batches[1:]):
        with compilations() as programs:
            lengths = [run(*batch).length.tolist() for batch in some]
        found.append({"programs": programs, "lengths": lengths})
    return found


def main():
    found = {"texts": texts.compare(json.loads(sys.argv[1]))}
    found |= {"fillers": fillers(), "ties": ties(), "logits": logit_errors(), "shares": shares()}
    found["recompilations"] = recompilations()
    print(json.dumps(found, default=lambda value: value.tolist()))


if __name__ == "__main__":
    main()
