"""seed + rank, `enumerate` with `break`, `continue`, random numbers between steps, a validation loader on every rank."""

import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import Net, Pictures, digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
random.seed(4 + dist.get_rank())
np.random.seed(4 + dist.get_rank())
torch.manual_seed(4 + dist.get_rank())
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
dataset, held_out = Pictures(40, augment=True), Pictures(8, seed=1)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=2, sampler=sampler)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        if i >= 5:
            break
        if torch.rand(()) < 0 or i == 2:
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        jitter = [torch.rand(3).sum().item(), random.random(), np.random.rand(2).sum()]
        optimizer.step()
    for x, y in DataLoader(held_out, batch_size=4):
        F.cross_entropy(model.module(x), y).item()
print("bits", digest(model, optimizer))
dist.destroy_process_group()
