"""Fifth version: a second policy asks for workers; the first is now chosen on the command line.

pliant run -w -np 1 -H 127.0.0.1:2 --policy grow-batch-size:max_batch=64,warmup=20,interval=20,lr=sqrt examples/policies/v5_workers.py
python examples/policies/v5_workers.py       # without the first policy the batch stays, and no worker is asked for
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import pliant


class MoreForLargeBatches(pliant.Policy):
    """Asks for one worker per replica as soon as the batch is large enough."""

    def __init__(self, worth: int = 16) -> None:
        self.worth = worth
        self._asked = False

    def after_step(self, seen: pliant.Observation) -> pliant.Resize | None:
        if self._asked or seen.num_workers == seen.replicas or seen.batch_size < self.worth:
            return None
        self._asked = True
        return pliant.Resize(workers=seen.replicas, reason=f"batch {seen.batch_size} keeps a worker per replica busy")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    pixels, answers = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pliant.join(replicas=2, policies=[MoreForLargeBatches()]) as job:
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
