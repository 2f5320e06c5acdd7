"""What a Hugging Face Trainer may be told to do that a recipe cannot replay, by name."""

from collections.abc import Iterator
from typing import Any

OWN_METHODS = (
    "train",
    "_inner_training_loop",
    "_run_epoch",
    "training_step",
    "compute_loss",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "get_batch_samples",
    "_get_num_items_in_batch",
    "_prepare_inputs",
    "_prepare_input",
    "_clip_grad_norm",
    "get_train_dataloader",
    "_get_dataloader",
)
"""Methods that decide the training and are not called here. What the Trainer's other methods
return (its sampler, optimiser, scheduler, names without decay) is used as they return it."""

ARGUMENTS: dict[str, str] = {
    "fp16": "scaled half precision; train in float32",
    "bf16": "autocast to bfloat16; train in float32, or load a frozen base in bfloat16 and train "
    "LoRA over it",
    "activation_checkpointing": "it has no second derivative, and changes no number: turn it off",
    "gradient_checkpointing": "it has no second derivative, and changes no number: turn it off",
    "neftune_noise_alpha": "noise in the embeddings",
    "torch_compile": "a compiled model has no second derivative",
    "use_liger_kernel": "its kernels have no second derivative",
    "label_smoothing_factor": "smoothed labels",
    "auto_find_batch_size": "a batch size that is found while training",
    "load_best_model_at_end": "the final weights would be those of another step",
    "resume_from_checkpoint": "a training that starts in the middle",
    "deepspeed": "several processes",
    "fsdp": "several processes",
    "parallelism_config": "several processes",
    "push_to_hub": "it uploads while training; turn it off",
}
"""Arguments that are refused where they are set, and why."""


def reasons_against(trainer: Any) -> list[str]:
    """Why a Trainer's training could not be replayed; an empty list if nothing is known."""
    return [*_setting(trainer), *_arguments(trainer.args), *_code(trainer)]


def _setting(trainer: Any) -> Iterator[str]:
    import torch

    args, data = trainer.args, trainer.train_dataset
    if data is None:
        yield "it has no train_dataset"
    elif isinstance(data, torch.utils.data.IterableDataset) or not hasattr(data, "__len__"):
        yield (
            f"train_dataset is a {type(data).__name__}, whose examples have no numbers: give a "
            "data set with __len__ and __getitem__"
        )
    if trainer.state.global_step:
        yield (
            f"it has trained already ({trainer.state.global_step} steps): make a new Trainer over "
            "the initial model"
        )
    if trainer.model_init is not None:
        yield "model_init makes the model anew when training starts: give the model itself"
    if args.n_gpu > 1 or args.world_size > 1:
        yield f"it trains on {max(args.n_gpu, args.world_size)} devices: use one"
    if trainer.accelerator.mixed_precision not in ("no", None):
        yield f"accelerate is set to mixed precision ({trainer.accelerator.mixed_precision})"
    if getattr(args, "train_sampling_strategy", "random") == "batch_rebalance":
        yield "train_sampling_strategy='batch_rebalance' makes microbatches of several sizes"
    if (gap := _pad_token_differs(trainer)) is not None:
        yield gap


def _pad_token_differs(trainer: Any) -> str | None:
    """Training sets the model's special tokens to the tokenizer's, and a decoder that classifies
    looks for its padding."""
    config: Any = getattr(trainer.model, "config", None)
    pad = getattr(trainer.processing_class, "pad_token_id", None)
    if pad is None or not hasattr(config, "pad_token_id") or config.pad_token_id == pad:
        return None
    return (
        f"the model's pad_token_id is {config.pad_token_id} and its tokenizer's {pad}, to which "
        "training would set it: do model.config.pad_token_id = tokenizer.pad_token_id"
    )


def _arguments(args: Any) -> Iterator[str]:
    for name, why in ARGUMENTS.items():
        value = getattr(args, name, None)
        if value:
            yield f"{name}={value!r}: {why}"


def _code(trainer: Any) -> Iterator[str]:
    from transformers import EarlyStoppingCallback, Trainer

    for name in OWN_METHODS:
        overridden = getattr(type(trainer), name, None) is not getattr(Trainer, name, None)
        if overridden or name in vars(trainer):
            yield f"{type(trainer).__name__} has a {name} of its own"
    if trainer.compute_loss_func is not None:
        yield "compute_loss_func is a loss of its own: write the training as a Recipe with it"
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        foreign = not kind.__module__.startswith("transformers.")
        if foreign or isinstance(callback, EarlyStoppingCallback):
            yield (
                f"the callback {kind.__name__} may change the training: remove it "
                f"(trainer.remove_callback({kind.__name__}))"
            )
