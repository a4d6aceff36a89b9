"""Fine-tune a text CNN whose word vectors were trained before and lie in a file."""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))


class TextCNN(nn.Module):
    def __init__(self, vocab, dim, filters, classes, widths=(3, 4, 5)):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList([nn.Conv1d(dim, filters, w) for w in widths])
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(filters * len(widths), classes)

    def forward(self, x):
        x = self.embedding(x).transpose(1, 2)
        pooled = [F.relu(conv(x)).amax(dim=2) for conv in self.convs]
        return self.fc(self.dropout(torch.cat(pooled, dim=1)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", default=os.path.join(HERE, "word_vectors.pt"))
    parser.add_argument("--filters", type=int, default=1024)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--freeze-vectors", action="store_true")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps-per-epoch", type=int, default=100)
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not os.path.isfile(args.checkpoint):
        raise FileNotFoundError(f"=> no checkpoint found at '{args.checkpoint}'")
    print(f"=> loading checkpoint '{args.checkpoint}'")
    checkpoint = torch.load(args.checkpoint, map_location="cpu")
    vectors = checkpoint["state_dict"]["embedding.weight"]
    vocab, dim = vectors.shape
    torch.manual_seed(0)
    model = TextCNN(vocab, dim, args.filters, 20)
    missing, unexpected = model.load_state_dict(checkpoint["state_dict"], strict=False)
    print(f"=> loaded (epoch {checkpoint['epoch']}), new: {missing}, unknown: {unexpected}")
    model = model.to(device)
    del checkpoint, vectors
    if args.freeze_vectors:
        model.embedding.weight.requires_grad_(False)
    trainable = filter(lambda p: p.requires_grad, model.parameters())
    optimizer = torch.optim.Adam(trainable, lr=args.lr)

    for epoch in range(args.epochs):
        for i in range(args.steps_per_epoch):
            target = torch.randint(20, (args.batch_size,))
            text = (
                torch.randint(40, (args.batch_size, args.length)) + 40 * target[:, None]
            ) % vocab
            text, target = text.to(device), target.to(device)
            optimizer.zero_grad()
            logit = model(text)
            loss = F.cross_entropy(logit, target)
            loss.backward()
            optimizer.step()
            if i % 20 == 0:
                corrects = (torch.max(logit, 1)[1].view(target.size()).data == target.data).sum()
                accuracy = 100.0 * corrects / args.batch_size
                print(
                    f"\rEpoch[{epoch}] Batch[{i}] - loss: {loss.item():.6f}  acc: {accuracy:.4f}%"
                )


if __name__ == "__main__":
    main()
