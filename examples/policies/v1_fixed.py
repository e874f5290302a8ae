"""First version: train on digits with two replicas and a fixed batch size.

python examples/policies/v1_fixed.py
pliant run -np 2 --record run.jsonl examples/policies/v1_fixed.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import pliant


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    pixels, answers = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pliant.join(replicas=2) as job:
        model, optimizer = job.wrap(model, optimizer)
        loader = job.loader(TensorDataset(pixels, answers), batch_size=8, shuffle=True)
        for epoch in job.epochs(4):
            for step in loader:
                for x, y in step:
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    step.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()
            if job.is_first:
                right = (model(pixels).argmax(1) == answers).float().mean().item()
                print(f"epoch {epoch}: {right:.1%} right, batch {job.batch_size}, {job.step} steps", flush=True)


if __name__ == "__main__":
    main()
