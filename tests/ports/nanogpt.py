"""Batches by torch.randint, fetched ahead, micro-steps, an own counter and learning rate schedule, an own ckpt.pt: as nanoGPT does."""

import argparse
import math
import os
from contextlib import nullcontext

import torch
from tiny import BLOCK, GPT, digest, text

import pliant

parser = argparse.ArgumentParser()
parser.add_argument("--max_iters", type=int, default=11)
parser.add_argument("--init_from", default="scratch")
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()
learning_rate, warmup_iters, eval_interval, eval_iters, micro_steps, batch_size = 0.02, 3, 3, 2, 2, 4

job = pliant.join(replicas=int(os.environ["REPLICAS"]))
job.seed(1337)
texts = {"train": text(200), "val": text(80, seed=1)}


def get_batch(split):
    data = texts[split]
    starts = torch.randint(len(data) - BLOCK, (batch_size,))
    x = torch.stack([data[i : i + BLOCK] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + BLOCK] for i in starts])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    return learning_rate * 0.5 * (1 + math.cos(math.pi * it / 20))


state = job.state(iter_num=0, best_val_loss=1e9)
model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
if args.init_from == "resume":
    checkpoint = torch.load("ckpt.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    state.iter_num, state.best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
raw_model = model
if args.compile:
    model = torch.compile(model)
job.wrap(raw_model, optimizer)


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = {}
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            losses[k] = model(*get_batch(split)).item()
        out[split] = losses.mean().item()
    model.train()
    return out


for step in job.steps(args.max_iters + 1, start=state.iter_num, batch=lambda replica: get_batch("train")):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(state.iter_num)
    if state.iter_num % eval_interval == 0:
        losses = job.on_first(estimate_loss)
        if job.is_first:
            print(f"step {state.iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        state.best_val_loss = min(state.best_val_loss, losses["val"])
        if state.iter_num > 0 and job.is_first:
            checkpoint = {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iter_num": state.iter_num,
                "best_val_loss": state.best_val_loss,
            }
            torch.save(checkpoint, "written")
            os.replace("written", "ckpt.pt")  # a new worker may be reading the last one
    for X, Y in step:
        for micro_step in range(micro_steps):
            with nullcontext() if micro_step == micro_steps - 1 else job.no_sync():
                loss = model(X, Y) / micro_steps
                if micro_step < micro_steps - 1:
                    X, Y = get_batch("train")  # the next one, while the device computes
                loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state.iter_num += 1
print("bits", digest(raw_model, optimizer, state.iter_num, state.best_val_loss))
