"""Compares specjax with Hugging Face transformers on this machine: same weights, same prompts, one process.

Batch 1, greedy. For each prompt its runs follow one another: transformers plain and with prompt lookup, specjax plain
and with the n-gram drafter; with --draft-model also transformers assisted by that model, and specjax drafting with it.
So a few times over, of which the run of median time counts. Compile time is spent before and printed apart. Needs the
extra `bench`.

    python scripts/benchmark_huggingface.py --questions spec_bench.jsonl --dtype float32 --per-category 5
"""

import argparse
import dataclasses
import json
import os
import resource
import statistics
import sys
import time
from collections import defaultdict
from functools import partial
from operator import attrgetter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import specjax
from specjax.benchmark.measure import by_turns
from specjax.benchmark.questions import read_questions
from specjax.io.checkpoint import load_checkpoint
from specjax.io.huggingface import to_state_dict
from specjax.io.sources import resolve_model
from specjax.io.tokenizer import check_same_vocabulary, load_tokenizer
from specjax.models.config import RopeConfig, TransformerConfig
from specjax.models.params import join_projections

NAMES = {name: name for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")} | {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
"""What transformers calls the fields of a config."""
GAP = 1e-3
"""Top-2 logit gap above which greedy tokens must be equal."""
RATIOS = {
    "plain": ("hf",),
    "always": ("hf_lookup", "plain"),
    "paced": ("hf_lookup", "plain"),
    "assisted": ("hf_assisted", "plain"),
}
"""By which runs' tokens per second those of a run are divided."""


@dataclasses.dataclass
class Run:
    """One completion: its tokens, wall time, time of the part after the first token, and model calls."""

    tokens: list[int]
    seconds: float
    calls: int
    decode_seconds: float = 0.0
    speculative_calls: int = 0


class HuggingFace:
    """The baseline."""

    def __init__(self, checkpoint, dtype):
        config = checkpoint.config
        sizes = {name: getattr(config, name) for name in NAMES}
        rope = RopeConfig(theta=config.rope.theta, original_max_positions=config.rope.original_max_positions)
        if config != TransformerConfig(rope=rope, **sizes):
            raise ValueError(f"expected a plain Llama, as which the baseline is built, got one with more: {config}")
        self.model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **{NAMES[name]: size for name, size in sizes.items()},
                rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
                eos_token_id=list(checkpoint.eos_ids),
                pad_token_id=0,
            )
        )
        weights = {
            name: torch.from_numpy(np.array(value, np.float32))
            for name, value in to_state_dict(config, checkpoint.params).items()
        }
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"expected the weights to fit, got missing {missing} and unexpected {unexpected}")
        self.model = self.model.to(getattr(torch, dtype)).eval()
        self.calls = 0
        self.model.register_forward_pre_hook(self._count)

    def _count(self, *_):
        self.calls += 1

    def __call__(self, prompt, max_new_tokens, **options):
        ids = torch.tensor([prompt])
        self.calls, start = 0, time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                **options,
            )
        seconds = time.perf_counter() - start
        return Run(out[0, len(prompt) :].tolist(), seconds, self.calls)

    def departure(self, prompt, tokens):
        """Where greedy decoding parts from a completion, and its top-2 gap there: one pass over the whole text."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + tokens]), logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
        parted = (logits.argmax(-1) != torch.tensor(tokens)).nonzero()
        if not len(parted):
            return None, None
        return int(parted[0]), self.gap(prompt + tokens[: int(parted[0])])

    def gap(self, tokens):
        """Difference of the two largest logits after `tokens`."""
        with torch.inference_mode():
            top = self.model(torch.tensor([tokens])).logits[0, -1].float().topk(2).values
        return float(top[0] - top[1])


class SpecJax:
    """The library, plain or with a drafter."""

    def __init__(self, checkpoint, drafter, max_new_tokens, draft_params=None):
        self.config = specjax.DecodeConfig(
            target=specjax.Transformer(checkpoint.config), drafter=drafter, verifier=specjax.Greedy()
        )
        self.params = specjax.Params(target=checkpoint.params, draft=draft_params)
        self.sampling = specjax.sampling_params(1, max_tokens=max_new_tokens, stop_token_ids=checkpoint.eos_ids)
        self.width = specjax.bucket(max_new_tokens)

    def __call__(self, prompt, pace):
        tokens, length = specjax.pad_prompts([prompt])
        start = time.perf_counter()
        state = specjax.prefill(
            self.params, jax.random.key(0), tokens, length, self.sampling, pace,
            config=self.config, max_new_tokens=self.width,
        )  # fmt: skip
        jax.block_until_ready(state.cache)
        middle = time.perf_counter()
        state = specjax.decode_steps(self.params, state, self.sampling, config=self.config)
        emitted = int(state.stats.emitted[0])
        end = time.perf_counter()
        text = np.asarray(state.context.tokens)[0, len(prompt) : len(prompt) + emitted].tolist()
        speculative = int(state.stats.drafted_per_position[0, 0]) if self.config.drafter.num_tokens else 0
        return Run(text, end - start, int(state.stats.steps[0]), end - middle, speculative)


def step_seconds(system, prompt, width):
    """Median time of the target call alone at `width` new tokens after `prompt`."""
    params, (tokens, length) = system.params.target, specjax.pad_prompts([prompt])
    state = specjax.prefill(
        system.params, jax.random.key(0), tokens, length, system.sampling, config=system.config,
        max_new_tokens=system.width,
    )  # fmt: skip
    positions = (length - 1)[:, None] + jnp.arange(width)
    call = jax.jit(system.config.target.apply, donate_argnums=3)
    return median_seconds(lambda last: call(params, jnp.zeros((1, width), jnp.int32), positions, last[1]), state.cache)


def draft_seconds(system, prompt):
    """Median time of the n-gram lookup alone."""
    tokens, length = specjax.pad_prompts([prompt])
    tokens = jnp.pad(tokens, ((0, 0), (0, system.width + system.config.drafter.num_tokens + 1)))
    context = specjax.Context(tokens=tokens, length=length, prompt_length=length)
    call = jax.jit(lambda c: system.config.drafter.draft(None, None, None, c, None, None)[0])
    return median_seconds(lambda _: call(context))


def median_seconds(call, cache=None, repeats=9):
    """Median time of calls, each of which gets what the one before returned; the first two count nowhere."""
    times, last = [], (None, cache)
    for _ in range(repeats + 2):
        start = time.perf_counter()
        last = jax.block_until_ready(call(last))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def lookup_options(args):
    """The settings of the n-gram drafter in the words of transformers."""
    return {
        "prompt_lookup_num_tokens": args.num_speculative_tokens,
        "max_matching_ngram_size": args.prompt_lookup_max,
    }


def load_assistants(args, checkpoint, tokenizer):
    """The draft model as transformers' assistant, which always proposes a full window, and as our drafter."""
    path = resolve_model(args.draft_model)
    check_same_vocabulary(tokenizer, load_tokenizer(path))
    draft = load_checkpoint(path, dtype=getattr(jnp, args.dtype))
    assistant = HuggingFace(draft, args.dtype).model
    assistant.generation_config.num_assistant_tokens = args.num_speculative_tokens
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    drafter = specjax.ModelDrafter(
        model=specjax.Transformer(draft.config),
        num_tokens=args.num_speculative_tokens,
        vocab_size=checkpoint.config.vocab_size,
    )
    return assistant, SpecJax(checkpoint, drafter, args.max_new_tokens, join_projections(draft.params))


def first_difference(left, right):
    """Index of the first differing token, None if the lists are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def compare(args, hub, checkpoint, tokenizer):
    """Runs everything and returns one record per question, and the floors by prompt bucket."""
    window = args.num_speculative_tokens
    drafter = specjax.NGramDrafter(num_tokens=window, prompt_lookup_max=args.prompt_lookup_max)
    plain = SpecJax(checkpoint, specjax.NoDrafter(), args.max_new_tokens)
    ngram = SpecJax(checkpoint, drafter, args.max_new_tokens)
    assistant, assisted = load_assistants(args, checkpoint, tokenizer) if args.draft_model else (None, None)
    floors, records = {}, []
    plain_pace, always = specjax.make_pace(1, [1.0]), specjax.make_pace(1, [1.0, 1.0])
    for row in read_questions(args.questions, args.per_category):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": row.turns[0]}])
        size = specjax.bucket(len(prompt))
        if size not in floors:
            started = time.perf_counter()
            plain(prompt, plain_pace)
            ngram(prompt, always)
            if assisted:
                assisted(prompt, always)
            spent = time.perf_counter() - started
            floors[size] = {
                "first_call_s": spent,
                "plain_s": step_seconds(plain, prompt, 1),
                "verify_s": step_seconds(ngram, prompt, window + 1),
                "draft_s": draft_seconds(ngram, prompt),
            }
        floor = floors[size]
        costs = [floor["plain_s"] + floor["draft_s"], floor["verify_s"] + floor["draft_s"]]
        pace = specjax.make_pace(1, costs)
        systems = {
            "hf": partial(hub, prompt, args.max_new_tokens),
            "hf_lookup": partial(hub, prompt, args.max_new_tokens, **lookup_options(args)),
            "plain": partial(plain, prompt, plain_pace),
            "always": partial(ngram, prompt, always),
            "paced": partial(ngram, prompt, pace),
        }
        if assisted:
            systems["hf_assisted"] = partial(hub, prompt, args.max_new_tokens, assistant_model=assistant)
            systems["assisted"] = partial(assisted, prompt, always)
        runs = by_turns(systems, args.repeats, attrgetter("seconds"))
        split = first_difference(runs["hf"].tokens, runs["plain"].tokens)
        records.append(
            {
                "question_id": row.id,
                "category": row.category,
                "prompt_tokens": len(prompt),
                "bucket": size,
                "first_difference": split,
                "gap": None if split is None else hub.gap(prompt + runs["hf"].tokens[:split]),
                "own_equal": all(run.tokens == runs["plain"].tokens for name, run in runs.items() if name[:2] != "hf"),
                "runs": {name: dataclasses.asdict(run) for name, run in runs.items()},
            }
        )
        print(f"{len(records)} {row.category} {len(prompt)}", file=sys.stderr, flush=True)
    return records, floors


def compare_tokens(args, hub, checkpoint, tokenizer):
    """Greedy tokens and acceptance lengths against those of transformers, for every question; nothing is timed."""
    drafter = specjax.NGramDrafter(num_tokens=args.num_speculative_tokens, prompt_lookup_max=args.prompt_lookup_max)
    system, pace = SpecJax(checkpoint, drafter, args.max_new_tokens), specjax.make_pace(1, [1.0, 1.0])
    differences, groups = [], defaultdict(list)
    for row in read_questions(args.questions, args.per_category):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": row.turns[0]}])
        own, lookup = system(prompt, pace), hub(prompt, args.max_new_tokens, **lookup_options(args))
        split, gap = hub.departure(prompt, own.tokens)
        if split is not None:
            differences.append((row.id, split, gap))
        record = {"runs": {name: dataclasses.asdict(run) for name, run in (("lookup", lookup), ("own", own))}}
        groups[row.category].append(record)
        groups["ALL"].append(record)
        print(f"{row.id} {row.category} {split} {lookup.calls} {own.calls}", file=sys.stderr, flush=True)
    return {
        "tokens": sum(len(record["runs"]["own"]["tokens"]) for record in groups["ALL"]),
        "differences": differences,
        "differences_above_gap": [item for item in differences if item[2] > GAP],
        "acceptance_length": {
            name: {kind: acceptance_length(records, kind) for kind in ("lookup", "own")}
            for name, records in groups.items()
        },
    }


def speed(records, name, seconds="seconds"):
    """Pooled tokens per second."""
    total = sum(len(r["runs"][name]["tokens"]) for r in records)
    return total / sum(r["runs"][name][seconds] for r in records)


def acceptance_length(records, name):
    """Pooled tokens per model call."""
    return sum(len(r["runs"][name]["tokens"]) for r in records) / sum(r["runs"][name]["calls"] for r in records)


def loop_efficiency(records, floors, name):
    """Decoding time that target calls and lookups account for, over the time it took."""
    needed = 0.0
    for record in records:
        run, floor = record["runs"][name], floors[record["bucket"]]
        wide = run["speculative_calls"]
        draft = 0.0 if name == "plain" else floor["draft_s"] * run["calls"]
        needed += wide * floor["verify_s"] + (run["calls"] - wide) * floor["plain_s"] + draft
    return needed / sum(r["runs"][name]["decode_seconds"] for r in records)


def summarize(records, floors):
    """The figures of the comparison, per category and over all."""
    groups = defaultdict(list)
    for record in records:
        groups[record["category"]].append(record)
    groups["ALL"] = records
    table = {}
    for name, rows in groups.items():
        runs = rows[0]["runs"]
        table[name] = {"questions": len(rows)}
        table[name] |= {f"tau_{run}": acceptance_length(rows, run) for run in runs if run not in ("hf", "plain")}
        table[name] |= {f"tok_s_{run}": speed(rows, run) for run in runs}
        table[name] |= {f"{a}_vs_{b}": speed(rows, a) / speed(rows, b) for a in runs for b in RATIOS.get(a, ())}
    differing = [r for r in records if r["first_difference"] is not None]
    return {
        "categories": table,
        "loop_efficiency": {name: loop_efficiency(records, floors, name) for name in ("plain", "always", "paced")},
        "floors": floors,
        "equal_to_hf": len(records) - len(differing),
        "differences_above_gap": [r["question_id"] for r in differing if r["gap"] > GAP],
        "differences": [(r["question_id"], r["first_difference"], r["gap"]) for r in differing],
        "speculative_equal_to_plain": sum(r["own_equal"] for r in records),
        "peak_memory_gib_with_torch": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def print_table(summary):
    """Prints a fixed-width table."""
    rows = summary["categories"]
    columns = list(next(iter(rows.values())))
    print(f"{'':16}" + "".join(f"{column:>20}" for column in columns))
    for name, row in rows.items():
        print(f"{name:16}" + "".join(f"{row[column]:20.3f}" for column in columns))
    print(json.dumps({key: value for key, value in summary.items() if key != "categories"}, indent=1))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", required=True, help="Spec-Bench format: JSONL with question_id, category, turns")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--draft-model", help="a smaller model of the same vocabulary: compares assisted decoding too")
    parser.add_argument("--per-category", type=int, help="questions of each category; default: all")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=6)
    parser.add_argument("--prompt-lookup-max", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system on each prompt (default: 3)")
    parser.add_argument(
        "--tokens-only", action="store_true", help="compare greedy tokens and acceptance lengths, and time nothing"
    )
    parser.add_argument("--output", help="JSON file for the summary and every run")
    args = parser.parse_args(argv)
    if args.tokens_only and args.draft_model:
        parser.error("expected --tokens-only or --draft-model, got both")
    if args.repeats < 1:
        parser.error(f"expected --repeats of 1 or more, got {args.repeats}")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    path = resolve_model(args.model)
    checkpoint = load_checkpoint(path, dtype=getattr(jnp, args.dtype))
    hub = HuggingFace(checkpoint, args.dtype)
    checkpoint = dataclasses.replace(checkpoint, params=join_projections(checkpoint.params))
    if args.tokens_only:
        print(json.dumps(compare_tokens(args, hub, checkpoint, load_tokenizer(path)), indent=1))
        return
    records, floors = compare(args, hub, checkpoint, load_tokenizer(path))
    summary = summarize(records, floors)
    if args.output:
        Path(args.output).write_text(json.dumps({"summary": summary, "records": records}))
    print_table(summary)


if __name__ == "__main__":
    main()
