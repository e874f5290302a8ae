"""A trainer class, a GradScaler, dropout left on in evaluation, epochs from 1, no set_epoch, a snapshot: as minGPT-ddp."""

import os
import sys

import torch
import torch.distributed as dist
from tiny import GPT, Characters, digest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, optimizer, train_dataset, test_dataset, max_epochs):
        self.train_loader = self.prepare_dataloader(train_dataset)
        self.test_loader = self.prepare_dataloader(test_dataset)
        self.max_epochs, self.epochs_run = max_epochs, 0
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)
        if os.path.exists("snapshot.pt"):
            self.load_snapshot()
        self.model = DistributedDataParallel(self.model)

    def prepare_dataloader(self, dataset):
        return DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))

    def load_snapshot(self):
        snapshot = torch.load("snapshot.pt")
        self.model.load_state_dict(snapshot["model_state"])
        self.optimizer.load_state_dict(snapshot["optimizer_state"])
        self.epochs_run = snapshot["finished_epoch"]

    def save_snapshot(self, epoch):
        snapshot = {
            "model_state": self.model.module.state_dict(),
            "optimizer_state": self.optimizer.state_dict(),
            "finished_epoch": epoch,
        }
        torch.save(snapshot, "snapshot.pt")

    def run_batch(self, source, targets, train):
        with torch.set_grad_enabled(train), torch.amp.autocast("cpu", dtype=torch.float16):
            loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.item()

    def run_epoch(self, epoch, loader, train):
        for number, (source, targets) in enumerate(loader):
            loss = self.run_batch(source, targets, train)
            if number % 3 == 0:
                print(f"Epoch {epoch} | Iter {number} | {'Train' if train else 'Eval'} Loss {loss:.5f}")

    def train(self):
        for epoch in range(self.epochs_run, self.max_epochs):
            epoch += 1
            self.run_epoch(epoch, self.train_loader, train=True)
            if dist.get_rank() == 0:
                self.save_snapshot(epoch)
            self.run_epoch(epoch, self.test_loader, train=False)


dist.init_process_group("gloo")
torch.manual_seed(11)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
trainer = Trainer(model, optimizer, Characters(40), Characters(12, seed=1), int(sys.argv[1]))
trainer.train()
print("bits", digest(model, optimizer, trainer.scaler))
dist.destroy_process_group()
