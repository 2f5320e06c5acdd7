"""`ms.from_trainer` against ``trainer.train()``: the same training, or a refusal by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import metasketch as ms
from tests import hugging_face as hf

pytestmark = [
    # transformers to itself, where peft looks at a property of a model
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    # torch to accelerate, on a machine without a GPU
    pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning"),
]


def gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """‖ours - theirs‖ / ‖theirs‖ over all parameters."""
    assert set(ours) == set(theirs)
    a, b = (torch.cat([x[n].double().flatten() for n in theirs]) for x in (ours, theirs))
    return float((a - b).norm() / b.norm())


def check(
    model: nn.Module, data: Any, folder: Path, tolerance: float = 1e-6, **options: Any
) -> ms.Recipe:
    """Train both ways, starting with the recipe, and compare the final weights."""
    torch.manual_seed(3)
    trainer = hf.trainer(model, data, folder, **options)
    start, generator = hf.weights_of(trainer.model), torch.get_rng_state()
    recipe = ms.from_trainer(trainer)
    ours = ms.train(recipe).state_dict()
    assert torch.equal(torch.get_rng_state(), generator)
    unchanged = hf.weights_of(trainer.model)
    assert all(torch.equal(start[name], unchanged[name]) for name in start)
    trainer.train()
    theirs = hf.weights_of(trainer.model)
    assert gap(ours, theirs) < tolerance
    assert gap(start, theirs) > 1e3 * tolerance  # it did train
    assert recipe.num_steps == trainer.state.global_step
    return recipe


LANGUAGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": hf.gpt2,
    "llama": hf.llama,
    "gpt2-lora": lambda: hf.with_lora(hf.gpt2()),
    "llama-lora": lambda: hf.with_lora(hf.llama()),
    "gpt2-dropout": lambda: hf.gpt2(dropout=0.1),
    "llama-lora-dropout": lambda: hf.with_lora(hf.llama(), lora_dropout=0.1),
}


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models_end_in_the_trainers_weights(name: str, tmp_path: Path) -> None:
    """Clipping at 1.0, no-decay groups, warm-up and cosine, two microbatches a step, of which an
    epoch's last is short; padded texts of which only the completion counts."""
    torch.manual_seed(0)
    recipe = check(LANGUAGE_MODELS[name](), hf.texts(), tmp_path)
    assert recipe.clip_norm == 1.0
    assert [len(b) for b in recipe.order.batches] == [4, 4, 3] * 3
    assert (recipe.loss.generators is not None) == ("dropout" in name)
    if "lora" not in name:
        decays = {group.overrides["weight_decay"] for group in recipe.optimizer.groups}
        assert (recipe.optimizer.weight_decay, decays) == (0.1, {0.0})


def test_lora_over_a_base_in_bfloat16(tmp_path: Path) -> None:
    """Exact as ever with the attention that both compute alike; torch's fused one rounds otherwise
    in bfloat16, and has no second derivative."""
    torch.manual_seed(0)
    base = hf.llama(attn_implementation="eager").to(torch.bfloat16)
    recipe = check(hf.with_lora(base), hf.texts(), tmp_path)
    assert {p.dtype for p in recipe.model.parameters()} == {torch.bfloat16, torch.float32}


def test_in_float64_the_two_differ_by_the_trainers_own_rounding(tmp_path: Path) -> None:
    """A Trainer takes its loss in float32 even then; at a rate of 0.01 weights move by 15 %."""
    torch.manual_seed(0)
    check(hf.llama().double(), hf.texts(), tmp_path, 1e-6, learning_rate=1e-2)


SETTINGS: dict[str, dict[str, Any]] = {
    "max-steps": {"max_steps": 5},
    "half-an-epoch": {"num_train_epochs": 1.5},
    "by-length": {"train_sampling_strategy": "group_by_length"},
    "in-order": {"train_sampling_strategy": "sequential"},
    "another-seed": {"seed": 7, "data_seed": 11},
    "drop-last": {"dataloader_drop_last": True},
    "no-clipping": {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1},
    "tight-clipping": {"max_grad_norm": 0.05, "gradient_accumulation_steps": 4},
    "sgd": {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "linear"},
    "not-seedable": {"accelerator_config": {"use_seedable_sampler": False}},
    "bigger-than-the-data": {"per_device_train_batch_size": 8, "num_train_epochs": 4},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_trainer(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    check(hf.llama(), hf.texts(), tmp_path, **SETTINGS[name])


def test_dropout_moves_the_order_where_the_sampler_draws_too(tmp_path: Path) -> None:
    """Then an epoch's order depends on what the model drew in the epochs before it."""
    torch.manual_seed(0)
    options = {"accelerator_config": {"use_seedable_sampler": False}}
    check(hf.gpt2(dropout=0.2), hf.texts(), tmp_path, **options)


def test_the_users_own_optimiser_and_scheduler(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hf.llama()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    check(model, hf.texts(), tmp_path, optimizers=(optimizer, scheduler))


def test_the_users_own_optimiser_under_the_trainers_schedule(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hf.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    check(model, hf.texts(), tmp_path, optimizers=(optimizer, None))


CLASSIFIERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "llama": (hf.llama_classifier, hf.labelled_texts),
    "bert": (hf.bert_classifier, hf.labelled_texts),
    "bert-numbers": (
        lambda: hf.bert_classifier(problem_type="regression", num_labels=1),
        lambda: hf.labelled_texts(kind="number"),
    ),
    "bert-several-labels": (
        lambda: hf.bert_classifier(problem_type="multi_label_classification"),
        lambda: hf.labelled_texts(kind="several"),
    ),
    "bert-tokens": (hf.bert_tagger, lambda: hf.labelled_texts(kind="tokens")),
    "vit": (hf.vit, hf.images),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_end_in_the_trainers_weights(name: str, tmp_path: Path) -> None:
    model, data = CLASSIFIERS[name]
    torch.manual_seed(0)
    check(model(), data(), tmp_path)


def test_a_data_set_of_datasets_with_further_columns(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [{**item, "source": f"text {i}"} for i, item in enumerate(hf.texts())]
    torch.manual_seed(0)
    recipe = check(hf.llama(), Dataset.from_list(rows), tmp_path)
    assert "source" not in recipe.data.column_names


def test_rows_of_a_trainers_run_equal_the_whole_graph(tmp_path: Path) -> None:
    from metasketch import reference

    torch.manual_seed(0)
    model = hf.in_float64(hf.with_lora(hf.llama()))
    trainer = hf.trainer(model, hf.texts(), tmp_path, learning_rate=1e-2, adam_epsilon=1e-3)
    recipe = ms.from_trainer(trainer)
    run = ms.train(recipe, implementation="loop")
    queries = ms.Queries(hf.texts(3), ms.measures.hf_completion_nll, collate=hf.padded)
    bar = queries.gradients(run)
    rows, expected = run.replay(bar), reference.replay(recipe, bar)
    assert float((rows - expected).norm() / expected.norm()) < 1e-10


def test_seeded_dropout_is_another_sequence(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer = hf.trainer(hf.gpt2(dropout=0.2), hf.texts(), tmp_path, eval_strategy="no")
    replayed, seeded = (ms.from_trainer(trainer, dropout=kind) for kind in ("replay", "seeded"))
    assert seeded.loss.generators is None
    weights = [ms.train(recipe).state_dict() for recipe in (replayed, seeded, seeded)]
    assert gap(weights[1], weights[2]) == 0.0
    assert gap(weights[0], weights[1]) > 1e-4


class OwnLoss(transformers.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class OwnStep(transformers.Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class Watcher(transformers.TrainerCallback):
    """A user's callback, which may do anything."""


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(hf.texts())

    def __getitem__(self, index: int) -> Any:
        return hf.texts()[index]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bf16": ({"bf16": True}, "bf16=True: autocast"),
    "checkpointing": ({"activation_checkpointing": True}, "activation_checkpointing=True"),
    "neftune": ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    "smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
    "rebalance": ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
    "batch-size": ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    "resume": ({"resume_from_checkpoint": "here"}, "resume_from_checkpoint='here'"),
    "loss": ({"kind": OwnLoss}, "OwnLoss has a compute_loss of its own"),
    "step": ({"kind": OwnStep}, "OwnStep has a training_step of its own"),
    "loss-function": ({"compute_loss_func": lambda *a, **k: None}, "compute_loss_func"),
    "callback": ({"callbacks": [Watcher()]}, "the callback Watcher may change"),
    "early-stopping": (
        {"callbacks": [transformers.EarlyStoppingCallback()]},
        "the callback EarlyStoppingCallback",
    ),
    "adafactor": ({"optim": "adafactor"}, "Adafactor; of torch's optimisers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_refused_by_name(name: str, tmp_path: Path) -> None:
    options, words = REFUSED[name]
    trainer = hf.trainer(hf.llama(), hf.texts(), tmp_path, **options)
    with pytest.raises(ms.MetasketchError, match=words):
        ms.from_trainer(trainer)


def test_a_schedule_that_waits_for_losses_is_refused(tmp_path: Path) -> None:
    model = hf.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    trainer = hf.trainer(model, hf.texts(), tmp_path, optimizers=given)
    with pytest.raises(ms.ArgumentError, match="not known before training"):
        ms.from_trainer(trainer)


def test_all_reasons_are_told_at_once(tmp_path: Path) -> None:
    trainer = hf.trainer(hf.llama(), hf.texts(), tmp_path, kind=OwnLoss, neftune_noise_alpha=5.0)
    with pytest.raises(ms.RecipeError, match="(?s)neftune_noise_alpha.*OwnLoss"):
        ms.from_trainer(trainer)


def test_a_stream_of_examples_is_refused(tmp_path: Path) -> None:
    trainer = hf.trainer(hf.llama(), Stream(), tmp_path, max_steps=3)
    with pytest.raises(ms.RecipeError, match="a Stream, whose examples have no numbers"):
        ms.from_trainer(trainer)


def test_a_trainer_that_has_trained_is_refused(tmp_path: Path) -> None:
    trainer = hf.trainer(hf.llama(), hf.texts(), tmp_path, max_steps=1)
    trainer.train()
    with pytest.raises(ms.RecipeError, match="has trained already"):
        ms.from_trainer(trainer)


def test_a_model_that_training_would_make_anew_is_refused(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    made = transformers.Trainer(model_init=lambda: hf.llama(), args=args, train_dataset=hf.texts())
    with pytest.raises(ms.RecipeError, match="model_init"):
        ms.from_trainer(made)


def test_collators_that_draw_are_refused(tmp_path: Path) -> None:
    """Masks for a masked language model come from the same generator as dropout."""

    def masking(items: Any) -> dict[str, Tensor]:
        batch = hf.padded(items)
        batch["attention_mask"] *= torch.rand(batch["attention_mask"].shape) > 0.1
        return batch

    trainer = hf.trainer(hf.llama(), hf.texts(), tmp_path, data_collator=masking)
    with pytest.raises(ms.DataError, match="draws random numbers"):
        ms.from_trainer(trainer)


def test_evaluations_between_dropout_draws_are_refused(tmp_path: Path) -> None:
    trainer = hf.trainer(hf.gpt2(dropout=0.1), hf.texts(), tmp_path)
    trainer.args.eval_strategy = transformers.trainer_utils.IntervalStrategy.STEPS
    with pytest.raises(ms.ModelError, match="evaluations in between draw too"):
        ms.from_trainer(trainer)
    assert ms.from_trainer(trainer, dropout="seeded").num_steps == 9


class Regularised(transformers.LlamaForCausalLM):
    """A loss with a further term."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 0.1 * output.logits.square().mean()
        return output


def test_a_loss_that_cannot_be_told_apart_is_refused(tmp_path: Path) -> None:
    model = Regularised(hf.llama_config())
    trainer = hf.trainer(model, hf.texts(), tmp_path, remove_unused_columns=False)
    with pytest.raises(ms.LossError, match=r"Regularised cannot be told apart.*next tokens"):
        ms.from_trainer(trainer)


def test_first_examples_of_which_nothing_counts_are_refused(tmp_path: Path) -> None:
    trainer = hf.trainer(hf.llama(), hf.texts(prompt=4), tmp_path)
    for item in trainer.train_dataset[:2]:
        item["labels"] = [-100] * len(item["labels"])
    with pytest.raises(ms.LossError, match="on the first examples is"):
        ms.from_trainer(trainer)


def test_another_object_is_no_trainer() -> None:
    with pytest.raises(ms.ArgumentError, match="a Linear; it must be a transformers.Trainer"):
        ms.from_trainer(nn.Linear(2, 2))
