"""Average models instead of gradients: the same loop with four optimizers.

pliant run -np 3 examples/averaging.py --optimizer sma          # every step pulls all models towards their mean
pliant run -np 3 examples/averaging.py --optimizer pair         # every step averages with the model of one other worker
pliant run -np 3 examples/averaging.py --optimizer adaptive     # sma, and after 40 steps synchronous SGD
pliant run -np 3 examples/averaging.py --optimizer sync         # synchronous SGD

After every epoch each worker prints the accuracy and the hash of its own model. With `sync`, and with `adaptive` after the
change, the hash is the same on all workers. Workers may join and leave: add `-w --resize-schedule 30:4,60:2`.
"""

import argparse
import hashlib

import torch
from torch import nn

import pliant


class Rings(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points in the plane. The class of a point is the ring around the origin that it lies in."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(length, 2, generator=generator)
        self.rings = self.points.norm(dim=1).mul(2).long().clamp(max=3)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.rings[index]


def averaged(inner: torch.optim.Optimizer, name: str) -> torch.optim.Optimizer:
    if name == "sma":
        return pliant.SynchronousAveraging(inner, alpha=0.1)
    if name == "pair":
        return pliant.PairAveraging(inner)
    if name == "adaptive":
        return pliant.AdaptiveSGD(inner, change_step=40, alpha=0.1)
    return inner


def digest(model: nn.Module) -> str:
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(data).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=("sma", "pair", "adaptive", "sync"), default="sma")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(1)
    job = pliant.join()  # one replica, and so one model, per worker
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    inner = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = job.wrap(net, averaged(inner, args.optimizer))
    loader = job.loader(Rings(3000, 2), batch_size=32, shuffle=True)
    unseen = Rings(1000, 3)
    for epoch in job.epochs(args.epochs):
        for step in loader:
            for points, rings in step:
                nn.functional.cross_entropy(model(points), rings).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            right = (model(unseen.points).argmax(1) == unseen.rings).float().mean().item()
        print(f"epoch {epoch} rank {job.rank} of {job.size}: {right:.1%} right, model {digest(net)}", flush=True)


if __name__ == "__main__":
    main()
