"""Muon for the hidden matrices, AdamW for embeddings, head, norms and biases."""

import torch
from torch import nn

import metasketch as ms

torch.manual_seed(0)
tokens = torch.randint(20, (120, 12))
tokens[:, 1::2] = (tokens[:, ::2] * 3 + 1) % 20  # every second token follows from the one before


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.block(self.embed(tokens), src_mask=mask, is_causal=True))


optimizer = ms.Muon(
    lr=0.02,
    weight_decay=0.01,
    adamw=ms.AdamW(lr=0.01, eps_root=1e-8, groups=(ms.Group("*.bias", weight_decay=0.0),)),
    adamw_names=("embed.*", "head.*"),
)
recipe = ms.Recipe(Model(), ms.losses.causal_lm, tokens[:100], optimizer, batch_size=20, epochs=4)
run = ms.train(recipe)
queries = ms.Queries(tokens[100:104], ms.measures.next_token_nll)
influence = ms.attribute(run, queries, method="exact")
print("a text that lowered the loss of query 0 most:", influence.top(0, n=1, kind="helpful"))
