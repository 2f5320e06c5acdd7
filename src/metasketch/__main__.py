"""``python -m metasketch`` is the command ``metasketch``."""

from metasketch.cli import run

if __name__ == "__main__":
    run()
