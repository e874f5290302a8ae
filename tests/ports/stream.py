"""An IterableDataset that every rank cuts its own part out of, with loader processes."""

import os

import torch
import torch.nn.functional as F
from tiny import Net, Stream, digest

import pliant

job = pliant.join(replicas=int(os.environ["REPLICAS"]))
job.seed(9)
loader = job.loader(lambda replica: Stream(replica, job.replicas), batch_size=2, num_workers=1)
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
