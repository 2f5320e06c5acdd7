"""Attributions on disk: killed and resumed, shared, extended, damaged, and of something else."""

import itertools
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metasketch as ms
from metasketch import files
from metasketch.attribution_store import Block, Folder
from tests import problems

K, N = 12, 20
BUDGET = 8
OPTIONS: dict[str, Any] = {"warmup": 4, "block": 2}
"""Two blocks of two probes, then four single ones that depend on what was measured."""

BLOCKS = [(0, 2), (2, 4), (4, 5), (5, 6), (6, 7), (7, 8)]
DELAY = 0.03
CPU = torch.device("cpu")

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.test_attribution_store"])


def trained(**changes: Any) -> ms.Run:
    recipe = problems.recipe("mlp", "adamw", "plain", **changes)
    recipe = problems.with_options(recipe, data=problems.inputs("mlp", N, seed=1))
    torch.set_num_threads(1)
    return ms.train(recipe, implementation="loop")


def asked(measure: Callable[..., Tensor] = ms.losses.cross_entropy, seed: int = 2) -> ms.Queries:
    return ms.Queries(problems.inputs("mlp", K, seed), measure)


def attribute(run: ms.Run, store: Path | None, budget: int = BUDGET, **options: Any) -> Any:
    method = options.pop("method", "spell")
    options = {**OPTIONS, **options} if method == "spell" else {"block": 2, **options}
    return ms.attribute(run, asked(), method, budget, store, **options)


def logged(patch: Callable[[Any, str, Any], None], log: Path, delay: float = 0.0) -> None:
    """Note every sweep in a file, when it is done; each takes a while."""
    sweep = ms.Run._sweep

    def slow(run: ms.Run, mode: str, rows: int, *others: Any) -> Tensor:
        time.sleep(delay * rows)
        found = sweep(run, mode, rows, *others)
        with log.open("a") as file:
            file.write(f"{mode} {rows}\n")
        return found

    patch(ms.Run, "_sweep", slow)


def swept(log: Path, mode: str = "replay") -> int:
    """Rows swept in a mode so far."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return sum(int(rows) for kind, rows in map(str.split, lines) if kind == mode)


def child(folder: Path, log: Path, ready: Any, delay: float) -> None:
    """What another process does."""
    run = trained()
    logged(setattr, log, delay)
    ready.set()
    attribute(run, folder)


def started(folder: Path, log: Path, delay: float = DELAY) -> Any:
    ready = CONTEXT.Event()
    process = CONTEXT.Process(target=child, args=(folder, log, ready, delay))
    process.start()
    assert ready.wait(120)
    return process


def same(a: ms.Influence, b: ms.Influence) -> bool:
    """Bit for bit."""
    return (
        np.array_equal(a.coefficients, b.coefficients)
        and np.array_equal(a.basis, b.basis)
        and a.sweeps == b.sweeps
        and a.facts == b.facts
    )


@pytest.fixture(scope="module")
def run() -> ms.Run:
    return trained()


@pytest.fixture(scope="module")
def whole(run: ms.Run) -> ms.Influence:
    """The result in one go, without a store."""
    return attribute(run, None)


@pytest.fixture(scope="module")
def finished(run: ms.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a finished attribution, to be read only."""
    folder = tmp_path_factory.mktemp("finished")
    attribute(run, folder)
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A store to be damaged."""
    folder = tmp_path / "copy"
    for path in contents(finished):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes((finished / path).read_bytes())
    return folder


def contents(folder: Path) -> list[Path]:
    """Every file of a store but its locks."""
    found = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return sorted(p for p in found if p.parts[0] != "locks")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the sweeps of this process are noted."""
    path = tmp_path / "log"
    logged(monkeypatch.setattr, path)
    return path


# Killed, and resumed.


def finished_rows(folder: Path, kind: Any) -> int:
    blocks = (Folder(folder).read(Block(kind, i)) for i in range(len(BLOCKS)))
    return sum(len(b.U if kind == "replay" else b.Q) for b in blocks if b is not None)


@pytest.mark.parametrize("seed", range(10))
def test_a_killed_attribution_resumes_to_the_same_bits(
    tmp_path: Path, run: ms.Run, whole: ms.Influence, log: Path, seed: int
) -> None:
    """No sweep whose block was finished is taken again, whenever the kill comes."""
    folder = tmp_path / "store"
    process = started(folder, tmp_path / "killed")
    # The moments are spread over the whole of the work, a little beyond its end.
    moment = (seed + random.Random(seed).random()) / 10 * 2.2 * BUDGET * DELAY
    time.sleep(moment)
    process.kill()
    process.join()
    done = {kind: finished_rows(folder, kind) for kind in ("replay", "forward")}
    print(f"killed after {moment:.3f} s, with {done} rows finished")
    kept = {p: (folder / p).stat().st_ino for p in contents(folder) if p.suffix != ".json"}
    kept = {p: inode for p, inode in kept.items() if not p.name.startswith(".part-")}

    assert same(attribute(run, folder), whole)
    assert swept(log) == BUDGET - done["replay"]
    assert swept(log, "forward") == BUDGET - done["forward"]
    assert {p: (folder / p).stat().st_ino for p in kept} == kept
    assert not list(folder.rglob(".part-*"))


def test_two_processes_share_a_store_and_do_nothing_twice(
    tmp_path: Path, run: ms.Run, whole: ms.Influence, log: Path
) -> None:
    folder, others = tmp_path / "store", [tmp_path / "log1", tmp_path / "log2"]
    processes = [started(folder, other, DELAY) for other in others]
    time.sleep(2 * DELAY)
    found = attribute(run, folder)
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert same(found, whole)
    logs = [log, *others]
    assert sum(map(swept, logs)) == BUDGET
    assert sum(swept(path, "forward") for path in logs) == BUDGET
    assert sum(swept(path) > 0 or swept(path, "forward") > 0 for path in logs) >= 2


def test_work_in_the_hands_of_another_is_waited_for(
    tmp_path: Path, run: ms.Run, whole: ms.Influence, log: Path
) -> None:
    """A process that is killed within a block does not leave its lock behind."""
    folder = tmp_path / "store"
    process = started(folder, tmp_path / "killed", delay=60.0)
    deadline = time.monotonic() + 60
    while not list((folder / "locks").glob("replay-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    with Folder(folder).claim(Block("replay", 0)) as mine:
        assert not mine
    with Folder(folder).claim(Block("replay", 1)) as mine:
        assert mine
    process.kill()
    process.join()
    assert same(attribute(run, folder), whole)


def test_interrupted_again_and_again(
    tmp_path: Path, run: ms.Run, whole: ms.Influence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call gets one sweep further."""
    sweep, calls, interruptions = ms.Run._sweep, itertools.count(), 0
    while interruptions < 100:
        left = iter([True])

        def once(*given: Any, left: Iterator[bool] = left) -> Tensor:
            if not next(left, False):
                raise KeyboardInterrupt
            next(calls)
            return sweep(*given)

        monkeypatch.setattr(ms.Run, "_sweep", once)
        try:
            found = attribute(run, tmp_path)
        except KeyboardInterrupt:
            interruptions += 1
            continue
        break
    assert same(found, whole)
    assert next(calls) == 2 * len(BLOCKS)
    assert interruptions == 2 * len(BLOCKS) - 1


def test_a_finished_attribution_is_read(
    finished: Path, run: ms.Run, whole: ms.Influence, log: Path
) -> None:
    assert same(attribute(run, finished), whole)
    assert not log.exists()


# More of it, or less.


@pytest.mark.parametrize("method", ["mage", "random", "first", "pca", "spell"])
def test_a_larger_budget_extends(tmp_path: Path, run: ms.Run, log: Path, method: str) -> None:
    few = attribute(run, tmp_path / "store", 3, method=method)
    many = attribute(run, tmp_path / "store", 7, method=method)
    assert swept(log) == 7
    afresh = attribute(run, None, 7, method=method)
    np.testing.assert_allclose(many.dense(), afresh.dense(), atol=1e-12)
    assert same(attribute(run, tmp_path / "store", 3, method=method), few)
    assert same(attribute(run, tmp_path / "store", 7, method=method), many)
    assert swept(log) == 7 + 7  # the second seven are those of the one without a store


def test_an_extended_spell_keeps_its_warm_up_and_says_so(tmp_path: Path, run: ms.Run) -> None:
    queries = ms.Queries(problems.inputs("mlp", 111, seed=2), ms.losses.cross_entropy)
    ms.attribute(run, queries, "spell", 11, tmp_path)
    with pytest.warns(
        ms.MetasketchWarning, match="keeps its warm-up of 10 probes.* 110 would .*11"
    ):
        found = ms.attribute(run, queries, "spell", 110, tmp_path)
    assert any("warm-up of 10" in note for note in found.notes)
    assert json.loads((tmp_path / "attribution.json").read_text())["fixed"] == 10


# Of something else.


def margin(model: nn.Module, batch: Any) -> Tensor:
    return -ms.losses.cross_entropy(model, batch)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "queries": ({"queries": asked(seed=3)}, "query data"),
    "measure": ({"queries": asked(margin)}, r"measure \('?cross_entropy.* margin"),
    "fewer queries": (
        {"queries": ms.Queries(problems.inputs("mlp", 9, 2), ms.losses.cross_entropy)},
        r"queries \(12 in the store, 9 here\)",
    ),
    "method": ({"method": "mage"}, r"method \('?spell'? in the store, '?mage"),
    "option": ({"floor": 0.3}, r"option floor \(0.1 in the store, 0.3 here\)"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_attribution_is_refused_by_name(finished: Path, run: ms.Run, what: str) -> None:
    changes, words = OTHERS[what]
    given: dict[str, Any] = {"queries": asked(), "method": "spell", **changes}
    if given["method"] == "spell":
        given = {"warmup": 4, **given}
    queries, method = given.pop("queries"), given.pop("method")
    before = {p: (finished / p).read_bytes() for p in contents(finished)}
    with pytest.raises(ms.StoreError, match=f"holds another attribution; it differs in: .*{words}"):
        ms.attribute(run, queries, method, BUDGET, finished, **given)
    assert {p: (finished / p).read_bytes() for p in contents(finished)} == before


RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 4}, r"seed \(3 in the store, 4 here\)"),
    "clipping": ({"clip_norm": 0.5}, "clip_norm"),
    "schedule": ({"schedule": ms.constant()}, "schedule"),
}


@pytest.mark.parametrize("what", RUNS)
def test_another_run_is_refused_by_name(finished: Path, what: str) -> None:
    changes, words = RUNS[what]
    with pytest.raises(ms.StoreError, match=f"holds another attribution; .*{words}"):
        attribute(trained(**changes), finished)


def test_other_weights_are_refused(finished: Path, run: ms.Run) -> None:
    other = ms.train(run.recipe, weights=problems.random_weights(N), implementation="loop")
    with pytest.raises(ms.StoreError, match="differs in: weights"):
        attribute(other, finished)


def test_queries_of_another_model_are_refused(run: ms.Run) -> None:
    """Inputs that do not fit the trained model."""
    queries = ms.Queries(problems.inputs("cnn", K, 2), ms.losses.cross_entropy)
    with pytest.raises(ms.MetasketchError, match="measure.* failed on queries 0 to 11"):
        ms.attribute(run, queries, "spell", 3)


# A machine that rounds differently.


def elsewhere(run: ms.Run) -> ms.Run:
    """The same run where sums are rounded differently: its final state differs in the last bits."""
    other = trained()
    params = other.final.params
    params.copy_(torch.nextafter(params, params.new_tensor(9.0)))
    return other


def test_another_machine_reads_what_is_finished_and_goes_on_only_when_asked(
    tmp_path: Path, run: ms.Run, log: Path
) -> None:
    here = attribute(run, tmp_path / "s", 5)
    there = elsewhere(run)
    with pytest.warns(ms.MetasketchWarning, match="a machine that rounds differently from this"):
        read = attribute(there, tmp_path / "s", 5)
    np.testing.assert_array_equal(read.dense(), here.dense())
    assert swept(log) == 5
    with pytest.raises(ms.MismatchError, match=r'pass on_mismatch="tolerate"'):
        attribute(there, tmp_path / "s", 6)
    assert swept(log) == 5
    with pytest.warns(ms.MetasketchWarning, match=r"measured again differed by \d.\de-\d+ of its"):
        more = attribute(there, tmp_path / "s", 6, on_mismatch="tolerate")
    assert swept(log) == 7  # one to compare
    np.testing.assert_allclose(more.dense(), attribute(run, None, 6).dense(), atol=1e-10)
    with pytest.warns(ms.MetasketchWarning, match="of its size"):
        attribute(there, tmp_path / "s", 7, on_mismatch="tolerate")
    assert swept(log) == 7 + 6 + 1  # compared once


# Damage.


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    """One bit of the last number."""
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


TENSORS = [
    "gram.safetensors",
    *(f"{k}/{i:06d}.safetensors" for k in ("forward", "replay") for i in range(6)),
]


def test_the_files_of_a_store(finished: Path) -> None:
    assert sorted(map(str, contents(finished))) == sorted(["attribution.json", *TENSORS])


@pytest.mark.parametrize("damage", [truncate, empty, flip])
@pytest.mark.parametrize(
    "name", ["gram.safetensors", "replay/000001.safetensors", "forward/000003.safetensors"]
)
def test_a_damaged_block_is_named_and_made_again(
    copy: Path, run: ms.Run, whole: ms.Influence, log: Path, name: str, damage: Any
) -> None:
    tensors, notes = files.read_tensors(copy / name, CPU, "")
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}  # not the file's own pages
    damage(copy / name)
    with pytest.warns(ms.MetasketchWarning, match=f"{name} is damaged.*made again"):
        assert same(attribute(run, copy), whole)
    again, its_notes = files.read_tensors(copy / name, CPU, "")
    assert all(torch.equal(tensors[key], again[key]) for key in {*tensors, *again})
    assert notes == its_notes
    rows = {"gram": 0, "replay": 2, "forward": 1}[name.replace("/", ".").split(".")[0]]
    assert swept(log) + swept(log, "forward") == rows


@pytest.mark.parametrize("name", ["replay/000005.safetensors", "forward/000000.safetensors"])
def test_a_missing_block_is_made_again(
    copy: Path, run: ms.Run, whole: ms.Influence, name: str
) -> None:
    remove(copy / name)
    assert same(attribute(run, copy), whole)


def half(path: Path) -> None:
    path.write_text(path.read_text()[:40])


def edited(path: Path) -> None:
    path.write_text(path.read_text().replace('"fixed": 4', '"fixed": 3'))


def of_the_future(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(files.sealed({**content, "version": 99})))


def of_another_kind(path: Path) -> None:
    path.write_text('{"format": "shopping list"}')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (half, "attribution.json is damaged.*delete the store"),
        (empty, "attribution.json is damaged"),
        (edited, "is damaged .its contents do not have the checksum"),
        (of_the_future, "version 99 of the format; this metasketch reads version 1"),
        (of_another_kind, "is not the record of an attribution"),
    ],
)
def test_a_damaged_record_is_refused(copy: Path, run: ms.Run, damage: Any, words: str) -> None:
    damage(copy / "attribution.json")
    before = {p: (copy / p).read_bytes() for p in contents(copy)}
    with pytest.raises(ms.StoreError, match=words):
        attribute(run, copy)
    assert {p: (copy / p).read_bytes() for p in contents(copy)} == before


def test_a_full_disk_loses_nothing(
    tmp_path: Path, run: ms.Run, whole: ms.Influence, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = itertools.count()
    replace = files.os.replace

    def full(*paths: Any) -> None:
        if next(written) == 6:
            raise OSError(28, "No space left on device")
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", full)
        with pytest.raises(ms.StoreError, match="No space left on device.*make the same call"):
            attribute(run, tmp_path / "s")
    done = finished_rows(tmp_path / "s", "replay")
    before = swept(log)
    assert same(attribute(run, tmp_path / "s"), whole)
    assert swept(log) - before == BUDGET - done
    assert done > 0


def test_what_a_kill_left_of_a_record_is_removed(tmp_path: Path) -> None:
    ledger = Folder(tmp_path)
    ledger.write_record({"rounds": []})
    left = tmp_path / ".part-1-2-attribution.json"
    left.write_text("half")
    with ledger.alone():
        assert not left.exists()
    assert ledger.record() is not None
