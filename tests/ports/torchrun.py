"""A trainer class with a snapshot that is loaded where there is one: as the tutorial's multigpu_torchrun.py."""

import os
import sys

import torch
import torch.nn.functional as F
from tiny import Net, Pictures, digest

import pliant


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.model, self.train_data, self.optimizer = model, train_data, optimizer
        self.save_every, self.snapshot_path = save_every, snapshot_path
        self.epochs_run = 0
        if os.path.exists(snapshot_path):
            self.load_snapshot()
        job.wrap(self.model, self.optimizer)

    def load_snapshot(self):
        snapshot = torch.load(self.snapshot_path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def run_batch(self, source, targets):
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()

    def run_epoch(self, epoch):
        print(f"Epoch {epoch} | Steps: {len(self.train_data)}")
        for step in self.train_data:
            self.optimizer.zero_grad()
            for source, targets in step:
                self.run_batch(source, targets)
            self.optimizer.step()

    def save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.state_dict(), "EPOCHS_RUN": epoch}
        torch.save(snapshot, "written")
        os.replace("written", self.snapshot_path)  # a new worker may be reading the last one

    def train(self, max_epochs):
        for epoch in job.epochs(max_epochs, start=self.epochs_run):
            self.run_epoch(epoch)
            if job.is_first and epoch % self.save_every == 0:
                self.save_snapshot(epoch)


job = pliant.join(replicas=int(os.environ["REPLICAS"]))
torch.manual_seed(3)
dataset, model = Pictures(20), Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
train_data = job.loader(dataset, batch_size=3, shuffle=True)
trainer = Trainer(model, train_data, optimizer, 1, "snapshot.pt")
trainer.train(int(sys.argv[1]))
print("bits", digest(model, optimizer))
