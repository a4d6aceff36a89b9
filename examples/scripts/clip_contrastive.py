"""CLIP: an image tower and a text tower, one optimizer over both, mixed precision by flag."""

import argparse
import itertools
from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F

args = argparse.ArgumentParser()
args.add_argument("--image-width", type=int, default=96)
args.add_argument("--text-dim", type=int, default=512)
args.add_argument("--text-layers", type=int, default=6)
args.add_argument("--embed", type=int, default=512)
args.add_argument("--resolution", type=int, default=128)
args.add_argument("--context", type=int, default=77)
args.add_argument("--batch", type=int, default=128)
args.add_argument("--iterations", type=int, default=400)
args.add_argument("--fp32", action="store_true")
args = args.parse_args()


def image_tower(width, embed):
    stages, cin = [], 3
    for i in range(4):
        cout = width * 2**i
        stages += [nn.Conv2d(cin, cout, 4, 4) if i == 0 else nn.Conv2d(cin, cout, 2, 2)]
        stages += [
            nn.GroupNorm(1, cout),
            nn.Conv2d(cout, cout, 7, padding=3, groups=cout),
            nn.GELU(),
        ]
        cin = cout
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, embed))


def text_tower(dim, layers, embed, vocab=49408):
    layer = nn.TransformerEncoderLayer(dim, dim // 64 or 1, 4 * dim, 0.0, "gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(vocab, dim), encoder, nn.Linear(dim, embed))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
visual = image_tower(args.image_width, args.embed).to(device)
textual = text_tower(args.text_dim, args.text_layers, args.embed).to(device)
logit_scale = nn.Parameter(torch.tensor(2.659, device=device))
optimizer = torch.optim.AdamW(
    itertools.chain(visual.parameters(), textual.parameters(), [logit_scale]), lr=5e-4
)
amp = nullcontext() if args.fp32 else torch.autocast(device, dtype=torch.bfloat16)
labels = torch.arange(args.batch, device=device)

for it in range(args.iterations):
    concept = torch.randint(40_000, (args.batch, 1))
    images = (
        torch.randn(args.batch, 3, args.resolution, args.resolution)
        + concept[..., None, None] / 4e4
    )
    texts = concept + torch.arange(args.context)
    images, texts = images.to(device), texts.to(device)
    with amp:
        image_features = F.normalize(visual(images), dim=-1)
        text_features = F.normalize(textual(texts).mean(1), dim=-1)
        logits = logit_scale.exp() * image_features @ text_features.t()
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        logit_scale.clamp_(0, 4.605)
    if it % 10 == 0:
        print(f"it {it} loss {loss.item():.4f} scale {logit_scale.exp().item():.2f}")
