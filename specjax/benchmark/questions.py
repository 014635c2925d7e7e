"""Questions to measure with: Spec-Bench's file format, and a small set of the project's own."""

import dataclasses
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

from specjax.jobs.prompts import parse_json, read_lines

OWN_QUESTIONS = Path(str(resources.files("specjax.benchmark") / "questions.jsonl"))
"""Short prompts of nine kinds, written for this project."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A conversation's side of the user."""

    id: str | int
    category: str
    turns: tuple[str, ...]
    """What the user says; each turn but the first follows a reply."""


def read_questions(path: str | Path = OWN_QUESTIONS, per_category: int | None = None) -> list[Question]:
    """Reads a file in the format of Spec-Bench: JSONL with `question_id`, `category` and `turns`.

    Args:
      path: the file.
      per_category: the first so many questions of each category; None: all of them.

    Returns:
      The questions, those of a category together, in the order in which categories first appear.

    Raises:
      ValueError: no questions, or a line that is none or repeats an id; the message names the line.

    References:
      Spec-Bench, arXiv 2401.07851.
    """
    if per_category is not None and per_category < 1:
        raise ValueError(f"expected at least 1 question per category, got {per_category}")
    groups: dict[str, list[Question]] = {}
    ids: Counter[str | int] = Counter()
    for number, line in read_lines(path):
        try:
            question = _question(parse_json(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        ids[question.id] += 1
        if ids[question.id] > 1:
            raise ValueError(f"{path}, line {number}: expected a question_id of its own, got {question.id!r} again")
        groups.setdefault(question.category, []).append(question)
    if not groups:
        raise ValueError(f"expected questions in {path}, got none")
    return [question for group in groups.values() for question in group[:per_category]]


def _question(row: Any) -> Question:
    if not isinstance(row, dict) or not {"question_id", "category", "turns"} <= row.keys():
        raise ValueError("expected an object with question_id, category and turns")
    name, category, turns = row["question_id"], row["category"], row["turns"]
    if type(name) not in (str, int) or not isinstance(category, str):
        raise ValueError(f"expected a text or integer and a text, got question_id {name!r} and category {category!r}")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"expected turns to be a list of texts, got {turns!r}")
    return Question(id=name, category=category, turns=tuple(turns))
