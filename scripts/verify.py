"""Checks on your model that speculative decoding is lossless: distribution, tokens, bits.

Exit status: 0 passed; 1 a level failed, or nothing could be run; 2 wrong options; 3 nothing was judged.
"""

import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from specjax.io.files import check_writable, write_whole
from specjax.jobs.checks import Checks, parse_checks
from specjax.jobs.consistency import compare_samples, compare_texts, judge, report
from specjax.jobs.decoder import build_decoder
from specjax.jobs.prompts import encode_prompts, read_prompts
from specjax.jobs.runtime import configure, fail
from specjax.jobs.settings import Settings, record
from specjax.report.levels import divergence_table, level_table, outcome, pool_texts, verdict


def main(arguments: list[str] | None = None) -> int:
    try:
        settings, checks = parse_checks(sys.argv[1:] if arguments is None else arguments, description=__doc__)
    except ValueError as error:
        return fail(error, 2)
    try:
        return {True: 0, False: 1, None: 3}[run(settings, checks)]
    except (ValueError, OSError) as error:
        return fail(error, 1)
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was judged", file=sys.stderr)
        return 130


def run(settings: Settings, checks: Checks) -> bool | None:
    configure(settings.dtype, cache=settings.compilation_cache)
    print("settings:", json.dumps(record(settings) | dataclasses.asdict(checks)), file=sys.stderr)
    prompts, decoder = read_prompts(settings.prompt, settings.prompts), build_decoder(settings)
    prompts = encode_prompts(decoder.tokenizer, prompts, raw=settings.raw_prompt)
    console, windows = Console(stderr=True), checks.windows
    path = None if settings.output is None else Path(settings.output)
    if path is not None:
        check_writable(path)
    batches = compare_texts(decoder, prompts, windows, settings)
    found = list(track(batches, "comparing texts", -(-len(prompts) // settings.batch_size), console=console))
    samples = {}
    if settings.sampling.temperature and checks.num_keys:
        drawn = compare_samples(decoder, prompts[0], checks)
        samples = dict(track(drawn, "drawing keys", len(windows), console=console))
    texts = {window: pool_texts([batch[window] for batch in found]) for window in windows}
    judgements = {window: judge(settings, texts[window], samples.get(window)) for window in windows}
    if path is not None:
        told = json.dumps(report(settings, checks, texts, judgements), ensure_ascii=False, indent=2)
        write_whole(path, told.encode() + b"\n")
    console.print(level_table(judgements))
    if settings.promises_equal_tokens and any(text.divergences for text in texts.values()):
        console.print(divergence_table(texts))
    print(verdict(judgements))
    return outcome(judgements)


if __name__ == "__main__":
    sys.exit(main())
