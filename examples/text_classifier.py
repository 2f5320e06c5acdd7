"""A sequence classifier on a data set of `datasets`, padded by its collator; queries by margin."""

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification

import metasketch as ms

words = ["<pad>", "good", "fine", "bad", "poor", "film", "book", "a", "very", "not"]
texts = ["very good film", "a fine book", "bad film", "a very poor book", "not good"] * 12
ids = [[words.index(word) for word in text.split()] for text in texts]
rows = Dataset.from_dict({"input_ids": ids, "labels": [1, 1, 0, 0, 0] * 12})


def collate(items):
    tokens = [torch.tensor(item["input_ids"]) for item in items]
    tokens = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    labels = torch.tensor([item["labels"] for item in items])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(vocab_size=10, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
)
optimizer = ms.AdamW(lr=1e-3, eps_root=1e-8)
recipe = ms.Recipe(
    model, ms.losses.hf_cross_entropy, rows, optimizer, collate, batch_size=12, epochs=2, ids=texts
)
run = ms.train(recipe)
asked = [{"input_ids": [9, 1, 5], "labels": 0}]
queries = ms.Queries(asked, ms.measures.hf_margin, collate, ids=["not good film"])
influence = ms.attribute(run, queries, method="exact")
for text, score in influence.top("not good film", n=3, kind="helpful"):
    print(f"{text!r} raised the margin by {score:.4f}")
