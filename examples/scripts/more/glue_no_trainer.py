"""Text classification with accelerate and without Trainer: two ways to make the Accelerator."""

import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import BertConfig, BertForSequenceClassification, get_scheduler


def parse_args():
    parser = argparse.ArgumentParser(description="Finetune a model on a text classification task")
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--per_device_train_batch_size", type=int, default=64)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--num_warmup_steps", type=int, default=0)
    parser.add_argument("--hidden_size", type=int, default=768)
    parser.add_argument("--num_layers", type=int, default=6)
    parser.add_argument("--num_examples", type=int, default=640)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--with_tracking", action="store_true")
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = (
        Accelerator(
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            log_with="all",
            project_dir="out",
        )
        if args.with_tracking
        else Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    )
    set_seed(args.seed)
    config = BertConfig(
        num_labels=3,
        vocab_size=30522,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        intermediate_size=4 * args.hidden_size,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    train_dataset = [
        {"input_ids": torch.randint(30522, (args.max_length,)), "labels": i % 3}
        for i in range(args.num_examples)
    ]
    train_dataloader = DataLoader(
        train_dataset, shuffle=True, batch_size=args.per_device_train_batch_size
    )
    eval_dataloader = DataLoader(train_dataset[:64], batch_size=args.per_device_eval_batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * steps_per_epoch
    lr_scheduler = get_scheduler(
        "linear",
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=max_train_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    progress_bar = tqdm(range(max_train_steps), disable=not accelerator.is_local_main_process)
    for epoch in range(args.num_train_epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress_bar.update(1)
        model.eval()
        hits = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                hits += (model(**batch).logits.argmax(-1) == batch["labels"]).sum().item()
        accelerator.print(f"epoch {epoch}: {hits} right")


if __name__ == "__main__":
    main()
