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
        wrapped, optimizer = job.wrap(model, sgd)
        loader = job.loader(torch.utils.data.TensorDataset(points, answers), batch_size=8)
        for _ in job.epochs(1_000_000):
            for step in loader:
                for x, y in step:
                    time.sleep(0.01)
                    loss = F.cross_entropy(wrapped(x), y)
                    loss.backward()
                    step.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()
                if step.number % 50 == 0 and job.is_first:
                    print(f"step {step.number}: loss {step['loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
