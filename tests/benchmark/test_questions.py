import json
from collections import Counter

import pytest

from specjax.benchmark.questions import OWN_QUESTIONS, Question, read_questions


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def row(name, category="qa", turns=("Why?",)):
    return {"question_id": name, "category": category, "turns": list(turns)}


def test_own_questions():
    questions = read_questions()
    assert len(questions) == len({question.id for question in questions}) == 26
    assert len(Counter(question.category for question in questions)) == 9
    assert max(len(question.turns) for question in questions) == 3
    assert max(len(turn) for question in questions for turn in question.turns) < 600


def test_spec_bench_rows_are_grouped_by_category(tmp_path):
    rows = [row(81, "writing", ["One.", "Two."]), row(7), row(82, "writing", ["Three."]), row("x")]
    rows[1]["reference"] = ["ignored"]
    questions = read_questions(write(tmp_path / "q.jsonl", *rows))
    assert questions == [
        Question(id=81, category="writing", turns=("One.", "Two.")),
        Question(id=82, category="writing", turns=("Three.",)),
        Question(id=7, category="qa", turns=("Why?",)),
        Question(id="x", category="qa", turns=("Why?",)),
    ]
    assert [one.id for one in read_questions(tmp_path / "q.jsonl", 1)] == [81, 7]


def test_separators_of_unicode_end_no_line(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(row(1, turns=["a\u2028b\x85c"]), ensure_ascii=False) + "\n", encoding="utf-8-sig")
    assert read_questions(path)[0].turns == ("a\u2028b\x85c",)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "line 2: expected JSON, got a fault at column 2"),
        ("", "line 2: expected JSON, got an empty line"),
        ("[]", "line 2: expected an object with question_id, category and turns"),
        ('{"question_id": 1, "category": "a"}', "line 2: expected an object with"),
        (json.dumps(row(1.5)), "line 2: expected a text or integer"),
        (json.dumps(row(2, turns=[])), "line 2: expected turns to be a list of texts"),
        (json.dumps(row(2, turns=[""])), "line 2: expected turns"),
        (json.dumps(row(1)), "line 2: expected a question_id of its own, got 1 again"),
    ],
)
def test_lines_that_are_no_questions(tmp_path, bad, says):
    path = write(tmp_path / "q.jsonl", row(1))
    path.write_text(path.read_text() + bad + "\n")
    with pytest.raises(ValueError, match=says):
        read_questions(path)


def test_nothing_to_ask(tmp_path):
    with pytest.raises(ValueError, match="expected questions in"):
        read_questions(write(tmp_path / "q.jsonl"))
    with pytest.raises(ValueError, match="at least 1 question per category, got 0"):
        read_questions(OWN_QUESTIONS, 0)
