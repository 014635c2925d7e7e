"""Measures slots against fixed batches of the same size and against one prompt at a time, in one process, by turns.

The options are those of generate.py, and three of its own. Prompts are the turns of a Spec-Bench file, each by itself.
All three get them longest first, as a batch job does; fixed batches also shuffled (`fixed_shuffled`), as a file may
have them, so that what sorting brings is seen apart. Compilation, first runs and measured step times are in no figure.

    python scripts/benchmark_slots.py --questions spec_bench.jsonl --num-prompts 256 --batch-size 8 \\
      --max-new-tokens 64 --dtype bfloat16 --output slots.json
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specjax.benchmark.measure import by_turns
from specjax.compiled import bucket
from specjax.io.files import check_writable, write_whole
from specjax.jobs.batching import Request, SlotBatch
from specjax.jobs.completion import Completion, complete
from specjax.jobs.decoder import Decoder, build_decoder
from specjax.jobs.options import parse_options
from specjax.jobs.prompts import Prompt, encode_prompts, parse_json, read_lines
from specjax.jobs.runtime import configure
from specjax.report.metrics import ratio


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, help="JSONL with 'turns' in each line")
    parser.add_argument("--num-prompts", type=int, default=256, help="turns to take (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, whose median counts (default: 3)")
    own, rest = parser.parse_known_args(arguments)
    if own.repeats < 1:
        parser.error(f"expected --repeats of 1 or more, got {own.repeats}")
    settings = parse_options([*rest, "--prompt", "none", "--no-stream"])
    if settings.output is not None:
        check_writable(Path(settings.output))
    configure(settings.dtype, cache=settings.compilation_cache)
    decoder, size = build_decoder(settings, settings.parallel.build()), settings.batch_size
    shuffled = encode_prompts(decoder.tokenizer, read_turns(own.questions, own.num_prompts), raw=settings.raw_prompt)
    prompts = sorted(shuffled, key=lambda prompt: -len(prompt.token_ids))
    slots = warm_slots(decoder, prompts, size)
    systems = {
        "slots": partial(run_slots, slots, decoder, prompts),
        "fixed": partial(run_batches, decoder, prompts, size),
        "fixed_shuffled": partial(run_batches, decoder, shuffled, size),
        "single": partial(run_batches, decoder, prompts, 1),
    }
    runs = by_turns({name: partial(shown, name, run) for name, run in systems.items()}, own.repeats, seconds_of)
    speed = runs["slots"]["tokens_per_second"]
    for name in list(runs)[1:]:
        runs[name]["slots_are_faster"] = ratio(speed, runs[name]["tokens_per_second"])
    known = {"num_prompts": len(prompts), "batch_size": size, "repeats": own.repeats}
    report = json.dumps({**known, "slots_compile_time_s": slots.compile_time_s, **runs}, indent=2)
    print(report)
    if settings.output is not None:
        write_whole(Path(settings.output), report.encode() + b"\n")


def read_turns(path: Path, count: int) -> list[Prompt]:
    """All first turns, then all second ones, and so on, as many as asked for; shuffled."""
    questions = [parse_json(line)["turns"] for _, line in read_lines(path)]
    turns = [turns[place] for place in range(max(map(len, questions))) for turns in questions if place < len(turns)]
    random.Random(0).shuffle(taken := turns[:count])
    return [Prompt(id=index, content=text) for index, text in enumerate(taken)]


def warm_slots(decoder: Decoder, prompts: Sequence[Prompt], size: int) -> SlotBatch:
    """Slots that have seen a prompt of each bucket; those prompts are completed again in every run."""
    slots = SlotBatch(decoder, size)
    firsts = {bucket(len(prompt.token_ids)): prompt for prompt in reversed(prompts)}
    run_slots(slots, decoder, sorted(firsts.values(), key=lambda prompt: -len(prompt.token_ids)))
    return slots


def run_slots(slots: SlotBatch, decoder: Decoder, prompts: Sequence[Prompt]) -> dict[str, Any]:
    requests = [Request(prompt=prompt, sampling=decoder.sampling) for prompt in prompts]
    host, calls, began = slots.host_time_s, slots.num_calls, time.perf_counter()
    done = [completion for finished in slots.complete(requests) for completion in finished]
    seconds = time.perf_counter() - began
    own = {"host_share": (slots.host_time_s - host) / seconds, "num_calls": slots.num_calls - calls}
    return rates(done, seconds) | own


def run_batches(decoder: Decoder, prompts: Sequence[Prompt], size: int) -> dict[str, Any]:
    batches = list(complete(decoder, prompts, batch_size=size))
    done = [completion for batch in batches for completion in batch.completions]
    return rates(done, sum(batch.seconds for batch in batches))


def shown(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    found = run()
    print(json.dumps({name: found}), file=sys.stderr, flush=True)
    return found


def seconds_of(run: dict[str, Any]) -> float:
    return run["seconds"]


def rates(done: Sequence[Completion], seconds: float) -> dict[str, Any]:
    tokens, steps = (sum(int(getattr(each.stats, name)) for each in done) for name in ("emitted", "steps"))
    return {"seconds": seconds, "num_tokens": tokens, "tokens_per_second": tokens / seconds, "num_row_steps": steps}


if __name__ == "__main__":
    main(sys.argv[1:])
