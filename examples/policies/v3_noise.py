"""Third version: the batch grows with the noise scale of the gradient.

python examples/policies/v3_noise.py
pliant run -np 2 examples/policies/v3_noise.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import pliant


class GrowWithNoise(pliant.Policy):
    """Doubles the batch size while the noise scale is much larger than the batch."""

    needs = {"noise_scale": 1}  # noqa: RUF012 - what to measure, and every how many steps

    def __init__(self, most: int = 64, patience: int = 20) -> None:
        self.most, self.patience = most, patience
        self._changed_at = 0  # attributes with a leading underscore are state: new workers and resumed jobs get them

    def after_step(self, seen: pliant.Observation) -> pliant.SetBatchSize | None:
        size = 2 * seen.batch_size
        if seen.noise_scale is None or size > self.most or seen.step < self._changed_at + self.patience:
            return None
        if seen.noise_scale < 2 * seen.global_batch:
            return None
        self._changed_at = seen.step
        return pliant.SetBatchSize(size=size, reason=f"noise scale {seen.noise_scale:.0f}, batch {seen.global_batch}")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    pixels, answers = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pliant.join(replicas=2, policies=[GrowWithNoise()]) as job:
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
