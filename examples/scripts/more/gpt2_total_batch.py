"""GPT-2 on shards of tokens: the batch is given in tokens, and accumulation follows from it."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=32, help="batch size, in units of #rows")
parser.add_argument("--sequence_length", type=int, default=256, help="sequence length")
parser.add_argument("--total_batch_size", type=int, default=8192, help="in units of #tokens")
parser.add_argument("--num_iterations", type=int, default=10)
parser.add_argument("--learning_rate", type=float, default=1e-4)
parser.add_argument("--grad_clip", type=float, default=1.0)
parser.add_argument("--dtype", type=str, default="float32", help="float32|float16|bfloat16")
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--depth", type=int, default=6)
parser.add_argument("--vocab", type=int, default=16384)
parser.add_argument("--device", type=str, default="cuda")
args = parser.parse_args()

B, T = args.batch_size, args.sequence_length
tokens_per_fwdbwd = B * T
assert args.total_batch_size % tokens_per_fwdbwd == 0
grad_accum_steps = args.total_batch_size // tokens_per_fwdbwd
print(f"total desired batch size: {args.total_batch_size}, accumulation: {grad_accum_steps}")
torch.manual_seed(42)
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ctx = torch.amp.autocast(
    args.device, dtype=ptdtype[args.dtype], enabled=args.dtype in ("bfloat16", "float16")
)


class Tokens:
    def __init__(self, B, T):
        self.B, self.T, self.place = B, T, 0
        self.tokens = torch.randint(args.vocab, (100_000,))

    def next_batch(self):
        if self.place + self.B * self.T + 1 > len(self.tokens):
            self.place = 0
        buf = self.tokens[self.place : self.place + self.B * self.T + 1]
        self.place += self.B * self.T
        return buf[:-1].view(self.B, self.T), buf[1:].view(self.B, self.T)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, c = x.shape
        qkv = self.qkv(self.ln_1(x)).view(n, t, 3, 8, c // 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(n, t, c))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocab, width, depth, length):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width) for _ in range(depth))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


train_loader = Tokens(B, T)
model = GPT(args.vocab, args.width, args.depth, T)
model.train()
model.to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
for step in range(args.num_iterations):
    optimizer.zero_grad(set_to_none=True)
    lossf = 0.0
    for micro_step in range(grad_accum_steps):
        x, y = train_loader.next_batch()
        x, y = x.to(args.device), y.to(args.device)
        with ctx:
            _, loss = model(x, y)
            # we have to scale the loss, because the gradients add up
            loss = loss / grad_accum_steps
            lossf += loss.detach()
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
    optimizer.step()
    print(f"step {step}: loss {float(lossf):.4f}, norm {float(norm):.3f}")
