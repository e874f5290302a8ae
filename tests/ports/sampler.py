"""A WeightedRandomSampler on every rank, seeded with seed + rank: each rank draws samples of its own."""

import os

import torch
import torch.nn.functional as F
from tiny import Net, Pictures, digest
from torch.utils.data import WeightedRandomSampler

import pliant

job = pliant.join(replicas=int(os.environ["REPLICAS"]))
job.seed(8)
dataset = Pictures(20)
sampler = WeightedRandomSampler([1.0 + index % 3 for index in range(len(dataset))], num_samples=8)
loader = job.loader(dataset, batch_size=2, sampler=sampler)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
job.wrap(model, optimizer)

for _ in job.epochs(3):
    for step in loader:
        optimizer.zero_grad()
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
print("bits", digest(model, optimizer))
