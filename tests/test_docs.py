"""The commands that README and docs print are ones that their scripts take."""

import re
import shlex
from pathlib import Path

import pytest

from specjax.benchmark.options import parse_plan
from specjax.jobs.checks import parse_checks
from specjax.jobs.options import OPTIONS, parse_options
from specjax.planning.options import parse_request

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PARSERS = {
    "generate": parse_options,
    "verify": parse_checks,
    "benchmark": parse_plan,
    "plan": parse_request,
}
COMMAND = re.compile(r"scripts/(\w+)\.py +(.*)")


def commands():
    """Script, arguments and page of each command line in the pages' shell blocks."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        matches = [match for line in lines for match in [COMMAND.search(line)] if match]
        found += [(match[1], arguments(*match.groups()), page.name) for match in matches]
    return found


def arguments(script, text):
    """Words of a command, without what the shell does with it; `...` stands for options that the page has named."""
    words = shlex.split(text.split("'")[0] if text.count("'") % 2 else text, comments=True)
    words = [word.replace("$1", "float32").replace("$2", "name") for word in words if word != "${@:3}"]
    kept = [word for before, word in zip(["", *words], words, strict=False) if word != "..." or before == "--prompt"]
    bare = script == "generate" and not {"--prompt", "--prompts", "--input"} & {*kept}
    return [*kept, "--prompt", "..."] if bare else kept


@pytest.mark.parametrize(
    ("script", "words", "page"), commands(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_command_of_the_docs_is_one_that_its_script_takes(script, words, page, monkeypatch):
    monkeypatch.chdir(ROOT)
    if script in PARSERS:
        PARSERS[script](words)
    else:
        source = (ROOT / "scripts" / f"{script}.py").read_text(encoding="utf-8")
        known = {*OPTIONS} if "parse_options" in source else set()
        assert {word for word in words if word.startswith("--")} <= known | {*re.findall(r'"(--[\w-]+)"', source)}


def test_all_scripts_are_in_the_docs():
    assert {script for script, _, _ in commands()} == {path.stem for path in (ROOT / "scripts").glob("*.py")}
