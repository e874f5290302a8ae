"""A job that trains until it is told to stop, and reports its loss; for the page's tests."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

import pliant


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    points = torch.randn(512, 4)
    answers = (points.sum(1) > 0).long()
    model = torch.nn.Linear(4, 2)
    with pliant.join(replicas=2) as job:
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapped, optimizer, loader = job.wrap(model, sgd, torch.utils.data.TensorDataset(points, answers), batch_size=8)
        for _ in job.epochs(1_000_000):
            for x, y in loader:
                time.sleep(0.01)
                optimizer.zero_grad()
                loss = F.cross_entropy(wrapped(x), y)
                loss.backward()
                job.report(loss=loss.item())
                optimizer.step()
                if job.step % 50 == 0 and job.rank == 0:
                    print(f"step {job.step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
