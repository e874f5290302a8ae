"""A plain training loop for the cluster: classify points on two spirals.

    python examples/train.py                     # one process: four replicas take turns
    pliant run -np 2 examples/train.py           # two workers with two replicas each
    pliant submit examples/job.yml               # as many workers as the cluster has free devices; the number may change

All of them print the same last line: the hash of the model does not depend on the number of workers.
"""

import argparse
import hashlib

import torch
import torch.nn.functional as F

import pliant


def spirals(length: int) -> torch.utils.data.TensorDataset:
    arm = torch.arange(length) % 2
    turn = torch.rand(length) * 9 + 1
    angle = turn + arm * torch.pi
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 5 + torch.randn(length, 2) / 50
    return torch.utils.data.TensorDataset(points, arm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    torch.set_num_threads(1)  # the same number on every machine: other numbers of threads give other bits
    torch.manual_seed(1)
    dataset = spirals(4096)
    nn = torch.nn
    net = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    with pliant.join(replicas=4) as job:
        adam = torch.optim.Adam(net.parameters(), lr=1e-3)
        model, optimizer = job.wrap(net, adam)
        loader = job.loader(dataset, batch_size=16, shuffle=True)
        for epoch in job.epochs(args.epochs):
            for step in loader:
                for points, arms in step:
                    F.cross_entropy(model(points), arms).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for points, arms in job.evaluate(dataset, batch_size=512):  # the workers share the batches
                    job.total(right=(model(points).argmax(1) == arms).sum(), seen=len(arms))
            total = job.total()
            if job.is_first:
                right = total["right"] / total["seen"]
                print(f"epoch {epoch}: {right:.1%} right, on {job.size} workers", flush=True)
        if job.is_first:
            state = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
            print(f"model {hashlib.sha256(state).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
