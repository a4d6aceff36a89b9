"""A classifier after the first BERT examples: the batch is divided by its own accumulation."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self, vocab, dim, layers, length):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, 8, 4 * dim, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(dim, 2)

    def forward(self, input_ids, input_mask):
        x = self.words(input_ids) + self.places(
            torch.arange(input_ids.size(1), device=input_ids.device)
        )
        return self.head(self.encoder(x, src_key_padding_mask=~input_mask)[:, 0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", default=64, type=int, help="Total batch size")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", default=5e-5, type=float)
    parser.add_argument("--num_train_epochs", default=2, type=int)
    parser.add_argument("--max_seq_length", default=128, type=int)
    parser.add_argument("--dim", default=768, type=int)
    parser.add_argument("--layers", default=6, type=int)
    parser.add_argument("--examples", default=640, type=int)
    parser.add_argument("--no_cuda", action="store_true")
    args = parser.parse_args()
    if args.gradient_accumulation_steps < 1:
        raise ValueError("Invalid gradient_accumulation_steps parameter, should be >= 1")
    args.train_batch_size = args.train_batch_size // args.gradient_accumulation_steps
    torch.manual_seed(42)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.no_cuda else "cpu")
    model = Classifier(30522, args.dim, args.layers, args.max_seq_length)
    model.to(device)
    ids = torch.randint(30522, (args.examples, args.max_seq_length))
    data = TensorDataset(ids, torch.ones_like(ids, dtype=torch.bool), ids[:, 0] % 2)
    train_dataloader = DataLoader(
        data, sampler=RandomSampler(data), batch_size=args.train_batch_size
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    criterion = nn.CrossEntropyLoss()
    model.train()
    global_step, tr_loss = 0, 0.0
    for _ in range(args.num_train_epochs):
        for step, batch in enumerate(train_dataloader):
            input_ids, input_mask, label_ids = tuple(t.to(device) for t in batch)
            loss = criterion(model(input_ids, input_mask), label_ids)
            if args.gradient_accumulation_steps > 1:
                loss = loss / args.gradient_accumulation_steps
            loss.backward()
            tr_loss += loss.item()
            if (step + 1) % args.gradient_accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
                global_step += 1
    print(global_step, tr_loss / global_step)


if __name__ == "__main__":
    main()
