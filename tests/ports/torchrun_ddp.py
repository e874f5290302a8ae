"""A trainer class with a snapshot that is loaded where there is one: as the tutorial's multigpu_torchrun.py."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import Net, Pictures, digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.model, self.train_data, self.optimizer = model, train_data, optimizer
        self.save_every, self.snapshot_path = save_every, snapshot_path
        self.epochs_run = 0
        if os.path.exists(snapshot_path):
            self.load_snapshot()
        self.model = DistributedDataParallel(self.model)

    def load_snapshot(self):
        snapshot = torch.load(self.snapshot_path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def run_epoch(self, epoch):
        print(f"Epoch {epoch} | Steps: {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self.run_batch(source, targets)

    def save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch}
        torch.save(snapshot, self.snapshot_path)

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self.run_epoch(epoch)
            if dist.get_rank() == 0 and epoch % self.save_every == 0:
                self.save_snapshot(epoch)


dist.init_process_group("gloo")
torch.manual_seed(3)
dataset, model = Pictures(20), Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
train_data = DataLoader(dataset, batch_size=3, sampler=DistributedSampler(dataset))
trainer = Trainer(model, train_data, optimizer, 1, "snapshot.pt")
trainer.train(int(sys.argv[1]))
print("bits", digest(model, optimizer))
dist.destroy_process_group()
