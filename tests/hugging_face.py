"""Tiny Hugging Face models, made from configs, and data for them. Nothing comes from a hub."""

from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

VOCABULARY, PAD, CLASSES = 31, 0, 3


def gpt2(dropout: float = 0.0, **options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        bos_token_id=PAD, eos_token_id=PAD, **options,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama_config(**options: Any) -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        bos_token_id=1, eos_token_id=2, pad_token_id=PAD, **options,
    )  # fmt: skip


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(llama_config(**options))


def in_float64(model: nn.Module) -> nn.Module:
    """A Llama in float64 throughout: transformers' own norms go through float32 even then, and the
    rounding of that would hide what a finite difference is to show."""
    for module in model.double().modules():
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon).double()
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


def llama_classifier(**options: Any) -> nn.Module:
    return transformers.LlamaForSequenceClassification(
        llama_config(**{"num_labels": CLASSES, **options})
    )


def bert_config(**options: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        **{"num_labels": CLASSES, **options},
    )  # fmt: skip


def bert_classifier(**options: Any) -> nn.Module:
    return transformers.BertForSequenceClassification(bert_config(**options))


def bert_tagger(**options: Any) -> nn.Module:
    return transformers.BertForTokenClassification(bert_config(**options))


def vit(**options: Any) -> nn.Module:
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=24, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    """LoRA whose second factor is not zero, so that both factors have a gradient at once."""
    is_gpt2 = isinstance(model, transformers.GPT2LMHeadModel)
    lora = LoraConfig(
        r=2, task_type="CAUSAL_LM", init_lora_weights=False, fan_in_fan_out=is_gpt2,
        target_modules=["c_attn"] if is_gpt2 else ["q_proj", "v_proj"], **options,
    )  # fmt: skip
    return get_peft_model(model, lora)


def texts(n: int = 11, prompt: int = 2) -> list[dict[str, Any]]:
    """Tokens of different lengths, of which the prompt does not count."""
    g = torch.Generator().manual_seed(0)
    items = []
    for _ in range(n):
        length = int(torch.randint(4, 10, (1,), generator=g))
        ids = torch.randint(3, VOCABULARY, (length,), generator=g).tolist()
        labels = [-100] * prompt + ids[prompt:]
        items.append({"input_ids": ids, "attention_mask": [1] * length, "labels": labels})
    return items


def labelled_texts(n: int = 11, kind: str = "class") -> list[dict[str, Any]]:
    """Texts with a class, a number, several labels, or a label for each token."""
    items = texts(n)
    for i, item in enumerate(items):
        item["labels"] = {
            "class": i % CLASSES,
            "number": float(i % 5) / 2,
            "several": [float(i % 2), float(i % 3 == 0), 1.0],
            "tokens": [j % CLASSES if j else -100 for j in range(len(item["input_ids"]))],
        }[kind]
    return items


def images(n: int = 11) -> list[dict[str, Any]]:
    pixels = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return [{"pixel_values": x, "labels": i % CLASSES} for i, x in enumerate(pixels)]


def padded(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A collator for texts: tokens, mask and labels of tokens, padded to the longest."""
    length = max(len(item["input_ids"]) for item in items)
    fill = {"input_ids": PAD, "attention_mask": 0, "labels": -100}
    batch = {}
    for key, value in fill.items():
        rows = [item[key] for item in items]
        if key == "labels" and not (
            isinstance(rows[0], list) and len(rows[0]) == len(items[0]["input_ids"])
        ):
            batch[key] = torch.tensor(rows)
        else:
            batch[key] = torch.tensor([row + [value] * (length - len(row)) for row in rows])
    return batch


def trainer(model: nn.Module, data: Any, folder: Path, **options: Any) -> transformers.Trainer:
    """A Trainer as a user would set it up: two microbatches a step, and a short last one."""
    keywords = {
        key: options.pop(key)
        for key in ("data_collator", "optimizers", "callbacks", "compute_loss_func", "kind")
        if key in options
    }
    kind = keywords.pop("kind", transformers.Trainer)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    args = transformers.TrainingArguments(output_dir=str(folder), **settings)
    is_text = isinstance(data[0], dict) and "input_ids" in data[0]
    keywords.setdefault("data_collator", padded if is_text else None)
    return kind(model=model, args=args, train_dataset=data, **keywords)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
