"""Measures slots against fixed batches of the same size and against one prompt at a time, in one process.

The options are those of generate.py, and two of its own. Prompts are the turns of a Spec-Bench file, each by itself,
in an order shuffled once for all three. Compilation and measured step times are in no figure.

    python scripts/benchmark_slots.py --questions spec_bench.jsonl --num-prompts 256 --batch-size 8 \\
      --max-new-tokens 64 --dtype bfloat16 --output slots.json
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    own, rest = parser.parse_known_args(arguments)
    settings = parse_options([*rest, "--prompt", "none", "--no-stream"])
    configure(settings.dtype, cache=settings.compilation_cache)
    decoder, size = build_decoder(settings, settings.parallel.build()), settings.batch_size
    turns = read_turns(own.questions, own.num_prompts)
    prompts = encode_prompts(decoder.tokenizer, turns, raw=settings.raw_prompt)
    runs = {"slots": run_slots(decoder, prompts, size)}
    print(json.dumps(runs["slots"]), file=sys.stderr)
    for name, rows in {"fixed": size, "single": 1}.items():
        runs[name] = run_batches(decoder, prompts, rows)
        runs[name]["slots_are_faster"] = ratio(runs["slots"]["tokens_per_second"], runs[name]["tokens_per_second"])
        print(json.dumps({name: runs[name]}), file=sys.stderr)
    report = json.dumps({"num_prompts": len(prompts), "batch_size": size, **runs}, indent=2)
    print(report)
    if settings.output is not None:
        Path(settings.output).write_text(report + "\n", encoding="utf-8")


def read_turns(path: Path, count: int) -> list[Prompt]:
    """All first turns, then all second ones, and so on, as many as asked for; shuffled."""
    questions = [parse_json(line)["turns"] for _, line in read_lines(path)]
    turns = [turns[place] for place in range(max(map(len, questions))) for turns in questions if place < len(turns)]
    random.Random(0).shuffle(taken := turns[:count])
    return [Prompt(id=index, content=text) for index, text in enumerate(taken)]


def run_slots(decoder: Decoder, prompts: Sequence[Prompt], size: int) -> dict[str, Any]:
    slots = SlotBatch(decoder, size)
    longest_first = sorted(prompts, key=lambda prompt: -len(prompt.token_ids))
    requests = [Request(prompt=prompt, sampling=decoder.sampling) for prompt in longest_first]
    began = time.perf_counter()
    done = [completion for finished in slots.complete(requests) for completion in finished]
    seconds = time.perf_counter() - began - slots.compile_time_s
    host = {"host_share": slots.host_time_s / seconds, "num_calls": slots.num_calls}
    return rates(done, seconds) | host | {"compile_time_s": slots.compile_time_s}


def run_batches(decoder: Decoder, prompts: Sequence[Prompt], size: int) -> dict[str, Any]:
    batches = list(complete(decoder, prompts, batch_size=size))
    done = [completion for batch in batches for completion in batch.completions]
    return rates(done, sum(batch.seconds for batch in batches))


def rates(done: Sequence[Completion], seconds: float) -> dict[str, Any]:
    tokens, steps = (sum(int(getattr(each.stats, name)) for each in done) for name in ("emitted", "steps"))
    return {"seconds": seconds, "num_tokens": tokens, "tokens_per_second": tokens / seconds, "num_row_steps": steps}


if __name__ == "__main__":
    main(sys.argv[1:])
