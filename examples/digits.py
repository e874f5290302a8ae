"""Train on handwritten digits with pliant: the program of `digits_ddp.py`, with the same final hash on any number of workers.

python examples/digits.py                                                  # one process: two replicas take turns
pliant run -np 2 examples/digits.py                                        # one worker per replica
pliant run -w -np 2 --resize-schedule 40:1,80:2 examples/digits.py         # the number of workers changes twice
"""

import argparse
import hashlib

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import pliant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    job = pliant.join(replicas=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = job.wrap(model, optimizer)
    loader = job.loader(dataset, batch_size=32, shuffle=True)
    for epoch in job.epochs(args.epochs):
        for step in loader:
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        if job.is_first:
            print(f"epoch {epoch} done, on {job.size} workers", flush=True)
    if job.is_first:
        state = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        right = (model.eval()(dataset.tensors[0]).argmax(1) == dataset.tensors[1]).float().mean().item()
        print(f"model {hashlib.sha256(state).hexdigest()[:16]}, {right:.1%} right", flush=True)


if __name__ == "__main__":
    main()
