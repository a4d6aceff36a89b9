"""Causal language modelling with the Hugging Face Trainer. The tokens are synthetic."""

from dataclasses import dataclass, field

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ModelArguments:
    n_embd: int = field(default=768)
    n_layer: int = field(default=12)
    n_head: int = field(default=12)
    vocab_size: int = field(default=50257)


@dataclass
class DataArguments:
    block_size: int = field(default=1024)
    num_blocks: int = field(default=256)


class Blocks(torch.utils.data.Dataset):
    def __init__(self, data_args, vocab_size):
        g = torch.Generator().manual_seed(0)
        shape = (data_args.num_blocks, 1)
        starts = torch.randint(vocab_size, shape, generator=g)
        self.tokens = (starts + torch.arange(data_args.block_size)) % vocab_size

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i].clone()}


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = GPT2Config(
        vocab_size=model_args.vocab_size,
        n_embd=model_args.n_embd,
        n_layer=model_args.n_layer,
        n_head=model_args.n_head,
        n_positions=data_args.block_size,
    )
    model = GPT2LMHeadModel(config)
    n_params = sum({p.data_ptr(): p.numel() for p in model.parameters()}.values())
    print(f"Training new model from scratch - Total size={n_params / 2**20:.2f}M params")
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=Blocks(data_args, config.vocab_size),
    )
    result = trainer.train()
    print(f"train_loss: {result.training_loss:.4f}")


if __name__ == "__main__":
    main()
