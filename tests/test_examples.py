"""Every example runs, in its quick form, as a reader would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
def test_interpolating_digits() -> None:
    """The order that it is about, on the smaller problem too: SPELL ranks removals better than MAGE,
    and MAGE reconstructs better than SPELL."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / "interpolating_digits.py", "--quick"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()[4:]}
    assert float(rows["spell"][1]) > float(rows["mage"][1])
    assert float(rows["mage"][-1]) < float(rows["spell"][-1])
    assert float(rows["exact,"][3]) > 0.9
