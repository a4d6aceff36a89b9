"""Fine-tuning a frozen causal model with low-rank adapters, written by hand."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


class Adapted(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.01)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapt(model, rank):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj, rank)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj, rank)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro_batch_size", type=int, default=16)
    parser.add_argument("--lora_r", type=int, default=8)
    parser.add_argument("--cutoff_len", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--num_examples", type=int, default=160)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LlamaConfig(
        vocab_size=16000,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
    )
    model = LlamaForCausalLM(config)
    adapt(model, args.lora_r)
    model.to(device)
    data = [torch.randint(16000, (args.cutoff_len,)) for _ in range(args.num_examples)]
    loader = DataLoader(data, batch_size=args.micro_batch_size, shuffle=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate)
    for epoch in range(args.num_epochs):
        model.train()
        for step, batch in enumerate(loader):
            batch = batch.to(device)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
