"""A moving average of the model by hand, a warm-up by a counter, gradients that accumulate over steps, an evaluation."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import Net, Pictures, digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(2)
net = Net()
ema = copy.deepcopy(net)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
dataset, held_out = Pictures(30), Pictures(13, seed=1)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=3, sampler=sampler)
updates, best = 0, 0.0

for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            decay = min(0.9, updates / 10)
            with torch.no_grad():
                for average, parameter in zip(ema.parameters(), net.parameters(), strict=True):
                    average.mul_(decay).add_(parameter, alpha=1 - decay)
    ema.eval()
    with torch.no_grad():
        correct = sum((ema(x).argmax(1) == y).sum().item() for x, y in DataLoader(held_out, batch_size=4))
    best = max(best, correct / len(held_out))
print("bits", digest(net, ema, optimizer, updates, best))
dist.destroy_process_group()
