"""A trainer class, a GradScaler, dropout left on in evaluation, epochs from 1, no set_epoch, a snapshot: as minGPT-ddp."""

import os
import sys

import torch
from tiny import GPT, Characters, digest

import pliant


class Trainer:
    def __init__(self, model, optimizer, train_dataset, test_dataset, max_epochs):
        self.train_loader = job.loader(train_dataset, batch_size=4, shuffle=True)
        self.train_loader.set_epoch(0)
        self.test_dataset = test_dataset
        self.max_epochs, self.epochs_run = max_epochs, 0
        self.model, self.optimizer = model, optimizer
        self.scaler = job.track("scaler", torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3))
        if os.path.exists("snapshot.pt"):
            self.load_snapshot()
        job.wrap(self.model, self.optimizer)

    def load_snapshot(self):
        snapshot = torch.load("snapshot.pt")
        self.model.load_state_dict(snapshot["model_state"])
        self.optimizer.load_state_dict(snapshot["optimizer_state"])
        self.epochs_run = snapshot["finished_epoch"]

    def save_snapshot(self, epoch):
        snapshot = {
            "model_state": self.model.state_dict(),
            "optimizer_state": self.optimizer.state_dict(),
            "finished_epoch": epoch,
        }
        torch.save(snapshot, "written")
        os.replace("written", "snapshot.pt")  # a new worker may be reading the last one

    def run_batch(self, source, targets, train):
        with torch.set_grad_enabled(train), torch.amp.autocast("cpu", dtype=torch.float16):
            return self.model(source, targets)

    def train_epoch(self, epoch):
        for number, step in enumerate(self.train_loader):
            self.optimizer.zero_grad(set_to_none=True)
            for source, targets in step:
                loss = self.run_batch(source, targets, True)
                self.scaler.scale(loss).backward()
                step.log(loss=loss)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if number % 3 == 0 and job.is_first:
                print(f"Epoch {epoch} | Iter {number} | Train Loss {step['loss']:.5f}")

    def evaluate(self, epoch):
        for source, targets in job.evaluate(self.test_dataset, batch_size=4):
            job.total(loss=self.run_batch(source, targets, False), batches=1)
        if job.is_first:
            print(f"Epoch {epoch} | Eval Loss {job.total()['loss'] / job.total()['batches']:.5f}")

    def train(self):
        for epoch in job.epochs(self.max_epochs, start=self.epochs_run):
            epoch += 1
            self.train_epoch(epoch)
            if job.is_first:
                self.save_snapshot(epoch)
            self.evaluate(epoch)


job = pliant.join(replicas=int(os.environ["REPLICAS"]))
torch.manual_seed(11)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
trainer = Trainer(model, optimizer, Characters(40), Characters(12, seed=1), int(sys.argv[1]))
trainer.train()
print("bits", digest(model, optimizer, trainer.scaler))
