"""Loader processes, augmentation, a validation loader each epoch, StepLR, an own checkpoint: as the ImageNet example."""

import argparse
import os

import torch
from tiny import Net, Pictures, digest
from torch import nn
from torch.optim.lr_scheduler import StepLR

import pliant

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--resume", default="")
args = parser.parse_args()


def train(loader, model, criterion, optimizer, epoch):
    model.train()
    for i, step in enumerate(loader):
        optimizer.zero_grad()
        for images, target in step:
            loss = criterion(model(images), target)
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        if i % 2 == 0 and job.is_first:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}] Loss {step['loss']:.4f}")


def validate(dataset, model):
    model.eval()
    with torch.no_grad():
        for images, target in job.evaluate(dataset, batch_size=3, num_workers=2):
            job.total(correct=(model(images).argmax(1) == target).sum(), seen=len(target))
    total = job.total()
    return total["correct"] / total["seen"]


job = pliant.join(replicas=int(os.environ["REPLICAS"]))
torch.manual_seed(7)
model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = job.track("scheduler", StepLR(optimizer, step_size=2, gamma=0.1))
start_epoch, state = 0, job.state(best_acc1=0.0)
if args.resume:
    checkpoint = torch.load(args.resume)
    start_epoch, state.best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
    nn.modules.utils.consume_prefix_in_state_dict_if_present(checkpoint["state_dict"], "module.")
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
job.wrap(model, optimizer)
train_dataset, val_dataset = Pictures(28, augment=True), Pictures(12, seed=1)
train_loader = job.loader(train_dataset, batch_size=3, num_workers=2, shuffle=True)

for epoch in job.epochs(args.epochs, start=start_epoch):
    train(train_loader, model, criterion, optimizer, epoch)
    acc1 = validate(val_dataset, model)
    scheduler.step()
    state.best_acc1 = max(acc1, state.best_acc1)
    if job.is_first:
        checkpoint = {
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "best_acc1": state.best_acc1,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        torch.save(checkpoint, "written")
        os.replace("written", "checkpoint.pth.tar")  # a new worker may be reading the last one
print("bits", digest(model, optimizer, scheduler, state.best_acc1))
