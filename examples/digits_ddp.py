"""Train on handwritten digits with stock DDP; `digits.py` is the same program with pliant.

torchrun --nproc-per-node 2 examples/digits_ddp.py                         # prints the same hash as digits.py
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} done, on {dist.get_world_size()} workers", flush=True)
    if dist.get_rank() == 0:
        state = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        right = (model.eval()(dataset.tensors[0]).argmax(1) == dataset.tensors[1]).float().mean().item()
        print(f"model {hashlib.sha256(state).hexdigest()[:16]}, {right:.1%} right", flush=True)
    dist.barrier()  # gloo's threads are done with the gradients: torch 2.13 may abort at the end otherwise
    del model  # it may hang when a model outlives its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
