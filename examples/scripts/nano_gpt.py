"""
GPT-2 (124M) from scratch on one GPU, in the manner of nanoGPT: settings are globals that
arguments override, the data is a file of tokens, batches are cut from it by hand.

$ python nano_gpt.py --batch_size=8 --compile=False
"""

import math
import os
import sys
import tempfile
import time
from ast import literal_eval
from contextlib import nullcontext

import numpy as np
import torch

from nano_gpt_model import GPT

# -----------------------------------------------------------------------------
eval_interval = 500
log_interval = 1
# data
gradient_accumulation_steps = 8
batch_size = 12  # micro-batch size
block_size = 1024
vocab_size = 50304
# model
n_layer = 12
n_head = 12
n_embd = 768
dropout = 0.0
bias = False
# adamw
learning_rate = 6e-4
max_iters = 600
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
warmup_iters = 20
# system
device = "cuda"
dtype = "bfloat16"  # 'float32', 'bfloat16', or 'float16' with a GradScaler
compile = True
# -----------------------------------------------------------------------------
for arg in sys.argv[1:]:
    key, val = arg.removeprefix("--").split("=")
    if key not in globals():
        raise ValueError(f"Unknown config key: {key}")
    try:
        val = literal_eval(val)
    except (SyntaxError, ValueError):
        pass
    print(f"Overriding: {key} = {val}")
    globals()[key] = val
# -----------------------------------------------------------------------------

torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = (
    nullcontext()
    if device_type == "cpu" and dtype == "float32"
    else torch.amp.autocast(device_type=device_type, dtype=ptdtype)
)
tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
print(f"tokens per iteration will be: {tokens_per_iter:,}")

# tokens would come from prepare.py; here they are made up
data_dir = tempfile.mkdtemp()
tokens = np.arange(200_000, dtype=np.uint16) * 17 % 251 % vocab_size
tokens.astype(np.uint16).tofile(os.path.join(data_dir, "train.bin"))


def get_batch():
    data = np.memmap(os.path.join(data_dir, "train.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
    y = torch.stack(
        [torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix]
    )
    if device_type == "cuda":
        # pin arrays x,y, which allows us to move them to GPU asynchronously
        x = x.pin_memory().to(device, non_blocking=True)
        y = y.pin_memory().to(device, non_blocking=True)
    else:
        x, y = x.to(device), y.to(device)
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return learning_rate * (0.1 + 0.45 * (1.0 + math.cos(math.pi * ratio)))


model = GPT(vocab_size, block_size, n_layer, n_head, n_embd, dropout, bias)
model.to(device)
scaler = torch.amp.GradScaler(device_type, enabled=(dtype == "float16"))
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device_type)
if compile:
    print("compiling the model... (takes a ~minute)")
    model = torch.compile(model)

X, Y = get_batch()  # fetch the very first batch
t0 = time.time()
for iter_num in range(max_iters):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    for micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        # prefetch the next batch while the model is doing the forward pass on the GPU
        X, Y = get_batch()
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    t1 = time.time()
    dt, t0 = t1 - t0, t1
    if iter_num % log_interval == 0:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, time {dt * 1000:.2f}ms")
