"""A language model of the size of GPT-2: oomph predict examples/small_gpt.py:workload"""

import torch
from torch import nn

import oomph

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH = 768, 12, 12, 50257, 1024


class SmallGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        places = self.places(torch.arange(length, device=tokens.device))
        hidden = self.blocks(self.tokens(tokens) + places, mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"][:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


workload = oomph.Workload(
    model=SmallGpt,
    batch=lambda n: {"tokens": torch.zeros(n, LENGTH + 1, dtype=torch.long)},
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
    batch_size=64,
)
