"""Every script in examples/ runs as it stands, and says something."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.pages import fences, pages, printed_as

EXAMPLES = {p.stem: p for p in sorted((Path(__file__).parent.parent / "examples").glob("*.py"))}
ARGUMENTS = {"interpolating_digits": ["--quick"]}

# What pages of docs/ say that the scripts print.
SAID = {
    Path(fence.includes).stem: fence.output
    for page in pages()
    for fence in fences(page)
    if fence.includes and fence.output
}

# What other libraries warn their users of is not the scripts' affair; the library's own is.
pytestmark = pytest.mark.filterwarnings(
    "default",
    "error::metasketch.MetasketchWarning",
    "ignore:this run was never checked:metasketch.MetasketchWarning",
)


def run(name: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a script prints."""
    path = str(EXAMPLES[name])
    patch.setattr(sys, "argv", [path, *ARGUMENTS.get(name, [])])
    runpy.run_path(path, run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - {"interpolating_digits"}))
def test_an_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run(name, monkeypatch, capsys)
    assert printed.strip()
    assert "nan" not in printed.lower()
    if name in SAID:
        assert printed_as(printed, SAID[name]), f"docs/ shows another output than\n{printed}"


@pytest.mark.slow
def test_interpolating_digits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order that it is about, on a smaller problem too: SPELL ranks removals better than MAGE,
    and MAGE reconstructs better than SPELL."""
    printed = run("interpolating_digits", monkeypatch, capsys)
    rows = {line.split()[0]: line.split() for line in printed.splitlines()[4:]}
    assert float(rows["spell"][1]) > float(rows["mage"][1])
    assert float(rows["mage"][-1]) < float(rows["spell"][-1])
    assert float(rows["exact,"][3]) > 0.9
