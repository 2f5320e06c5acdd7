"""LoRA through peft over a frozen base in bfloat16, which is kept once, whatever is swept."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import metasketch as ms

torch.manual_seed(0)
size = {"vocab_size": 50, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
base = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).to(torch.bfloat16)
model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
model.print_trainable_parameters()

tokens = torch.randint(50, (64, 16))
recipe = ms.Recipe(
    model=model,
    loss=ms.losses.hf_causal_lm,
    data={"input_ids": tokens[:56]},
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6),
    schedule=ms.cosine(warmup=0.1),
    batch_size=8,
    epochs=3,
    clip_norm=1.0,
)
run = ms.train(recipe)
print(f"{run.num_params} parameters are trained; one state of the run is {run.sizes.state} bytes")
queries = ms.Queries({"input_ids": tokens[56:60]}, ms.measures.hf_next_token_nll)
influence = ms.attribute(run, queries, method="exact")
print("most helpful texts for query 0:", [i for i, _ in influence.top(0, n=5, kind="helpful")])
