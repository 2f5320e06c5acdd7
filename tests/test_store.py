"""Runs on disk: killed and resumed, verified, damaged in every way that one can think of."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metasketch as ms
from metasketch import files as files_module
from metasketch.files import read_tensors, write_json
from metasketch.store import RunStore
from tests import problems

F64 = torch.float64
ROOT = Path(__file__).parent.parent
STEPS = 20
DISK = 5


class StopHereError(Exception):
    """What interrupts a training here."""


def described(
    steps: list[int] | None = None, stop: int | None = None, delay: float = 0.0, **changes: Any
) -> ms.Recipe:
    """A run whose loss notes the steps that it is called at, and stops at one of them."""

    def loss(model: nn.Module, batch: Any, step: int) -> Tensor:
        if step == stop:
            raise StopHereError
        if steps is not None:
            steps.append(step)
        time.sleep(delay)
        return ms.losses.cross_entropy(model, batch)

    options = {"loss": loss, "batch_size": 5, "epochs": STEPS // 2, **changes}
    return problems.recipe("cnn", "adamw", "dropout", **options)


def train(recipe: ms.Recipe, **options: Any) -> ms.Run:
    return ms.train(recipe, implementation="loop", **{"disk": f"{_bytes()} B", **options})


def _bytes() -> int:
    """A disk budget of five states."""
    return DISK * ms.train(described(epochs=1), implementation="loop").final.nbytes


def same(a: ms.Run, b: ms.Run) -> bool:
    """Bit for bit: the final state, every digest, a replayed row and a tangent."""
    bar = {n: torch.ones(1, *v.shape, dtype=F64) for n, v in a.state_dict().items()}
    w_dot = torch.linspace(-1, 1, a.num_examples, dtype=F64)[None]
    dots, others = a.forward(w_dot), b.forward(w_dot)
    return (
        a.trajectory.digests == b.trajectory.digests
        and len(a.trajectory.digests) == STEPS + 1
        and torch.equal(a.final.params, b.final.params)
        and torch.equal(a.final.stats, b.final.stats)
        and a.final.counts == b.final.counts
        and torch.equal(a.replay(bar), b.replay(bar))
        and all(torch.equal(dots[name], others[name]) for name in dots)
    )


@pytest.fixture(scope="module")
def whole() -> ms.Run:
    """The run trained in one go, without a store."""
    return ms.train(described(), implementation="loop")


def files(folder: Path) -> list[Path]:
    """Every file of a store but its lock."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "lock")


# Killed, and resumed.


def child(folder: str) -> None:
    """What the killed process does: a slow training that says when each step begins."""
    torch.set_num_threads(1)

    class Print(list):  # type: ignore[type-arg]
        def append(self, step: int) -> None:
            print(step, flush=True)

    train(described(Print(), delay=0.02), store=folder, memory="2 states")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_killed_training_resumes_to_the_same_bits(
    tmp_path: Path, whole: ms.Run, seed: int
) -> None:
    moment = random.Random(seed).uniform(0.0, 0.02 * STEPS)
    print(f"seed {seed}: killed {moment:.3f} s after the first step")
    code = f"from tests.test_store import child; child({str(tmp_path)!r})"
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:  # the first step 0 is the probe's, and `_bytes` is not logged
        if line.strip() == "1":
            break
    with pytest.raises(ms.StoreError, match="another process is writing the store"):
        train(described(), store=tmp_path, memory="2 states")
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "final.safetensors").exists() or process.returncode == 0

    stored = RunStore(tmp_path).stored_states()
    steps: list[int] = []
    run = train(described(steps), store=tmp_path, memory="2 states")
    if process.returncode != 0:
        # The first step again, to compare, then nothing before the last state on disk.
        assert steps[-(STEPS - stored[-1]) :] == list(range(stored[-1], STEPS))
        assert set(steps[: -(STEPS - stored[-1])]) <= {0}
    assert same(run, whole)
    assert not list(tmp_path.rglob(".part-*"))


@pytest.mark.parametrize("memory", ["2 states", "6 states", "50 states"])
def test_interrupted_again_and_again(tmp_path: Path, whole: ms.Run, memory: str) -> None:
    stops = [1, 3, 4, 4, 9, 17, 19]
    for stop in stops:
        with pytest.raises(StopHereError):
            train(described(stop=stop), store=tmp_path, memory=memory)
        assert not (tmp_path / "final.safetensors").exists()
    with pytest.raises(ms.StoreError, match=r"not finished: call train\(recipe, store="):
        ms.load_run(described(), tmp_path)
    steps: list[int] = []
    run = train(described(steps), store=tmp_path, memory=memory)
    last = 14 if memory == "6 states" else 16  # kept states are spaced over memory and disk
    assert RunStore(tmp_path).stored_states()[-1] == last
    assert [step for step in steps if step] == list(range(last, STEPS))
    assert same(run, whole)


def test_a_finished_run_is_returned_without_training(tmp_path: Path, whole: ms.Run) -> None:
    train(described(), store=tmp_path)
    steps: list[int] = []
    again = train(described(steps), store=tmp_path)
    assert set(steps) == {0}  # the first step, taken again and compared
    assert len(steps) == 1
    assert same(again, whole)


@pytest.mark.parametrize("memory", ["2 states", "7 states", "50 states", "4GiB"])
@pytest.mark.parametrize("trained_with", ["2 states", "4GiB"])
def test_a_loaded_run_sweeps_to_the_same_bits(
    tmp_path: Path, whole: ms.Run, memory: str, trained_with: str
) -> None:
    assert same(train(described(), store=tmp_path, memory=trained_with), whole)
    run = ms.load_run(described(), tmp_path, memory=memory)
    run.implementation = "loop"
    assert (len(run.plan.on_disk) == DISK) == (memory in ("2 states", "7 states"))
    assert same(run, whole)
    assert same(run, whole)  # also a second time


def test_data_made_by_code_is_verified_across_processes(tmp_path: Path) -> None:
    scale = [1.0]

    def augment(batch: Any, generator: torch.Generator) -> Any:
        return batch[0] * scale[0], batch[1]

    train(described(augment=augment), store=tmp_path)
    scale[0] = 2.0
    with pytest.raises(ms.MismatchError, match="the batch of step 0 is not what training saw"):
        ms.load_run(described(augment=augment), tmp_path)


# Another recipe.


def shifted() -> tuple[Tensor, Tensor]:
    x, y = problems.inputs("cnn", problems.NUM_EXAMPLES, seed=1)
    x[3, 0, 0, 0] += 1e-9
    return x, y


def other_start() -> nn.Module:
    model = described().model
    with torch.no_grad():
        model.leave.bias[1] += 1e-12
    return model


def other_statistics() -> nn.Module:
    model = described().model
    model.norm1.running_mean[0] += 1e-9
    return model


def frozen() -> nn.Module:
    model = described().model
    model.leave.bias.requires_grad_(False)
    return model


OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "data": (lambda: {"data": shifted()}, "data"),
    "seed": (lambda: {"seed": 4}, r"order; seed \(3 in the store, 4 here\)"),
    "rate": (lambda: {"optimizer": ms.SGD(lr=0.125)}, r"optimizer \(AdamW\(.*lr=0.125"),
    "epochs": (lambda: {"epochs": 9}, r"steps \(20 in the store, 18 here\)"),
    "order": (lambda: {"batch_size": 4, "epochs": 7}, "order"),
    "schedule": (lambda: {"schedule": ms.constant()}, "schedule"),
    "clipping": (lambda: {"clip_norm": 0.5}, r"clip_norm \(None in the store, 0.5 here\)"),
    "microbatch": (lambda: {"microbatch": 5}, r"microbatch \(None in the store, 5 here\)"),
    "augment": (lambda: {"augment": problems.augment}, r"augment \(False .* True here\)"),
    "form": (lambda: {"loss": problems.weighted_loss}, r"loss form \(examples, .* scalar"),
    "start": (lambda: {"model": other_start()}, "parameters"),
    "statistics": (lambda: {"model": other_statistics()}, "statistics"),
    "frozen": (lambda: {"model": frozen()}, "frozen parameters; .*parameter names"),
    "precision": (
        lambda: {"model": described().model.float()},
        r"dtype \(torch.float64 in the store, torch.float32 here\)",
    ),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a finished run, to be read only."""
    folder = tmp_path_factory.mktemp("finished")
    train(described(), store=folder)
    return folder


@pytest.mark.parametrize("what", OTHERS)
def test_another_recipe_is_refused_by_name(finished: Path, what: str) -> None:
    changes, words = OTHERS[what]
    other = problems.with_options(described(), **changes())
    for call in (ms.load_run, lambda recipe, store: ms.train(recipe, store=store)):
        with pytest.raises(ms.StoreError, match=f"holds another run; it differs in: .*{words}"):
            call(other, finished)


def test_other_weights_are_refused(finished: Path) -> None:
    with pytest.raises(ms.StoreError, match="differs in: weights"):
        ms.load_run(described(), finished, weights=problems.random_weights())


def test_another_recipe_is_refused_by_an_unfinished_store(tmp_path: Path) -> None:
    with pytest.raises(StopHereError):
        train(described(stop=9), store=tmp_path)
    before = {p: p.read_bytes() for p in files(tmp_path)}
    with pytest.raises(ms.StoreError, match="holds another run; it differs in: .*seed"):
        train(described(seed=99), store=tmp_path)
    assert {p: p.read_bytes() for p in files(tmp_path)} == before


def doubled(model: nn.Module, batch: Any, step: int) -> Tensor:
    return 2 * ms.losses.cross_entropy(model, batch) + 0.1 * model(batch[0]).square().sum(1)


def test_another_loss_is_refused(finished: Path) -> None:
    with pytest.raises(ms.MismatchError, match="first step .* the loss function"):
        ms.load_run(described(loss=doubled), finished)


def test_another_loss_is_refused_by_an_unfinished_store(tmp_path: Path) -> None:
    with pytest.raises(StopHereError):
        train(described(stop=9), store=tmp_path)
    with pytest.raises(ms.MismatchError, match="first step .* the loss function"):
        train(described(loss=doubled), store=tmp_path)


def test_a_training_goes_on_as_it_began(tmp_path: Path) -> None:
    """With the recorded number of threads and implementation, and what the disk holds already."""
    with pytest.raises(StopHereError):
        train(described(stop=9), store=tmp_path, memory="2 states")
    store = RunStore(tmp_path)
    record, states = store.read_record(), store.stored_states()
    assert record["choices"]["implementation"] == "loop"
    store.write_record({**record, "choices": {**record["choices"], "num_threads": 2}})
    before = {p: p.read_bytes() for p in files(tmp_path / "states")}
    run = ms.train(described(), store=tmp_path, memory="2 states", disk="1GiB")
    assert (run.num_threads, run.implementation) == (2, "loop")
    assert torch.get_num_threads() == 1
    assert states == [0, 4, 8]
    assert store.stored_states() == [0, 4, 8, 12, 16]
    assert {p: p.read_bytes() for p in before} == before
    assert ms.train(described(), store=tmp_path, implementation="tuned").implementation == "tuned"
    assert ms.load_run(described(), tmp_path).implementation == "loop"


# Damage.


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A store to be damaged."""
    folder = tmp_path / "copy"
    for path in files(finished):
        target = folder / path.relative_to(finished)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return folder


NAMES = ["run.json", "final.safetensors", *(f"states/{t:09d}.safetensors" for t in range(0, 20, 4))]


def refused(folder: Path, name: str, words: str) -> None:
    """Both calls refuse the store and name the file; neither changes anything."""
    before = {p: p.read_bytes() for p in files(folder)}
    with pytest.raises(ms.StoreError, match=words) as caught:
        ms.load_run(described(), folder)
    assert str(folder / name) in str(caught.value)
    assert {p: p.read_bytes() for p in files(folder)} == before


def test_the_names_of_a_store(copy: Path) -> None:
    assert [str(p.relative_to(copy)) for p in files(copy)] == sorted(NAMES)
    assert ms.load_run(described(), copy).num_steps == STEPS


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_found(copy: Path, name: str) -> None:
    path, rng = copy / name, random.Random(name)
    whole = path.read_bytes()
    places = {0, 9, len(whole) - 2, *(rng.randrange(len(whole)) for _ in range(25))}
    for at in sorted(places):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(flipped))
        try:
            if name == "run.json" and json.loads(flipped) == json.loads(whole):
                continue  # white space
        except ValueError:
            pass
        refused(copy, name, "damaged|not the record of a run|in version")


@pytest.mark.parametrize("left", [0.0, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_file_is_found(copy: Path, name: str, left: float) -> None:
    path = copy / name
    path.write_bytes(path.read_bytes()[: int(left * path.stat().st_size)])
    refused(copy, name, "damaged .*delete the store and train again")


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    if name == "final.safetensors":
        with pytest.raises(ms.StoreError, match="not finished"):
            ms.load_run(described(), copy)
    else:
        refused(copy, name, "missing from the store|no run was stored there")


def test_another_version_is_refused(copy: Path) -> None:
    record = json.loads((copy / "run.json").read_text())
    write_json(copy / "run.json", {**record, "version": 99})
    refused(copy, "run.json", "in version 99 .* reads version 1")
    write_json(copy / "run.json", {**record, "format": "something"})
    refused(copy, "run.json", "not the record of a run")
    write_json(copy / "run.json", {})
    refused(copy, "run.json", "not the record of a run")
    (copy / "run.json").write_text("[1]")
    refused(copy, "run.json", "damaged .not a table")


def test_files_that_changed_places_are_found(copy: Path) -> None:
    a, b = (copy / name for name in NAMES[3:5])
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other)
    b.write_bytes(one)
    with pytest.raises((ms.StoreError, ms.MismatchError)):
        run = ms.load_run(described(), copy, memory="2 states")
        run.replay({n: torch.ones(1, *v.shape, dtype=F64) for n, v in run.state_dict().items()})


def test_no_store_at_all(tmp_path: Path) -> None:
    with pytest.raises(ms.StoreError, match="nowhere.run.json does not exist: no run was stored"):
        ms.load_run(described(), tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ms.StoreError, match="file cannot be written"):
        train(described(), store=tmp_path / "file")


# A full disk.


class Disk:
    """Makes the n-th call of a function of os fail, as a full disk does."""

    def __init__(self, function: Callable[..., Any], fail_at: int) -> None:
        self.function, self.fail_at, self.calls = function, fail_at, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.function(*args)


@pytest.mark.parametrize("fail_at", [1, 2, 4, 7])
@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, whole: ms.Run, monkeypatch: pytest.MonkeyPatch, name: str, fail_at: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files_module.os, name, Disk(getattr(os, name), fail_at))
        with pytest.raises(ms.StoreError, match="No space left.*make room.*same call again"):
            train(described(), store=tmp_path, memory="2 states")
    found = files(tmp_path)
    assert len(found) == fail_at - 1
    for path in found:
        if path.suffix == ".safetensors":
            read_tensors(path, torch.device("cpu"), "mend it")
    assert same(train(described(), store=tmp_path, memory="2 states"), whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 KiB, about three states of this run."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=32k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk: Path, whole: ms.Run) -> None:
    folder = small_disk / "run"
    with pytest.raises(ms.StoreError, match="No space left"):
        train(described(), store=folder, memory="2 states")
    stored = RunStore(folder).stored_states()
    assert 0 < len(stored) < DISK
    assert not list(folder.rglob(".part-*"))
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    steps: list[int] = []
    run = train(described(steps), store=folder, memory="2 states")
    assert min(step for step in steps if step) >= stored[-1]
    assert same(run, whole)


def test_a_store_that_cannot_be_written_still_sweeps(
    finished: Path, whole: ms.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noting which implementation is fastest is not worth a failed sweep."""

    def fail(*args: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    run = ms.load_run(described(), finished)
    monkeypatch.setattr(files_module.os, "fsync", fail)
    bar = {n: torch.ones(1, *v.shape, dtype=F64) for n, v in whole.state_dict().items()}
    assert problems.relative(run.replay(bar), whole.replay(bar)) < 1e-10


# What a store is made of.


def test_nothing_in_a_store_is_a_pickle(finished: Path) -> None:
    for path in files(finished):
        content = path.read_bytes()
        if path.name == "run.json":
            assert isinstance(json.loads(content), dict)
            continue
        length = int.from_bytes(content[:8], "little")  # the safetensors format
        header = json.loads(content[8 : 8 + length])
        end = max(v["data_offsets"][1] for k, v in header.items() if k != "__metadata__")
        assert 8 + length + end == len(content)


def test_others_may_read_a_store_as_far_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        train(described(epochs=1), store=tmp_path, disk=None)
    finally:
        os.umask(before)
    assert {oct(p.stat().st_mode & 0o777) for p in files(tmp_path)} == {"0o644"}


@pytest.mark.parametrize("name", ["a b", "θ̄-räpläy", "100%#?&", "-n", 'it\'s "so"', "line\nbreak"])
def test_folders_of_any_name(tmp_path: Path, whole: ms.Run, name: str) -> None:
    train(described(), store=str(tmp_path / name))
    assert torch.equal(ms.load_run(described(), tmp_path / name).final.params, whole.final.params)


def test_a_relative_folder_stays_where_it_was(
    tmp_path: Path, whole: ms.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = train(described(), store="here", memory="2 states")
    monkeypatch.chdir("/")
    assert same(run, whole)
