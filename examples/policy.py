"""Write your own policy: ten lines that double the batch size when the gradient is noisy.

    python examples/policy.py                                        # one process: four replicas take turns
    pliant run -np 2 --record run.jsonl examples/policy.py           # two workers with two replicas each
    pliant run -np 4 --replay run.jsonl examples/policy.py           # replays its decisions, to the same bits
    pliant run -np 2 --policy policy:DoubleWhenNoisy:most=64 train.py   # in another program; this folder in PYTHONPATH

Every worker has a copy of the policy and sees the same numbers. All workers apply the first worker's decision at the end of the
next step.
"""

import torch
import torch.nn.functional as F

import pliant


class DoubleWhenNoisy(pliant.Policy):
    needs = {"noise_scale": 1}  # noqa: RUF012 - what to measure, and every how many steps

    def __init__(self, most: int = 128) -> None:
        self.most = most
        self._changed_at = 0  # attributes with a leading underscore are state: new workers and checkpoints get them

    def after_step(self, seen: pliant.Observation) -> pliant.SetBatchSize | None:
        noise, size = seen.noise_scale, min(self.most, 2 * seen.batch_size)
        if (
            noise is None
            or noise < 4 * seen.global_batch
            or size == seen.batch_size
            or seen.step < self._changed_at + 50
        ):
            return None
        self._changed_at = seen.step
        return pliant.SetBatchSize(size=size, reason=f"noise scale {noise:.0f}, global batch {seen.global_batch}")


def main() -> None:
    torch.manual_seed(1)
    points = torch.randn(2048, 8)
    answers = (points @ torch.randn(8) + torch.randn(2048) > 0).long()  # half of it is noise
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = torch.utils.data.TensorDataset(points, answers)
    with pliant.join(replicas=4, policies=[DoubleWhenNoisy()]) as job:
        model, optimizer = job.wrap(model, optimizer)
        loader = job.loader(dataset, batch_size=4)
        for epoch in job.epochs(2):
            for step in loader:
                for x, y in step:
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    step.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()
                if job.is_first and step.number % 20 == 0:
                    print(f"epoch {epoch}: loss {step['loss']:.3f}, batch of a replica {job.batch_size}")


if __name__ == "__main__":
    main()
