"""The command ``metasketch``: its options, its help, and how it ends.

Exit codes, for scripts:

    0    done
    1    done, and the answer is no: the doctor would not trust this run
    2    a mistake in the command, the recipe, the data, or the code that they call
    3    a store or a file: damaged, of something else, of another version, or the disk is full
    4    the numbers: NaN or infinity, a derivative that does not exist, too little memory
    70   a mistake in metasketch itself
    130  stopped with Ctrl-C; finished work is kept, and the same command goes on
"""

import argparse
import json
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from metasketch import commands, demo, errors, recipe_file
from metasketch.commands import Outcome, Results
from metasketch.removals import FRACTION, NUM_SUBSETS
from metasketch.version import __version__

DONE, NO, MISTAKE, STORE, NUMBERS, BUG, STOPPED = 0, 1, 2, 3, 4, 70, 130

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.StoreError, STORE),
    (errors.MismatchError, STORE),
    (errors.NumericalError, NUMBERS),
    (errors.DerivativeError, NUMBERS),
    (errors.MemoryBudgetError, NUMBERS),
    (errors.MetasketchError, MISTAKE),
    (OSError, STORE),
)


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        does: one line.
        examples: commands to copy, each with what it does.
        options: adds its own options.
        run: does it.
        on_recipe: whether it works on a recipe and keeps a folder.
        fixed_recipe: the name of that recipe, where it is always the same.
    """

    does: str
    examples: Sequence[tuple[str, str]]
    run: Callable[[argparse.Namespace], Outcome]
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    on_recipe: bool = True
    fixed_recipe: str | None = None


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--retrainings", type=int, default=8, help="8 are quick (the default), 64 are thorough"
    )
    parser.add_argument(
        "--single", action="store_true", help="leave out the comparison with double precision"
    )


def _advise_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sweeps", type=int, default=8, help="to spend on the advice; 0 for none, default 8"
    )
    parser.add_argument(
        "--budget", type=int, action="append", help="to look at; may be given several times"
    )


def _attribute_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", default="spell", help="see metasketch methods; default spell")
    parser.add_argument(
        "--budget", type=int, help="B: replays through training, each with a forward pass"
    )
    parser.add_argument(
        "--audit", type=int, default=0, metavar="SWEEPS",
        help="sweeps to spend besides on an estimate of the quality; 8 are usual",
    )  # fmt: skip
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of the method"
    )
    parser.add_argument(
        "--tolerate", action="store_true",
        help="go on with sweeps that were begun on a machine that rounds differently",
    )  # fmt: skip


def _evaluate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", help="judge this attribution alone; default all of them")
    parser.add_argument(
        "--fraction", type=float, default=FRACTION, help=f"to remove; default {FRACTION}"
    )
    parser.add_argument(
        "--subsets", type=int, default=NUM_SUBSETS, help=f"retrainings; default {NUM_SUBSETS}"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the subsets")


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", help="of the attribution to show; default the latest")
    parser.add_argument("--influence", help="a file of scores from elsewhere, instead")
    parser.add_argument("--out", help="the page; default report.html in the store")
    parser.add_argument("--title", help="of the page")
    parser.add_argument("--examples", type=int, default=10, help="of each kind, of each query")
    parser.add_argument("--size", default="30MB", help="of the page at most; default 30MB")


COMMANDS = {
    "demo": Command(
        "see it work in a minute: find mislabelled digits, and check every number by retraining",
        (
            ("metasketch demo", "keep the results in demo-recipe.metasketch"),
            ("metasketch demo --store elsewhere", "keep them elsewhere"),
        ),
        demo.run_demo,
        fixed_recipe=demo.NAME,
    ),
    "check": Command(
        "find mistakes in a recipe in seconds: train two steps, and ask one query",
        (
            ("metasketch check digits.py:recipe", "try the recipe that digits.py makes"),
            ("metasketch check digits.py:recipe --memory 500MB", "plan for less memory"),
        ),
        commands.run_check,
    ),
    "train": Command(
        "train a recipe, and keep what its sweeps will need",
        (
            ("metasketch train digits.py:recipe", "keep the run in digits-recipe.metasketch"),
            ("metasketch train digits.py:recipe --store runs/one", "keep it elsewhere"),
        ),
        commands.run_train,
    ),
    "doctor": Command(
        "say whether attributions of this run can be trusted, and what to change if not",
        (
            ("metasketch doctor digits.py:recipe", "a quick verdict; exit code 1 if it is bad"),
            ("metasketch doctor digits.py:recipe --retrainings 64", "a thorough one"),
        ),
        commands.run_doctor,
        _doctor_options,
    ),
    "advise": Command(
        "say which method and budget to take, with predicted quality and cost",
        (
            ("metasketch advise digits.py:recipe", "spend 8 sweeps on it"),
            ("metasketch advise digits.py:recipe --budget 10 --budget 30", "compare these two"),
        ),
        commands.run_advise,
        _advise_options,
    ),
    "attribute": Command(
        "score every training example for every query, from a budget of sweeps",
        (
            ("metasketch attribute digits.py:recipe --budget 20", "20 replays by spell"),
            ("metasketch attribute digits.py:recipe --budget 40", "extend them to 40"),
            ("metasketch attribute digits.py:recipe --budget 40 --audit 8", "judge them, too"),
            ("metasketch attribute digits.py:recipe --method exact", "one replay a query"),
        ),
        commands.run_attribute,
        _attribute_options,
    ),
    "evaluate": Command(
        "train again without some examples, and see how well every attribution predicted it",
        (
            ("metasketch evaluate digits.py:recipe", "300 retrainings without 1 % each"),
            ("metasketch evaluate digits.py:recipe --subsets 50", "fewer; 300 extend them"),
        ),
        commands.run_evaluate,
        _evaluate_options,
    ),
    "report": Command(
        "write a page to look at: every query with its helpful and harmful examples",
        (
            ("metasketch report digits.py:recipe", "show the latest attribution"),
            ("metasketch report digits.py:recipe --method exact --out exact.html", "choose"),
        ),
        commands.run_report,
        _report_options,
    ),
    "methods": Command(
        "list the methods, each with one line",
        (
            ("metasketch methods", "for a person"),
            ("metasketch methods --json", "for a script"),
        ),
        commands.run_methods,
        on_recipe=False,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser().parse_args(given)
    except SystemExit as stop:  # --help, or a mistake that argparse has told
        return int(stop.code or 0)
    command = COMMANDS[args.command]
    if args.threads is not None:
        torch.set_num_threads(max(1, args.threads))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", errors.MetasketchWarning)
            warnings.showwarning = _noted(warnings.showwarning)
            outcome = command.run(args)
        print(json.dumps(outcome.facts, indent=1) if args.json else outcome.words, flush=True)
        return DONE if outcome.fine else NO
    except KeyboardInterrupt:
        return _stopped(args, given)
    except BrokenPipeError:  # the reader has seen enough; nothing more can be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        return _failed(args, error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metasketch",
        description="Which training examples made this model behave like this?",
        epilog="A recipe is named path/to/file.py:function, or module:function; the function "
        "returns (recipe, queries).\n\nExit codes: 0 done; 1 the answer is no; 2 a mistake in "
        "command or recipe; 3 store, file or disk;\n4 numbers or memory; 70 a mistake in "
        "metasketch; 130 stopped, to be gone on with.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"metasketch {__version__}")
    each = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        examples = "\n".join(f"  {line}\n      {does}" for line, does in command.examples)
        sub = each.add_parser(
            name,
            help=command.does,
            description=command.does[0].upper() + command.does[1:] + ".",
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command.on_recipe:
            if command.fixed_recipe is None:
                sub.add_argument("recipe", help="path/to/file.py:function, or module:function")
            else:
                sub.set_defaults(recipe=command.fixed_recipe)
            sub.add_argument(
                "--store", help="folder of results; default the recipe's name and .metasketch"
            )
            sub.add_argument("--memory", default="4GiB", help="for states and sweeps; default 4GiB")
            sub.add_argument("--disk", help="for the states of the run; default about √steps")
        command.options(sub)
        sub.add_argument("--json", action="store_true", help="print the result as JSON")
        sub.add_argument(
            "--quiet", dest="progress", action="store_false", default=None, help="no progress bars"
        )
        sub.add_argument("--threads", type=int, help="of torch; they change rounding")
        sub.add_argument("--traceback", action="store_true", help="show where an error arose")
    return parser


def _noted(shown: Callable[..., None]) -> Callable[..., None]:
    """Show warnings of ours in a line; those of others as they are ``shown``."""

    def note(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, errors.MetasketchWarning):
            print(f"note: {message}", file=sys.stderr)
        else:
            shown(message, category, *rest, **more)

    return note


def _stopped(args: argparse.Namespace, given: Sequence[str]) -> int:
    kept = "nothing was kept"
    if COMMANDS[args.command].on_recipe and (folder := Results.of(args).folder).exists():
        again = shlex.join(["metasketch", *given])
        kept = f"what was finished is kept in {folder}. The same command goes on:\n  {again}"
    print(f"\nstopped; {kept}", file=sys.stderr)
    return STOPPED


def _failed(args: argparse.Namespace, error: Exception) -> int:
    """Say what went wrong, in a line or two, and choose the exit code."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    message = str(error)
    if code is None:
        place = recipe_file.where(error)
        code = MISTAKE if place else BUG
        message = f"{type(error).__name__}: {error}{place}"
    elif error.__cause__ is not None:  # what the user's own code raised
        place = recipe_file.where(error.__cause__)
        message += "" if place in message else place
    if code == BUG:
        message += "\nThis looks like a mistake in metasketch; --traceback shows where"
    if args.traceback:
        traceback.print_exception(error)
    if args.json:
        print(json.dumps({"error": {"kind": type(error).__name__, "message": message}}, indent=1))
    print(f"error: {message}", file=sys.stderr)
    return code


def run() -> None:
    """The console script."""
    sys.exit(main())
