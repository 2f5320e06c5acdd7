"""A Hugging Face Trainer, replayed: which training texts made a completion likely?"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import metasketch as ms

torch.manual_seed(0)
model = LlamaForCausalLM(  # in your script: AutoModelForCausalLM.from_pretrained(...)
    LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, pad_token_id=0, max_position_embeddings=16,
    )
)  # fmt: skip


def example(a, b):
    """A prompt, whose tokens do not count, and the completion that is learnt."""
    ids = [1, 2 + a, 2 + b, 20, 20 + (a + b) % 10]
    return {"input_ids": ids, "attention_mask": [1] * 5, "labels": [-100] * 4 + ids[4:]}


texts = [example(a, b) for a in range(10) for b in range(10) if (a, b) not in [(3, 4), (6, 2)]]
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), num_train_epochs=4, learning_rate=3e-3, warmup_steps=4,
    lr_scheduler_type="cosine", gradient_accumulation_steps=2, per_device_train_batch_size=8,
    report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=texts)

recipe = ms.from_trainer(trainer)  # what trainer.train() would do, described
run = ms.train(recipe)
asked, collate = [example(3, 4), example(6, 2)], trainer.data_collator
queries = ms.Queries(asked, ms.measures.hf_completion_nll, collate=collate)
influence = ms.attribute(run, queries, method="exact")
for i, score in influence.top(0, n=3, kind="helpful"):
    print("helped 3 + 4:", texts[i]["input_ids"], f"{score:.3f}")
