"""The pages of docs/ and the README: their Python runs as printed, and prints what they say."""

import ast
import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metasketch import cli
from tests.pages import DOCS, ROOT, Fence, fences, pages, printed_as

QUICKSTART = DOCS / "quickstart.md"

# Each page goes on from the quickstart, as its reader does; these stand by themselves.
ALONE = (QUICKSTART, ROOT / "README.md")

pytestmark = pytest.mark.filterwarnings(
    "default",
    "error::metasketch.MetasketchWarning",
    # What pages speak of, and show all the same.
    "ignore:this run was never checked:metasketch.MetasketchWarning",
    "ignore:nothing calibrated this result:metasketch.MetasketchWarning",
)


def runs(page: Path) -> list[Fence]:
    return [fence for fence in fences(page) if fence.language == "python" and not fence.includes]


def run(page: Path, names: dict[str, Any]) -> None:
    """Run a page from top to bottom; a ```text block right after a Python one is its output."""
    for fence in runs(page):
        output = io.StringIO()
        # Empty lines, so that a traceback names the line of the page.
        code = compile("\n" * fence.line + fence.content, str(page), "exec")
        with contextlib.redirect_stdout(output):
            exec(code, names)
        if fence.output is not None:
            assert printed_as(output.getvalue(), fence.output), (
                f"{page.name}, line {fence.line}, prints\n{output.getvalue()}\nnot\n{fence.output}"
            )


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the quickstart has defined when a reader comes to another page."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(tmp_path_factory.mktemp("docs")):
        run(QUICKSTART, names)
        yield names


def test_the_quickstart_runs(begun: dict[str, Any]) -> None:
    assert {"recipe", "run", "queries", "influence"} <= set(begun)


@pytest.mark.parametrize(
    "page",
    [page for page in pages() if page != QUICKSTART and runs(page)],
    ids=lambda page: page.stem,
)
def test_a_page_runs(page: Path, begun: dict[str, Any]) -> None:
    run(page, {"__name__": "__main__"} if page in ALONE else dict(begun))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_a_page_names_what_exists(page: Path) -> None:
    """Commands of make, and files of this repository in backquotes."""
    text = page.read_text()
    makefile = (ROOT / "Makefile").read_text()
    for fence in fences(page):
        if fence.language in ("console", "bash", "sh"):
            for target in re.findall(r"^\$? ?make ([a-z-]+)", fence.content, re.MULTILINE):
                assert f"\n{target}:" in makefile, f"{page.name}: there is no make {target}"
    if page.name == "log.md":  # what it names may be gone
        return
    for name in re.findall(r"`((?:tests|examples|benchmarks|docs|src)/[\w./-]+\.\w+)`", text):
        assert (ROOT / name).is_file(), f"{page.name} names {name}, which does not exist"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_commands_of_a_page_exist(page: Path) -> None:
    shells = [f.content for f in fences(page) if f.language in ("console", "bash", "sh")]
    named = re.findall(r"^\$? ?metasketch ([a-z]+)", "\n".join(shells), re.MULTILINE)
    named += re.findall(r"`metasketch ([a-z]+)", page.read_text())
    for command in named:
        assert command in cli.COMMANDS, f"{page.name}: there is no metasketch {command}"


def test_every_recipe_has_a_page_with_its_output() -> None:
    """A page that includes a script shows what it prints; tests/test_examples.py compares them."""
    included = {fence.includes for page in pages() for fence in fences(page) if fence.includes}
    assert included
    for fence in (fence for page in pages() for fence in fences(page) if fence.includes):
        assert (ROOT / str(fence.includes)).is_file(), f"{fence.includes} does not exist"
        assert fence.output, f"a page includes {fence.includes} and does not show its output"


def messages() -> str:
    """Every text in the package's code, with … in place of values."""
    found = []
    for module in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_messages_that_troubleshooting_quotes_are_raised() -> None:
    text = re.sub(r"`[^`\n]*`", "", (DOCS / "troubleshooting.md").read_text())
    quoted = re.findall(r'"([^"\n]{12,})"', text)
    assert len(quoted) > 30
    said = messages()
    for message in quoted:
        pattern = "[^\n]*".join(re.escape(part.strip()) for part in message.split("…"))
        assert re.search(pattern, said), f"nothing in the package says {message!r}"


@pytest.mark.parametrize(
    ("output", "page", "same"),
    [
        ("loss 0.410\n", "loss 0.411", True),
        ("loss 0.410\n", "loss 0.520", False),
        ("loss 0.410\n", "gain 0.410", False),
        ("example 54", "example 55", False),
        ("-0.158", "+0.158", False),
    ],
)
def test_outputs_are_compared_by_words_and_numbers(output: str, page: str, same: bool) -> None:
    assert printed_as(output, page) is same
