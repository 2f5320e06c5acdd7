"""The command: what it says, how it ends, and that a user's mistake never shows a traceback."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metasketch as ms
from metasketch import cli, demo, files, recipe_file
from metasketch.files import read_json, write_json

RECIPES = """
    import os, time
    import torch
    import metasketch as ms
    from tests import problems

    def recipe():
        return problems.recipe("mlp", "sgd", "plain", show=str), problems.queries("mlp")

    def another():
        return problems.recipe("mlp", "adam", "plain"), problems.queries("mlp")

    def slow_loss(model, batch):
        if os.path.exists("slow"):
            time.sleep(0.03)
        return ms.losses.cross_entropy(model, batch)

    def slow():
        made = problems.recipe("mlp", "sgd", "plain", loss=slow_loss, epochs=20)
        return made, problems.queries("mlp")

    def nan_loss(model, batch):
        return ms.losses.cross_entropy(model, batch) / 0.0

    def diverges():
        return problems.recipe("mlp", "sgd", "plain", loss=nan_loss), problems.queries("mlp")

    def fails():
        return 1 / 0

    def bad_loss(model, batch):
        return model(batch[0][:, :2])

    def shapes():
        return problems.recipe("mlp", "sgd", "plain", loss=bad_loss), problems.queries("mlp")

    def bad_measure(model, batch):
        raise KeyError("label")

    def measures():
        x = problems.inputs("mlp", 3, seed=2)
        return problems.recipe("mlp", "sgd", "plain"), ms.Queries(x, bad_measure)

    def nothing():
        pass

    def swapped():
        return recipe()[::-1]

    def alone():
        return recipe()[0]

    constant = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    """A working folder with a file of recipes."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(RECIPES))
    (tmp_path / "broken.py").write_text("def recipe(:\n")
    (tmp_path / "needs.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys: Any, *argv: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error; never a traceback."""
    code = cli.main([*argv])
    output, errors = capsys.readouterr()
    assert "Traceback" not in output + errors
    return code, output, errors


def table(capsys: Any, *argv: str) -> dict[str, Any]:
    code, output, _ = told(capsys, *argv, "--json")
    assert code == 0
    read: dict[str, Any] = json.loads(output)
    return read


def test_from_recipe_to_page(folder: Path, capsys: Any) -> None:
    code, output, _ = told(capsys, "check", "mine.py:recipe")
    assert code == 0
    assert "can be differentiated" in output
    code, output, _ = told(capsys, "train", "mine.py:recipe")
    assert (code, "6 steps on 10 examples" in output) == (0, True)
    attributed = table(capsys, "attribute", "mine.py:recipe", "--method", "exact")
    assert attributed["sweeps"]["replay"] == 3
    code, output, _ = told(capsys, "report", "mine.py:recipe", "--title", "Seen")
    assert code == 0
    assert "holds training data" in output
    page = folder / "mine-recipe.metasketch" / "report.html"
    assert "<h1>Seen</h1>" in page.read_text()

    # The same as the library's calls give.
    recipe, queries = recipe_file.load("mine.py:recipe")
    Y = ms.attribute(ms.train(recipe), queries, "exact").dense()
    made = ms.Influence.load(attributed["influence"])
    np.testing.assert_allclose(made.dense(), Y, rtol=1e-12)


def test_the_latest_attribution_is_shown_or_the_one_that_is_named(
    folder: Path, capsys: Any
) -> None:
    for method in ("exact", "mage"):
        told(capsys, "attribute", "mine.py:recipe", "--method", method, "--budget", "3")
    os.utime(folder / "mine-recipe.metasketch" / "exact.influence", (1, 1))
    assert "mage.influence" in table(capsys, "report", "mine.py:recipe")["influence"]
    named = table(capsys, "report", "mine.py:recipe", "--method", "exact")
    assert "exact.influence" in named["influence"]
    given = table(capsys, "report", "mine.py:recipe", "--influence", named["influence"])
    assert given["influence"] == named["influence"]


def test_the_doctor_answers_by_its_exit_code(folder: Path, capsys: Any) -> None:
    told(capsys, "attribute", "mine.py:recipe", "--method", "exact")
    page = folder / "mine-recipe.metasketch" / "report.html"
    told(capsys, "report", "mine.py:recipe")
    assert "Not asked" in page.read_text()
    code, output, _ = told(capsys, "doctor", "mine.py:recipe", "--single", "--json")
    found = json.loads(output)
    assert code == (cli.DONE if found["passed"] else cli.NO)
    assert found["passed"] == (found["verdict"]["word"] == "smooth")
    again, output, _ = told(capsys, "doctor", "mine.py:recipe", "--single")
    assert again == code
    assert f"The run is {found['verdict']['word']}" in output
    # The run carries the verdict, and the page shows it.
    told(capsys, "report", "mine.py:recipe")
    assert found["verdict"]["word"].capitalize() in page.read_text()
    assert "Not asked" not in page.read_text()


def test_a_doctor_who_says_no_ends_with_1(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    no = cli.Command("x", (), lambda args: cli.Outcome("rough", {}, fine=False), on_recipe=False)
    monkeypatch.setitem(cli.COMMANDS, "doctor", no)
    assert told(capsys, "doctor") == (cli.NO, "rough\n", "")


def test_advice_and_audits(folder: Path, capsys: Any) -> None:
    told_of = table(capsys, "advise", "mine.py:recipe", "--budget", "1", "--budget", "2")
    assert {option["budget"] for option in told_of["options"]} == {1, 2}
    rehearsed = {option["method"] for option in told_of["options"]}
    assert rehearsed == {*ms.methods()} - {"exact", "sage", "prior"}
    assert told_of["best"]["attribution"]["method"] in ms.methods()
    code, output, _ = told(capsys, "advise", "mine.py:recipe")
    assert code == 0
    assert "Next: metasketch attribute mine.py:recipe --method" in output
    given = ("attribute", "mine.py:recipe", "--method", "mage", "--budget", "2")
    assert table(capsys, *given)["quality"] is None
    assert "not estimated: add --audit 8" in told(capsys, *given)[1]
    quality = table(capsys, *given, "--audit", "4")["quality"]
    assert quality["mean_lds"]["low"] <= quality["mean_lds"]["estimate"]
    page = Path(table(capsys, "report", "mine.py:recipe")["report"]).read_text()
    assert f"LDS {quality['mean_lds']['estimate']:.2f} of that of exact scores" in page


def test_evaluate_judges_every_attribution(folder: Path, capsys: Any) -> None:
    assert "make one with metasketch attribute" in told(capsys, "evaluate", "mine.py:recipe")[2]
    for method in ("exact", "random"):
        told(capsys, "attribute", "mine.py:recipe", "--method", method, "--budget", "2")
    told(capsys, "attribute", "mine.py:recipe", "--method", "exact")
    asked = ("evaluate", "mine.py:recipe", "--fraction", "0.2", "--subsets", "6", "--seed", "3")
    found = table(capsys, *asked)
    assert (found["num_subsets"], found["removed"]) == (6, 2)
    recipe, queries = recipe_file.load("mine.py:recipe")
    run = ms.train(recipe)
    removals = ms.evaluate.removals(run, queries, 0.2, 6, 3)
    for said in found["attributions"]:
        score = ms.evaluate.lds(ms.Influence.load(said["influence"]), removals).mean()
        assert said["lds"]["mean"] == pytest.approx(score)
    assert {said["method"] for said in found["attributions"]} == {"exact", "random"}
    code, output, _ = told(capsys, *asked, "--method", "exact")
    assert code == 0
    assert re.search(r"^exact +3 replay", output, re.MULTILINE)
    assert "random" not in output
    page = Path(table(capsys, "report", "mine.py:recipe", "--method", "exact")["report"])
    assert "measured on 6 retrained models" in page.read_text()


def test_methods_and_json(folder: Path, capsys: Any) -> None:
    assert table(capsys, "methods") == ms.methods()
    code, output, _ = told(capsys, "methods")
    assert code == 0
    assert all(re.search(rf"^{name} ", output, re.MULTILINE) for name in ms.methods())
    code, output, errors = told(capsys, "check", "mine.py:nothing", "--json")
    assert code == cli.MISTAKE
    assert json.loads(output)["error"]["kind"] == "RecipeError"
    assert "returns nothing" in errors


def test_options_of_a_method(folder: Path, capsys: Any) -> None:
    given = ("attribute", "mine.py:recipe", "--method", "random", "--budget", "2", "--option")
    told(capsys, *given, "seed=5")
    recipe, queries = recipe_file.load("mine.py:recipe")
    wanted = ms.attribute(ms.train(recipe), queries, "random", 2, seed=5)
    made = ms.Influence.load(folder / "mine-recipe.metasketch" / "random.influence")
    np.testing.assert_allclose(made.dense(), wanted.dense(), rtol=1e-12)
    assert told(capsys, *given, "seed")[2] == "error: --option seed: write it as NAME=VALUE\n"
    assert "no option 'speed'" in told(capsys, *given, "speed=1")[2]


MISTAKES: dict[str, tuple[str, int, str]] = {
    "no function named": ("mine.py", cli.MISTAKE, "mine.py has alone, another, bad_loss"),
    "a typo in the file": ("mime.py:recipe", cli.MISTAKE, "did you mean mine.py?"),
    "no such folder": ("nowhere/mine.py:recipe", cli.MISTAKE, "no folder nowhere"),
    "a typo in the function": ("mine.py:recpe", cli.MISTAKE, "did you mean 'recipe'?"),
    "no such function": ("mine.py:zzz", cli.MISTAKE, "it has alone, another"),
    "no such module": ("no_such_module:recipe", cli.MISTAKE, "no module 'no_such_module'"),
    "not a function": ("mine.py:constant", cli.MISTAKE, "is a int; it must be a function"),
    "it raises": ("mine.py:fails", cli.MISTAKE, r"ZeroDivisionError.*mine.py, line \d+"),
    "a syntax error": ("broken.py:recipe", cli.MISTAKE, "broken.py, line 1"),
    "a missing package": ("needs.py:recipe", cli.MISTAKE, "ModuleNotFoundError.*needs.py, line 1"),
    "it returns nothing": ("mine.py:nothing", cli.MISTAKE, r"returns nothing; it must return"),
    "it returns a recipe": ("mine.py:alone", cli.MISTAKE, "returns a Recipe; it must return"),
    "in the other order": ("mine.py:swapped", cli.MISTAKE, "turn them round"),
    "shapes in the loss": ("mine.py:shapes", cli.MISTAKE, r"shapes cannot.*problems.py, line \d+"),
    "an error in the measure": ("mine.py:measures", cli.MISTAKE, r"'label'.*mine.py, line \d+"),
    "it diverges": ("mine.py:diverges", cli.NUMBERS, "step"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_told_in_a_sentence(folder: Path, capsys: Any, what: str) -> None:
    name, code, words = MISTAKES[what]
    ended, output, errors = told(capsys, "check", name)
    assert (ended, output) == (code, "")
    assert re.search(words, errors)
    assert errors.startswith("error: ")


def test_mistakes_in_stores_and_files(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    assert "make one with metasketch attribute" in told(capsys, "report", "mine.py:recipe")[2]
    told(capsys, "attribute", "mine.py:recipe", "--method", "exact", "--store", "one")
    code, _, errors = told(capsys, "train", "mine.py:another", "--store", "one")
    assert (code, "holds another run" in errors) == (cli.STORE, True)
    code, _, errors = told(capsys, "report", "mine.py:recipe", "--store", "one", "--method", "pca")
    assert (code, "no attribution by 'pca'" in errors) == (cli.MISTAKE, True)
    code, _, errors = told(capsys, "train", "mine.py:recipe", "--memory", "1KB")
    assert (code, "too small" in errors) == (cli.NUMBERS, True)

    record = folder / "one" / "run" / "run.json"
    write_json(record, {**read_json(record, ""), "version": 99})
    code, _, errors = told(capsys, "train", "mine.py:recipe", "--store", "one")
    assert (code, "version 99" in errors) == (cli.STORE, True)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    code, _, errors = told(capsys, "train", "mine.py:recipe", "--store", "two")
    assert (code, "No space left on device" in errors) == (cli.STORE, True)
    assert "make the same call again" in errors
    monkeypatch.undo()
    os.chdir(folder)
    assert told(capsys, "train", "mine.py:recipe", "--store", "two")[0] == 0


def test_a_mistake_of_ours_says_so(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    broken = cli.Command("x", (), lambda args: {}["gone"], on_recipe=False)
    monkeypatch.setitem(cli.COMMANDS, "methods", broken)
    monkeypatch.setattr(recipe_file, "where", lambda error: "")
    code, _, errors = told(capsys, "methods")
    assert (code, "mistake in metasketch" in errors) == (cli.BUG, True)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_examples_that_parse(name: str, capsys: Any) -> None:
    assert cli.main([name, "--help"]) == 0
    page = capsys.readouterr().out
    examples = re.findall(rf"^  metasketch ({name}.*)$", page, re.MULTILINE)
    assert len(examples) >= 2
    for line in examples:
        assert cli._parser().parse_args(line.split()).command == name
    assert "--json" in page


def test_help_says_the_exit_codes_and_a_wrong_command_ends_with_2(capsys: Any) -> None:
    assert cli.main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(command.does in " ".join(page.split()) for command in cli.COMMANDS.values())
    assert "130 stopped" in page
    assert cli.main(["trian"]) == cli.MISTAKE
    assert cli.main([]) == cli.MISTAKE


def test_the_demonstration_on_a_few_images(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    smaller = {"NUM_EXAMPLES": 300, "NUM_SPOILED": 30, "NUM_QUERIES": 40, "BUDGET": 4}
    smaller |= {"METHODS": ("mage",), "NUM_SUBSETS": 8}
    for name, value in smaller.items():
        monkeypatch.setattr(demo, name, value)
    found = table(capsys, "demo")
    assert set(found["methods"]) == {"mage", "exact"}
    assert found["methods"]["exact"]["lds"]["mean"] > 0.9
    assert found["methods"]["exact"]["relative_error"] == 0
    assert 0 < found["methods"]["mage"]["relative_error"] < 1
    assert found["verdict"]["word"] in ("smooth", "unclear", "rough")
    spoiled = found["spoiled"]
    assert spoiled["found"] > 15  # three would be there by chance
    assert spoiled["true"] < 0
    assert 0.5 < spoiled["predicted"] / spoiled["true"] < 2
    page = Path(found["report"]).read_text()
    assert "measured on 8 retrained models" in page
    assert ", spoiled" in page
    code, output, errors = told(capsys, "demo")  # all of it is in the store
    assert code == 0
    assert f"{spoiled['found']} are among the 30 spoiled" in output
    assert "Next:" in output
    assert "attributing 40 test images by mage" in errors
    # The recipe is one like any other, and its results are where other commands look for them.
    given = table(capsys, "attribute", demo.NAME, "--method", "mage", "--budget", "5")
    assert given["sweeps"]["replay"] == 5


def test_the_docs_name_every_command_and_exit_code() -> None:
    page = (Path(__file__).parent.parent / "docs" / "cli.md").read_text()
    listed = re.findall(r"^\| `metasketch ([a-z]+)", page, re.MULTILINE)
    assert sorted(listed) == sorted(cli.COMMANDS)
    codes = {cli.DONE, cli.NO, cli.MISTAKE, cli.STORE, cli.NUMBERS, cli.BUG, cli.STOPPED}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == codes


def test_ctrl_c_leaves_a_store_and_says_how_to_go_on(folder: Path) -> None:
    slow = folder / "slow"
    slow.touch()
    command = [sys.executable, "-m", "metasketch", "train", "mine.py:slow", "--quiet"]
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    states = folder / "mine-slow.metasketch" / "run" / "states"
    deadline = time.monotonic() + 300
    while not list(states.glob("0*")) or len(list(states.glob("0*"))) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == cli.STOPPED
    assert "Traceback" not in errors
    assert "metasketch train mine.py:slow --quiet" in errors
    assert "kept in mine-slow.metasketch" in errors
    slow.unlink()
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert again.returncode == 0
    assert "60 steps" in again.stdout
