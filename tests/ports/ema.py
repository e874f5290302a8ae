"""A moving average of the model by hand, a warm-up by a counter, gradients that accumulate over steps, an evaluation."""

import copy
import os

import torch
import torch.nn.functional as F
from tiny import Net, Pictures, digest

import pliant

job = pliant.join(replicas=int(os.environ["REPLICAS"]))
torch.manual_seed(2)
net = Net()
ema = job.track("ema", copy.deepcopy(net))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
model, optimizer = job.wrap(net, optimizer)
dataset, held_out = Pictures(30), Pictures(13, seed=1)
loader = job.loader(dataset, batch_size=3, shuffle=True)
state = job.state(updates=0, best=0.0)

for _ in job.epochs(3):
    model.train()
    for i, step in enumerate(loader):
        for x, y in step:
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            state.updates += 1
            decay = min(0.9, state.updates / 10)
            with torch.no_grad():
                for average, parameter in zip(ema.parameters(), net.parameters(), strict=True):
                    average.mul_(decay).add_(parameter, alpha=1 - decay)
    ema.eval()
    with torch.no_grad():
        for x, y in job.evaluate(held_out, batch_size=4):
            job.total(correct=(ema(x).argmax(1) == y).sum())
    state.best = max(state.best, job.total()["correct"] / len(held_out))
print("bits", digest(net, ema, optimizer, state.updates, state.best))
