"""Speculative and plain decoding of the same questions, by turns, in one process."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from specjax.benchmark.phases import Phases, time_phases
from specjax.benchmark.questions import Question
from specjax.jobs.completion import Batch, complete
from specjax.jobs.decoder import Decoder, plain_decoder
from specjax.jobs.prompts import Prompt, encode_prompts

Run = TypeVar("Run")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """One batch of prompts, decoded both ways, and once more each for the time that its parts take."""

    questions: tuple[Question, ...]
    """Whose turns its rows are."""
    batch_size: int
    """Rows, those without a question counted."""
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

    Batches are full as long as so many turns can be asked, of whatever category: a row without a question costs time
    and brings nothing. A later turn follows what plain decoding replied to the earlier ones, so that both ways go on
    from the same text.

    Args:
      decoder: the speculative one.
      questions: what to ask; of conversations with as many turns the first comes first.
      batch_size: prompts decoded together.
      raw_prompt: turns are encoded as they are, without a chat template.
      clock: seconds.

    Raises:
      ValueError: a conversation that might not fit the target; nothing has been decoded then.
    """
    check_room(decoder, questions, raw_prompt=raw_prompt)
    replies: dict[str | int, tuple[str, ...]] = {question.id: () for question in questions}
    for asked in _waves(questions, batch_size):
        prompts = [
            Prompt(id=f"{one.id}.{len(replies[one.id]) + 1}", content=_content(one, replies[one.id])) for one in asked
        ]
        prompts = encode_prompts(decoder.tokenizer, prompts, raw=raw_prompt)
        for pair in _pairs(decoder, asked, prompts, batch_size, clock):
            for question, completion in zip(pair.questions, pair.plain.completions, strict=True):
                replies[question.id] += (completion.text,)
            yield pair


def _waves(questions: Sequence[Question], batch_size: int) -> Iterator[list[Question]]:
    """Who is asked the next turn: as many whole batches as there are, and only in the end what fills none.

    A question comes again after a wave that it was in, until its turns have been asked. The longest conversations go
    first, so that their last turns are not left alone.
    """
    waiting = [(question, len(question.turns)) for question in questions]
    while waiting:
        waiting.sort(key=lambda one: -one[1])
        count = len(waiting) // batch_size * batch_size or len(waiting)
        wave, waiting = waiting[:count], waiting[count:]
        yield [question for question, _ in wave]
        waiting += [(question, left - 1) for question, left in wave if left > 1]


def _pairs(
    decoder: Decoder, asked: Sequence[Question], prompts: Sequence[Prompt], batch_size: int, clock: Callable[[], float]
) -> Iterator[Pair]:
    baseline = plain_decoder(decoder)
    both = (complete(one, prompts, batch_size=batch_size, clock=clock) for one in (decoder, baseline))
    for first, fast, slow in zip(range(0, len(asked), batch_size), *both, strict=True):
        yield Pair(
            questions=tuple(asked[first : first + batch_size]),
            batch_size=batch_size,
            speculative=fast,
            plain=slow,
            speculative_phases=time_phases(decoder, fast, batch_size=batch_size, clock=clock),
            plain_phases=time_phases(baseline, slow, batch_size=batch_size, clock=clock),
        )


def by_turns(systems: Mapping[str, Callable[[], Run]], repeats: int, seconds: Callable[[Run], float]) -> dict[str, Run]:
    """Runs all systems, one after another, so many times.

    Returns:
      Of each system the run of median time (of an even number the slower one of the two in the middle).

    Raises:
      ValueError: no repeats.
    """
    if repeats < 1:
        raise ValueError(f"expected repeats of 1 or more, got {repeats}")
    rounds = [{name: run() for name, run in systems.items()} for _ in range(repeats)]
    return {name: sorted((found[name] for found in rounds), key=seconds)[repeats // 2] for name in systems}


def num_batches(questions: Sequence[Question], batch_size: int) -> int:
    """How many pairs `measure` yields."""
    return sum(-(-len(wave) // batch_size) for wave in _waves(questions, batch_size))


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
