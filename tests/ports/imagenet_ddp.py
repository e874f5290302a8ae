"""Loader processes, augmentation, a validation loader each epoch, StepLR, an own checkpoint: as the ImageNet example."""

import argparse

import torch
import torch.distributed as dist
from tiny import Net, Pictures, digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--resume", default="")
args = parser.parse_args()


def train(loader, model, criterion, optimizer, epoch):
    model.train()
    for i, (images, target) in enumerate(loader):
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 2 == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}] Loss {loss.item():.4f}")


def validate(loader, model):
    model.eval()
    correct, seen = 0, 0
    with torch.no_grad():
        for images, target in loader:
            correct += (model(images).argmax(1) == target).sum().item()
            seen += len(target)
    total = torch.tensor([correct, seen])
    dist.all_reduce(total)
    correct, seen = total.tolist()
    return correct / seen


dist.init_process_group("gloo")
torch.manual_seed(7)
model = DistributedDataParallel(Net())
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
start_epoch, best_acc1 = 0, 0.0
if args.resume:
    checkpoint = torch.load(args.resume)
    start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
train_dataset, val_dataset = Pictures(28, augment=True), Pictures(12, seed=1)
train_sampler = DistributedSampler(train_dataset)
val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
train_loader = DataLoader(train_dataset, batch_size=3, num_workers=2, sampler=train_sampler)
val_loader = DataLoader(val_dataset, batch_size=3, num_workers=2, sampler=val_sampler)

for epoch in range(start_epoch, args.epochs):
    train_sampler.set_epoch(epoch)
    train(train_loader, model, criterion, optimizer, epoch)
    acc1 = validate(val_loader, model)
    scheduler.step()
    best_acc1 = max(acc1, best_acc1)
    if dist.get_rank() == 0:
        checkpoint = {
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "best_acc1": best_acc1,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        torch.save(checkpoint, "checkpoint.pth.tar")
print("bits", digest(model, optimizer, scheduler, best_acc1))
dist.destroy_process_group()
