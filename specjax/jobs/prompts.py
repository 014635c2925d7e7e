"""Prompts: from arguments, a text file or JSONL, and on to ids."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.io.tokenizer import Tokenizer, encode_prompt
from specjax.jobs.settings import Sampling

ALIASES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
"""Other names of parameters."""
_PARAMETERS = {field.name for field in dataclasses.fields(Sampling)} | ALIASES.keys()
_OTHER_NAMES = {"custom_id": "id", "sampling_params": "sampling"}
"""What other formats call keys of a plain row, which would be passed over in silence."""
_UNKNOWN = {"stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids", "n", "best_of", "logprobs"}
_UNKNOWN |= {"top_logprobs", "prompt_logprobs", "echo", "suffix", "tools", "tool_choice", "functions"}
_UNKNOWN |= {"function_call", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
_UNKNOWN |= {"structured_outputs", "min_length", "max_length", "num_beams", "do_sample", "typical_p"}
_UNKNOWN |= {"truncate_prompt_tokens", "chat_template", "chat_template_kwargs", "add_generation_prompt"}
_UNKNOWN |= {"include_stop_str_in_output", "skip_special_tokens"}
"""Parameters of other programs that would change what comes out, and that are nothing here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One thing to complete."""

    id: str | int
    """Unique in its run; by default its place among the prompts, from 0."""
    content: str | Sequence[Mapping[str, Any]]
    """A text, or the messages of a conversation."""
    token_ids: tuple[int, ...] = ()
    """The ids to go on from; empty until `encode_prompts`."""

    def __post_init__(self) -> None:
        if self.content == "" and not self.token_ids:
            raise ValueError(f"prompt {self.id!r}: expected some text, got an empty one")


def read_prompts(texts: Sequence[str] = (), path: str | Path | None = None) -> list[Prompt]:
    """Reads the prompts of a run.

    Args:
      texts: prompts given directly.
      path: a file: JSONL if its name ends in `.jsonl`, with a prompt in each line as `prompt_of` takes it; otherwise
        plain text, one prompt a line.

    Returns:
      The prompts in order, those of `texts` first.

    Raises:
      ValueError: nothing to read, or a line that is no prompt or repeats an id; the message names the line.
    """
    prompts = [Prompt(id=index, content=text) for index, text in enumerate(texts)]
    if path is not None:
        prompts += _read_file(Path(path), len(prompts))
    if not prompts:
        raise ValueError("expected at least one prompt, got none")
    return prompts


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Numbers from 1, and texts without their ends, of the lines of a text file; U+2028 and its like end no line.

    Raises:
      ValueError: it is not UTF-8.
      OSError: it cannot be read.
    """
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                yield number, line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected {path} to be UTF-8, got another encoding: {error}") from error


def parse_json(line: str) -> Any:
    """What a line of JSONL holds.

    Raises:
      ValueError: it is empty, or no JSON.
    """
    if not line.strip():
        raise ValueError("expected JSON, got an empty line")
    try:
        return json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON, got a fault at column {error.colno}: {error.msg}") from error


def prompt_of(row: Any, default_id: int) -> Prompt:
    """The prompt in a row of JSONL.

    Args:
      row: what the line holds: an object with a `prompt` or `messages` and an optional `id`, or one of Spec-Bench with
        `turns`, of which the first is the prompt, and a `question_id`; other keys are ignored.
      default_id: the id of a row that names none.

    Raises:
      ValueError: no such object, or an empty prompt.
    """
    if isinstance(row, dict) and "turns" in row and not {"prompt", "messages"} & row.keys():
        row = _first_turn(row)
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ValueError("expected an object with either 'prompt' or 'messages', or with 'turns'")
    name = row.get("id", default_id)
    if type(name) not in (str, int):
        raise ValueError(f"expected 'id' to be a string or an integer, got {name!r}")
    kind, content = (str, row["prompt"]) if "prompt" in row else (list, row["messages"])
    if not isinstance(content, kind):
        raise ValueError(f"expected a prompt to be a string and messages to be a list, got {type(content).__name__}")
    return Prompt(id=name, content=content)


def refuse_strays(row: Mapping[str, Any]) -> None:
    """Refuses keys of a plain row that mean something, but not where they stand, not by that name, or not here.

    Raises:
      ValueError: there is one.
    """
    stray = sorted(_PARAMETERS & row.keys())
    if stray:
        raise ValueError(f"expected {stray[0]!r} inside 'sampling', got it beside the prompt")
    for name in sorted(_UNKNOWN & row.keys()):
        raise ValueError(f"expected no {name!r}, which is not supported, got one: take it out")
    for name in sorted(_OTHER_NAMES.keys() & row.keys()):
        raise ValueError(f"expected no {name!r} beside the prompt, got one: here it is called {_OTHER_NAMES[name]!r}")


def _first_turn(question: Mapping[str, Any]) -> dict[str, Any]:
    """A row that asks the first of a question's turns: the others follow replies, which are not there yet."""
    turns = question["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"expected 'turns' to be a list of texts, got {turns!r}")
    named = {"id": question["question_id"]} if "question_id" in question else {}
    return {**question, **named, "prompt": turns[0]}


def encode_prompts(tokenizer: Tokenizer, prompts: Iterable[Prompt], *, raw: bool = False) -> list[Prompt]:
    """Fills in the ids.

    Args:
      tokenizer: the target's.
      prompts: what to encode.
      raw: texts are encoded as they are; otherwise each is a user's message in the chat template, if there is one.
        Messages always go through the template.

    Raises:
      ValueError: a prompt that cannot be encoded, or has no ids; the message names it.
    """
    wrap = not raw and tokenizer.chat_template is not None
    return [dataclasses.replace(prompt, token_ids=_encode(tokenizer, prompt, wrap)) for prompt in prompts]


def _encode(tokenizer: Tokenizer, prompt: Prompt, wrap: bool) -> tuple[int, ...]:
    content = prompt.content
    if isinstance(content, str) and wrap:
        content = [{"role": "user", "content": content}]
    try:
        ids = encode_prompt(tokenizer, {"prompt" if isinstance(content, str) else "messages": content})
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id!r}: {error}") from error
    if not ids:
        raise ValueError(f"prompt {prompt.id!r}: expected at least one token, got none: an empty text has no law")
    return tuple(ids)


def _read_file(path: Path, first_id: int) -> list[Prompt]:
    parse = _parse_row if path.suffix == ".jsonl" else _parse_text
    prompts: dict[str | int, Prompt] = {}
    for number, line in read_lines(path):
        try:
            prompt = parse(line, first_id + len(prompts))
            if prompt.id in prompts:
                raise ValueError(f"expected an id of its own, got {prompt.id!r} again")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        prompts[prompt.id] = prompt
    return list(prompts.values())


def _parse_text(line: str, default_id: int) -> Prompt:
    if not line.strip():
        raise ValueError("expected a prompt, got an empty line")
    return Prompt(id=default_id, content=line)


def _parse_row(line: str, default_id: int) -> Prompt:
    row = parse_json(line)
    if isinstance(row, dict):
        refuse_strays(row)
        if "sampling" in row:
            raise ValueError(
                "expected no 'sampling' with --prompts, which decodes all rows alike, got one: use --input"
            )
    return prompt_of(row, default_id)
