"""The README's example runs as printed, and prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_first_example_prints_what_the_readme_says() -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    printed = output.getvalue().strip()
    assert f"`{printed}`" in README
    metagradient, difference = (float(v) for v in re.findall(r"-?\d+\.\d+", printed))
    assert abs(metagradient - difference) < 1e-4 * abs(metagradient)
