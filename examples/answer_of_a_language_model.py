"""Which fine-tuning texts made a language model answer as it does?

A tiny Llama learns to write short sentences about who lives where and who eats what, and is then
fine-tuned on new facts. Of one person the texts say two things. The queries are the answers to
"mira lives in": their negative log-likelihood, of the completion alone. Texts that made an answer
likely are helpful to it; without the first four, the model is fine-tuned again as a check.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import metasketch as ms

torch.set_num_threads(1)
towns, foods = ["oslo", "rome", "lima", "cairo"], ["rice", "soup", "figs", "bread"]
known = ["anna", "bo", "chen", "dora", "emil", "fay", "gus", "hana"]
new = ["ines", "jon", "kim", "lena", "nils", "otto", "pia", "rosa"]
before = [f"{p} lives in {towns[i % 4]}" for i, p in enumerate(known)]
before += [f"{p} works in {towns[i % 4]}" for i, p in enumerate(known)]
before += [f"{p} eats {foods[i // 2]}" for i, p in enumerate(known)]
facts = [f"{p} lives in {towns[i // 2]}" for i, p in enumerate(new)]
facts += [f"{p} works in {towns[i // 2]}" for i, p in enumerate(new)]
facts += [f"{p} eats {foods[i % 4]}" for i, p in enumerate(new)]
facts += ["mira lives in lima", "mira works in rome", "mira eats figs", "mira moved to rome"]
words = sorted({word for text in before + facts for word in text.split()})
numbers = {word: i + 2 for i, word in enumerate(words)}  # 0 is padding, 1 begins a text


def tokens(texts, prompts=None):
    """A padded batch; with prompts, only what follows them counts."""
    rows = [[1, *(numbers[word] for word in text.split())] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    labels = ids.masked_fill(ids == 0, -100)
    for row, prompt in zip(labels, prompts or [], strict=False):
        row[: 1 + len(prompt.split())] = -100
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(words) + 2, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=16, pad_token_id=0,
)  # fmt: skip
pretrained = ms.train(
    ms.Recipe(
        model=LlamaForCausalLM(config).double(),
        loss=ms.losses.hf_causal_lm,
        data=tokens(before),
        optimizer=ms.AdamW(lr=5e-3, eps_root=1e-8),
        batch_size=12,
        epochs=20,
    )
).model()

fine_tuning = ms.Recipe(
    model=pretrained,
    loss=ms.losses.hf_causal_lm,
    data=tokens(facts),
    optimizer=ms.AdamW(lr=1e-3, eps_root=1e-6),
    schedule=ms.linear(warmup=0.2),
    batch_size=14,
    epochs=15,
    ids=facts,
)
run = ms.train(fine_tuning)
answers = ["mira lives in lima", "mira lives in rome"]
queries = ms.Queries(
    tokens(answers, ["mira lives in"] * 2), ms.measures.hf_completion_nll, ids=answers
)
influence = ms.attribute(run, queries, method="exact")
for answer, nll in zip(answers, queries.values(run), strict=True):
    print(f"{answer!r} has probability {float((-nll).exp()):.2f}; texts behind it:")
    for text, score in influence.top(answer, n=4, kind="helpful"):
        print(f"  {text:24} without it, its negative log-likelihood would change by {-score:+.3f}")

removed = [text for text, _ in influence.top(answers[1], n=1, kind="helpful")]
w = torch.tensor([0.0 if text in removed else 1.0 for text in facts])
change = queries.values(ms.train(fine_tuning, weights=w)) - queries.values(run)
predicted = influence.predict_removal(removed)
print(f"without {removed[0]!r}:")
for q, answer in enumerate(answers):
    print(f"  {answer!r}: predicted {predicted[q]:+.3f}, fine-tuned again {change[q]:+.3f}")
