"""An IterableDataset that every rank cuts its own part out of, with loader processes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import Net, Stream, digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
torch.manual_seed(9 + dist.get_rank())
loader = DataLoader(Stream(dist.get_rank(), dist.get_world_size()), batch_size=2, num_workers=1)
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
print("bits", digest(model, optimizer))
dist.destroy_process_group()
