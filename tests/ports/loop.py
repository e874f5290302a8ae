"""seed + rank, `enumerate` with `break`, `continue`, random numbers between steps, a validation loader on every rank."""

import os
import random

import numpy as np
import torch
import torch.nn.functional as F
from tiny import Net, Pictures, digest
from torch.utils.data import DataLoader

import pliant

job = pliant.join(replicas=int(os.environ["REPLICAS"]))
job.seed(4)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = job.wrap(model, optimizer)
dataset, held_out = Pictures(40, augment=True), Pictures(8, seed=1)
loader = job.loader(dataset, batch_size=2, shuffle=True)

for _ in job.epochs(3):
    for i, step in enumerate(loader):
        if i >= 5:
            break
        if torch.rand(()) < 0 or i == 2:
            continue
        optimizer.zero_grad()
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        jitter = [torch.rand(3).sum().item(), random.random(), np.random.rand(2).sum()]
        optimizer.step()
    for x, y in DataLoader(held_out, batch_size=4):
        F.cross_entropy(model(x), y).item()
print("bits", digest(model, optimizer))
