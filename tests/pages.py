"""The fenced blocks of the documentation's pages, and a comparison of what they print."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SNIPPET = re.compile(r"--8<--\n([^\n]+)\n--8<--\s*")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Fence:
    """A fenced block.

    Attributes:
        line: of its opening fence, from 1.
        output: the block of text that follows it at once, which is what it prints.
        includes: the file that it shows, where it is one.
    """

    language: str
    content: str
    line: int
    output: str | None = None
    includes: str | None = None


def pages() -> list[Path]:
    """Every page of the documentation, and the README."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def fences(page: Path) -> list[Fence]:
    text = page.read_text()
    found: list[Fence] = []
    end = 0
    for match in _FENCE.finditer(text):
        language, content = match.groups()
        if language == "text" and found and not text[end : match.start()].strip():
            found[-1] = replace(found[-1], output=content)
        shown = _SNIPPET.fullmatch(content)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Fence(language, content, line, includes=shown[1] if shown else None))
        end = match.end()
    return found


def printed_as(output: str, page: str) -> bool:
    """Whether an output is what a page says: the same words and whole numbers, and fractions to
    within 1 % or one in their last digit, as another machine may round them."""
    ours, theirs = output.strip(), page.strip()
    if _NUMBER.sub("#", ours).split() != _NUMBER.sub("#", theirs).split():
        return False
    pairs = zip(_NUMBER.findall(ours), _NUMBER.findall(theirs), strict=True)
    return all(a == b or ("." in a + b and _close(a, b)) for a, b in pairs)


def _close(a: str, b: str) -> bool:
    last = 10.0 ** -len(b.partition("e")[0].partition(".")[2])
    return math.isclose(float(a), float(b), rel_tol=0.01, abs_tol=1.01 * last)
