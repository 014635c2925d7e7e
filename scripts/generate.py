"""Completes prompts with lossless speculative decoding, and ends with how fast that was.

With --input and --output-dir it is a batch job, which goes on after any crash: see docs/batch.md.
"""

import json
import sys
from functools import partial
from typing import TextIO

import jax
from rich.console import Console
from rich.progress import track

from specjax.jobs.completion import Batch, complete
from specjax.jobs.decoder import build_decoder, plain_decoder
from specjax.jobs.job import run_job
from specjax.jobs.manifest import check_processes
from specjax.jobs.options import parse_options
from specjax.jobs.prompts import encode_prompts, read_prompts
from specjax.jobs.runtime import configure, fail, open_output
from specjax.jobs.settings import Settings, record
from specjax.jobs.summary import compare, comparison_text, completion_row, summarize
from specjax.parallel.launch import check_same, first_process_only
from specjax.report.table import job_table, position_table, summary_table


def main(arguments: list[str] | None = None) -> int:
    finished: list[Batch] = []
    try:
        settings = parse_options(sys.argv[1:] if arguments is None else arguments, description=__doc__)
    except ValueError as error:
        return fail(error, 2)
    try:
        if settings.job.input is not None:
            return batch(settings)
        run(settings, finished)
    except (ValueError, OSError) as error:
        return fail(error, 1)
    except jax.errors.JaxRuntimeError as error:
        first = str(error).split("\n", 1)[0]
        return fail(RuntimeError(f"{first} (out of memory? Lower --batch-size or, in a job, --max-prompt-tokens)"), 1)
    except KeyboardInterrupt:
        done = sum(len(batch.completions) for batch in finished)
        job = "at once; the same command goes on from what is on disk"
        print(f"\ninterrupted {f'after {done} prompts' if settings.job.input is None else job}", file=sys.stderr)
        return 130
    return 0


def run(settings: Settings, finished: list[Batch]) -> None:
    configure(settings.dtype, cache=settings.compilation_cache)
    settings.parallel.start()
    with first_process_only():
        complete_prompts(settings, finished)


def complete_prompts(settings: Settings, finished: list[Batch]) -> None:
    print("settings:", json.dumps(record(settings)), file=sys.stderr)
    check_processes(settings)
    prompts = read_prompts(settings.prompt, settings.prompts)
    decoder = build_decoder(settings, settings.parallel.build())
    prompts = encode_prompts(decoder.tokenizer, prompts, raw=settings.raw_prompt)
    check_same("prompts", prompts)
    console, size, window = Console(stderr=True), settings.batch_size, decoder.config.drafter.num_tokens
    speak = partial(print, end="", flush=True) if settings.streams else None
    batches = complete(decoder, prompts, batch_size=size, on_text=speak)
    with open_output(settings.output) as file:
        for batch in track(batches, "completing", -(-len(prompts) // size), console=console, disable=file is None):
            finished.append(batch)
            show(batch, settings, file)
    runs = {"speculative" if window else "plain": summarize(finished)}
    plain: list[Batch] = []
    if settings.compare:
        hush = None if speak is None else lambda text: None
        plain += complete(plain_decoder(decoder), prompts, batch_size=size, on_text=hush)
        runs["plain"] = summarize(plain)
    console.print(summary_table(runs))
    if settings.per_position:
        console.print(position_table(runs["speculative"]))
    if settings.compare:
        print(comparison_text(compare(finished, plain), settings), file=sys.stderr)


def batch(settings: Settings) -> int:
    configure(settings.dtype, cache=settings.compilation_cache)
    print("settings:", json.dumps(record(settings)), file=sys.stderr)
    console = Console(stderr=True)
    outcome = run_job(settings, console)
    done = f"{outcome.done} of {outcome.total} rows are complete in {settings.job.output_dir}"
    if outcome.signal is not None:
        console.print(f"{outcome.signal}: {done}; the same command goes on from there", soft_wrap=True)
    elif outcome.summary is None:
        console.print(f"{done}; --merge joins them when all processes have ended", soft_wrap=True)
    else:
        console.print(job_table(outcome.summary))
        if settings.per_position:
            console.print(position_table(outcome.summary))
        console.print(done, soft_wrap=True)
    return 130 if outcome.signal == "SIGINT" else 0


def show(batch: Batch, settings: Settings, file: TextIO | None) -> None:
    for completion in batch.completions:
        if file is not None:
            print(json.dumps(completion_row(completion), ensure_ascii=False), file=file, flush=True)
        if settings.streams or file is None:
            print("" if settings.streams else completion.text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
