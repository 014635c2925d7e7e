"""Program: slots on meshes against a single device's texts, in buffers that grow, and what is compiled meanwhile."""

import dataclasses
import json
import sys

import jax
from programs import compilations

from specjax.jobs.batching import Request, SlotBatch
from specjax.jobs.completion import complete
from specjax.jobs.decoder import build_decoder
from specjax.jobs.options import parse_options
from specjax.jobs.placement import Placement
from specjax.jobs.prompts import Prompt, encode_prompts

MESHES = {"shard_map": "data=2,model=2", "jit": "data=2,model=2", "pmap": "model=4"}
TEXTS = ["abab", "c" * 8, "xy", "naïve", "abcabcabc", "long " * 4, "z", "bcbcb", "abab"]
"""The sixth needs buffers of the next bucket."""
SAMPLING = [{}, {"temperature": 1.0}, {"max_new_tokens": 5}, {"temperature": 0.7, "seed": 4, "top_p": 0.9}]


def requests(decoder, prompts):
    options = (SAMPLING[index % len(SAMPLING)] for index in range(len(prompts)))
    own = [dataclasses.replace(decoder.sampling, **option) for option in options]
    return [Request(prompt=prompt, sampling=sampling) for prompt, sampling in zip(prompts, own, strict=True)]


def record(completion):
    stats = [count.tolist() for count in jax.tree.leaves(completion.stats)]
    return [list(completion.token_ids), completion.finish_reason, stats]


def alone(decoder, asked):
    """Each by itself on one device."""
    found = {}
    for request in asked:
        (batch,) = complete(dataclasses.replace(decoder, sampling=request.sampling), [request.prompt])
        found[request.prompt.id] = record(batch.completions[0])
    return found


def in_slots(decoder, asked):
    """Four slots: the records, how often steps are compiled for them, and what a second batch of them compiles."""
    slots = SlotBatch(decoder, 4)
    with compilations() as first:
        rows = [row for finished in slots.complete(asked) for row in finished]
    with compilations() as programs:
        again = [row for finished in slots.complete(asked[::-1]) for row in finished]
    found, second = ({row.prompt.id: record(row) for row in some} for some in (rows, again))
    steps = first.count("jit(_decode_steps)")
    return {"rows": found, "same": found == second, "steps": steps, "programs": programs, "calls": slots.num_calls}


def main():
    options = ["--model", json.loads(sys.argv[1]), "--max-new-tokens", "8", "--verifier", "exact_match"]
    settings = parse_options([*options, "--prompt", "x", "--set", "pace=always"])
    single = build_decoder(settings)
    prompts = [Prompt(id=index, content=text) for index, text in enumerate(TEXTS)]
    asked = requests(single, encode_prompts(single.tokenizer, prompts))
    found = {"alone": {"rows": alone(single, asked)}}
    for name, mesh in MESHES.items():
        decoder = build_decoder(settings, Placement(driver=name, mesh=mesh).build())
        found[name] = in_slots(decoder, asked)
    measured = dataclasses.replace(build_decoder(settings, Placement(mesh="data=2").build()), measured_pace=True)
    found["measured"] = in_slots(measured, asked[:3])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
