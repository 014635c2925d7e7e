"""Speculative and plain decoding of the same questions, by turns, in one process."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from specjax.benchmark.phases import Phases, time_phases
from specjax.benchmark.questions import Question
from specjax.jobs.completion import Batch, complete
from specjax.jobs.decoder import Decoder, plain_decoder
from specjax.jobs.prompts import Prompt, encode_prompts


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """One batch of prompts, decoded both ways, and once more each for the time that its parts take."""

    category: str
    speculative: Batch
    plain: Batch
    speculative_phases: Phases
    plain_phases: Phases


def measure(
    decoder: Decoder,
    questions: Sequence[Question],
    *,
    batch_size: int = 1,
    raw_prompt: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Pair]:
    """Decodes each batch speculatively, then plainly, before it goes on to the next.

    Batches hold prompts of one category and turn. A later turn follows what plain decoding replied to the earlier
    ones, so that both ways go on from the same text.

    Args:
      decoder: the speculative one.
      questions: those of a category together, as `read_questions` returns them.
      batch_size: prompts decoded together.
      raw_prompt: turns are encoded as they are, without a chat template.
      clock: seconds.

    Raises:
      ValueError: a conversation that might not fit the target; nothing has been decoded then.
    """
    check_room(decoder, questions, raw_prompt=raw_prompt)
    for category, group in groupby(questions, key=lambda question: question.category):
        asked = list(group)
        replies: dict[str | int, tuple[str, ...]] = {question.id: () for question in asked}
        for turn in range(max(len(question.turns) for question in asked)):
            open_ones = [question for question in asked if turn < len(question.turns)]
            prompts = [Prompt(id=f"{one.id}.{turn + 1}", content=_content(one, replies[one.id])) for one in open_ones]
            prompts = encode_prompts(decoder.tokenizer, prompts, raw=raw_prompt)
            plain: list[str] = []
            for pair in _pairs(decoder, category, prompts, batch_size, clock):
                yield pair
                plain += [completion.text for completion in pair.plain.completions]
            for question, text in zip(open_ones, plain, strict=True):
                replies[question.id] += (text,)


def _pairs(
    decoder: Decoder, category: str, prompts: Sequence[Prompt], batch_size: int, clock: Callable[[], float]
) -> Iterator[Pair]:
    baseline = plain_decoder(decoder)
    both = (complete(one, prompts, batch_size=batch_size, clock=clock) for one in (decoder, baseline))
    for fast, slow in zip(*both, strict=True):
        yield Pair(
            category=category,
            speculative=fast,
            plain=slow,
            speculative_phases=time_phases(decoder, fast, batch_size=batch_size, clock=clock),
            plain_phases=time_phases(baseline, slow, batch_size=batch_size, clock=clock),
        )


def num_batches(questions: Sequence[Question], batch_size: int) -> int:
    """How many pairs `measure` yields."""
    turns = Counter((question.category, turn) for question in questions for turn in range(len(question.turns)))
    return sum(-(-count // batch_size) for count in turns.values())


def check_room(decoder: Decoder, questions: Sequence[Question], *, raw_prompt: bool) -> None:
    """Refuses conversations that would not fit the target if every reply were as long as it may be.

    Raises:
      ValueError: names the question.
    """
    most = decoder.config.target.max_positions
    for question in questions:
        empty = ("",) * (len(question.turns) - 1)
        (prompt,) = encode_prompts(
            decoder.tokenizer, [Prompt(id=question.id, content=_content(question, empty))], raw=raw_prompt
        )
        longest = len(prompt.token_ids) + len(question.turns) * decoder.sampling.max_new_tokens
        if longest > most:
            raise ValueError(
                f"question {question.id!r}: expected its turns and replies within the target's {most} positions, got "
                f"up to {longest}: lower --max-new-tokens or leave the question out"
            )


def _content(question: Question, replies: Sequence[str]) -> str | list[dict[str, str]]:
    """What the user said so far and what was replied; a first turn is a text, which needs no chat template."""
    if not replies:
        return question.turns[0]
    said = [{"role": "user", "content": text} for text in question.turns[: len(replies) + 1]]
    heard = [{"role": "assistant", "content": text} for text in replies]
    return [message for pair in zip(said, heard, strict=False) for message in pair] + said[len(replies) :]
