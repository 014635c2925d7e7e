"""From a command line to `Settings`: every flag is a short name for one field.

A field is named by its path (`sampling.temperature`). A config file comes first, `--set path=value` overrides it, and
a flag overrides both.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from specjax.jobs.settings import DRAFTERS, STRATEGIES, VERIFIERS, Settings

OPTIONS: dict[str, tuple[str, str]] = {
    "--prompt": ("prompt", "text to complete; may be repeated"),
    "--prompts": ("prompts", "file of prompts: text (one a line) or .jsonl with 'prompt', 'messages' or 'turns'"),
    "--raw-prompt": ("raw_prompt", "encode prompts as they are, without the chat template"),
    "--model": ("model", "target: a path, an alias or owner/name of a hub repository"),
    "--dtype": ("dtype", "of the weights: float32 or bfloat16"),
    "--drafter": ("drafter", f"{' | '.join(DRAFTERS)} (default: ngram)"),
    "--num-speculative-tokens": ("drafter.num_speculative_tokens", "tokens drafted per step (K)"),
    "--prompt-lookup-max": ("drafter.prompt_lookup_max", "longest n-gram to look up (--drafter ngram)"),
    "--prompt-lookup-min": ("drafter.prompt_lookup_min", "shortest n-gram to look up (--drafter ngram)"),
    "--draft-model": ("drafter.model", "like --model (--drafter model)"),
    "--allow-vocabulary-mismatch": ("drafter.allow_vocabulary_mismatch", "draft even if ids differ (--drafter model)"),
    "--exit-layer": ("drafter.exit_layer", "layers of the target that draft (--drafter early_exit)"),
    "--verifier": ("verifier", f"{' | '.join(VERIFIERS)} (default: rejection)"),
    "--pace": ("pace", "always speculate, or where measured step times say it pays (default: where tokens stay equal)"),
    "--temperature": ("sampling.temperature", "0 takes the most likely token"),
    "--top-k": ("sampling.top_k", "sample among so many tokens; 0: all"),
    "--top-p": ("sampling.top_p", "sample among the likeliest tokens of this mass"),
    "--min-p": ("sampling.min_p", "sample among tokens of at least this share of the likeliest one"),
    "--repetition-penalty": ("sampling.repetition_penalty", "for tokens of prompt and output; 1: none"),
    "--presence-penalty": ("sampling.presence_penalty", "for tokens of the output; 0: none"),
    "--frequency-penalty": ("sampling.frequency_penalty", "for each occurrence in the output; 0: none"),
    "--stop": ("sampling.stop", "string that ends the text; may be repeated"),
    "--seed": ("sampling.seed", "of all random draws"),
    "--max-new-tokens": ("sampling.max_new_tokens", "length of the output at most"),
    "--min-tokens": ("sampling.min_tokens", "no end of text before so many tokens"),
    "--ignore-eos": ("sampling.ignore_eos", "go on after the end of text"),
    "--batch-size": ("batch_size", "prompts decoded together"),
    "--output": ("output", "JSONL file for the completions"),
    "--logprobs": ("logprobs", "write the target's log-probabilities to --output"),
    "--compare": ("compare", "decode plainly too: prints the speed-up and whether the tokens are equal"),
    "--stream": ("stream", "print text token by token (default: for single rows without --output)"),
    "--per-position": ("per_position", "show acceptance at each position of the window"),
    "--parallel": ("parallel.driver", "how several devices are used: auto (shard_map), jit, shard_map or pmap"),
    "--mesh": ("parallel.mesh", "devices for rows and for parts of the model, data=2,model=4 (default: model=all)"),
    "--shard-drafter": ("drafter.sharded", "cut the draft model like the target (--drafter model)"),
    "--coordinator-address": ("parallel.coordinator_address", "host:port of process 0, or auto on a TPU pod"),
    "--num-processes": ("parallel.num_processes", "processes of the run (not with auto)"),
    "--process-id": ("parallel.process_id", "which of them this is (not with auto)"),
    "--compilation-cache": ("compilation_cache", "keep compiled programs for the next start (default: on)"),
    "--input": ("job.input", "JSONL file of rows to complete, resuming where an earlier run ended (see docs/batch.md)"),
    "--output-dir": ("job.output_dir", "where --input's completions, summary and manifest go"),
    "--on-error": ("job.on_error", "stop at a row that cannot be completed, or skip it"),
    "--long-prompts": ("job.long_prompts", "refuse prompts that are too long, or truncate their beginning"),
    "--max-prompt-tokens": ("job.max_prompt_tokens", "longest prompt of --input (default: what the target allows)"),
    "--process-index": ("job.process_index", "which of the processes that share --input this is, from 0"),
    "--process-count": ("job.process_count", "how many processes share --input"),
    "--merge": ("job.merge", "join what all processes have completed, and end"),
}
"""Path and help of each flag."""
_FLAGS = {path: flag for flag, (path, _) in OPTIONS.items()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_options(arguments: Sequence[str], *, description: str | None = None) -> Settings:
    """Reads a command line. `--help` prints and exits.

    Args:
      arguments: without the program's name.
      description: for `--help`.

    Raises:
      ValueError: unknown or malformed options, values out of range, or settings that do not go together.
    """
    given = vars(_parser(description).parse_args(arguments))
    config, pairs = given.pop("config"), dict(map(_pair, given.pop("set")))
    flags = {path: _as_text(value) for path, value in given.items() if value is not None}
    settings = with_changes(load_config(config) if config else Settings(), pairs | flags)
    if not settings.prompt and settings.prompts is None and settings.job.input is None:
        raise ValueError("expected --prompt, --prompts or --input, got none")
    if settings.parallel.coordinator_address is None:  # with several processes JAX must not start before they meet
        settings.sampling.rows(1, ())  # for its checks
    return settings


def load_config(path: str | Path) -> Settings:
    """Runs a config file and returns what its `config()` does.

    Raises:
      ValueError: no such file, one that fails, or one whose `config()` does not return `Settings`.
    """
    spec = importlib.util.spec_from_file_location("config", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"expected --config to be a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        settings = module.config()
    except Exception as error:  # a config is a program: it can raise anything
        raise ValueError(f"expected {path} to define config(), got {type(error).__name__}: {error}") from error
    if not isinstance(settings, Settings):
        raise ValueError(f"expected config() of {path} to return Settings, got {type(settings).__name__}")
    return settings


def with_changes(settings: Settings, changes: Mapping[str, str]) -> Settings:
    """The settings with other values.

    Args:
      settings: where to start from.
      changes: text by path: numbers, `true` or `false`, names of strategies (another one starts from its defaults),
        JSON lists of strings, `none` where a field may be None.

    Raises:
      ValueError: no such field, a text of the wrong form, or values that do not go together.
    """
    return _replace(settings, changes, "")


def _parser(description: str | None) -> _Parser:
    parser = _Parser(description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="Python file whose config() returns Settings")
    parser.add_argument("--set", metavar="PATH=VALUE", action="append", default=[], help="override any field")
    for flag, (path, _) in OPTIONS.items():
        hint, text = _hint(path), option_help(flag)
        if bool in (hint, *typing.get_args(hint)):
            parser.add_argument(flag, dest=path, action=argparse.BooleanOptionalAction, help=text)
        else:
            action = "append" if hint == tuple[str, ...] else "store"
            parser.add_argument(flag, dest=path, action=action, metavar="VALUE", help=text)
    return parser


def _hint(path: str) -> Any:
    """The type of the field that a flag sets, whichever strategy has it."""
    kinds, name = _owners(path)
    return next(hints[name] for hints in map(typing.get_type_hints, kinds.values()) if name in hints)


def option_help(flag: str) -> str:
    """What `--help` says of a flag, with its default: one value, or each strategy's own; none if it is off or unset."""
    path, text = OPTIONS[flag]
    kinds, name = _owners(path)
    fields = [(key, field) for key, kind in kinds.items() for field in dataclasses.fields(kind) if field.name == name]
    values = {key: field.default for key, field in fields if not isinstance(field.default, bool)}
    same = len({*values.values()}) == 1
    texts = [str(value) if same else f"{key} {value}" for key, value in values.items()]
    unset = {None, (), dataclasses.MISSING} & {*values.values()}
    return f"{text} (default: {', '.join(dict.fromkeys(texts))})" if texts and not unset else text


def _owners(path: str) -> tuple[dict[str, type], str]:
    """The class that has the field of a path, or each strategy that may, by its name; and the field's own name."""
    *owners, name = path.split(".")
    kinds: dict[str, type] = {"": Settings}
    for owner in owners:
        hint = typing.get_type_hints(kinds[""])[owner]
        kinds = STRATEGIES.get(hint, {"": hint})
    return kinds, name


def _pair(text: str) -> tuple[str, str]:
    path, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"expected --set path=value, got {text!r}")
    return path, value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _replace(node: Any, changes: Mapping[str, str], prefix: str) -> Any:
    """A dataclass (or a class, to start from its defaults) with changes by path below `prefix`."""
    groups: dict[str, dict[str, str]] = {}
    for path, text in changes.items():
        name, _, rest = path.partition(".")
        groups.setdefault(name, {})[rest] = text
    build = node if isinstance(node, type) else functools.partial(dataclasses.replace, node)
    kind = node if isinstance(node, type) else type(node)
    hints = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
    for name in groups:
        if name not in hints:
            raise ValueError(_no_field(kind, list(hints), name, prefix))
    values = {name: _value(node, name, hints[name], group, prefix + name) for name, group in groups.items()}
    return build(**values)


def _value(node: Any, name: str, hint: Any, group: dict[str, str], path: str) -> Any:
    """The new value of one field: from a text of its own, then from changes below it."""
    text = group.pop("", None)
    if hint in STRATEGIES:
        current = getattr(node, name)
        kind = type(current) if text is None else _among(STRATEGIES[hint], text, path)
        return _replace(current if type(current) is kind else kind, group, f"{path}.")
    if not group:
        return _parse(hint, str(text), path)
    return _replace(getattr(node, name), group, f"{path}.")


def _parse(hint: Any, text: str, path: str) -> Any:
    optional = type(None) in typing.get_args(hint)
    if optional and text == "none":
        return None
    kind = typing.get_args(hint)[0] if optional else hint
    if typing.get_origin(kind) is typing.Literal:
        return _among({name: name for name in typing.get_args(kind)}, text, path)
    if kind is bool:
        return _among({"true": True, "false": False}, text, path)
    try:
        return _strings(text) if kind == tuple[str, ...] else kind(text)
    except (ValueError, TypeError) as error:
        wanted = "a JSON list of strings" if kind == tuple[str, ...] else f"of type {kind.__name__}"
        raise ValueError(f"expected {_FLAGS.get(path, path)} to be {wanted}, got {text!r}") from error


def _strings(text: str) -> tuple[str, ...]:
    values = json.loads(text)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("not a list of strings")
    return tuple(values)


def _among(table: Mapping[str, Any], text: str, path: str) -> Any:
    if text not in table:
        raise ValueError(f"expected {_FLAGS.get(path, path)} to be one of {', '.join(table)}, got {text!r}")
    return table[text]


def _no_field(kind: type, names: Sequence[str], name: str, prefix: str) -> str:
    """Why a field is not there: another strategy has it, or none does."""
    for table in STRATEGIES.values():
        mine = [key for key, other in table.items() if other is kind]
        theirs = [key for key, other in table.items() if name in typing.get_type_hints(other)]
        if mine and theirs:
            owner = _FLAGS[prefix.rstrip(".")]
            flag = _FLAGS.get(prefix + name, prefix + name)
            return f"expected {flag} with {owner} {' or '.join(theirs)}, got {owner} {mine[0]}"
    return f"expected {prefix}FIELD with FIELD among {', '.join(names) or 'nothing'}, got {prefix}{name}"
