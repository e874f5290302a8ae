"""Train torchvision's ResNet-18 on handwritten digits, with a falling learning rate and checkpoints for any number of workers.

    python examples/resnet.py                                               # one process: two replicas take turns
    pliant run -w -np 2 --checkpoint-dir run --checkpoint-every 20 examples/resnet.py
    pliant run -w -np 1 --checkpoint-dir run --resume auto examples/resnet.py     # after Ctrl-C

The images are scikit-learn's 8 x 8 pixels, enlarged. With GPUs every worker uses one; this example was run on CPUs only.
"""

import argparse
import hashlib

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import pliant
from pliant.torchvision_import import import_torchvision  # also works beside a torch for CPUs


def digits(samples: int, pixels: int) -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images[:samples] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    large = F.interpolate(small, size=(pixels, pixels), mode="bilinear")
    return TensorDataset(large.expand(-1, 3, -1, -1), torch.tensor(labels[:samples]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1797)
    parser.add_argument("--pixels", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()

    torch.set_num_threads(1)  # the same number on every machine: other numbers of threads give other bits
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = import_torchvision().models.resnet18(num_classes=10).to(device)
    with pliant.join(replicas=2) as job:
        sgd = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
        dataset = digits(args.samples, args.pixels)
        model, optimizer = job.wrap(net, sgd)
        loader = job.loader(dataset, batch_size=args.batch_size, shuffle=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, args.epochs * len(loader))
        job.track("scheduler", scheduler)  # new workers and checkpoints get it
        for epoch in job.epochs(args.epochs):
            for step in loader:
                for images, labels in step:
                    loss = F.cross_entropy(model(images.to(device)), labels.to(device))
                    loss.backward()
                    step.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if job.is_first and step.number % 20 == 0:  # the mean over all replicas, the same on every worker
                    print(f"epoch {epoch}, step {step.number}: loss {step['loss']:.4f}, {job.size} workers", flush=True)
        if job.is_first:
            state = b"".join(tensor.cpu().numpy().tobytes() for tensor in net.state_dict().values())
            print(f"model {hashlib.sha256(state).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
