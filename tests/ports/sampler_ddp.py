"""A WeightedRandomSampler on every rank, seeded with seed + rank: each rank draws samples of its own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import Net, Pictures, digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, WeightedRandomSampler

dist.init_process_group("gloo")
torch.manual_seed(8 + dist.get_rank())
dataset = Pictures(20)
sampler = WeightedRandomSampler([1.0 + index % 3 for index in range(len(dataset))], num_samples=8)
loader = DataLoader(dataset, batch_size=2, sampler=sampler)
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
print("bits", digest(model, optimizer))
dist.destroy_process_group()
