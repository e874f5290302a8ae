"""The client app: trains on one client's data."""

from __future__ import annotations

import time

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from federated_digits.task import make_model, share_of
from pliant.fed.flower import introduction, metrics

app = ClientApp()


def data_of(context: Context) -> tuple[Tensor, Tensor]:
    run, client = context.run_config, int(context.node_config["partition-id"])
    return share_of(client, int(run["clients"]), int(run["seed"]))


@app.query()
def who(message: Message, context: Context) -> Message:
    inputs, _ = data_of(context)
    return Message(introduction(context, samples=len(inputs)), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    begun_s = time.perf_counter()
    torch.set_num_threads(1)
    orders = message.content["config"]
    inputs, labels = data_of(context)
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    # a stream of whole passes, each in an order that follows from the client and the round
    draw = torch.Generator().manual_seed(int(context.node_config["partition-id"]) * 100_003 + orders["server-round"])
    wanted = orders["local-steps"] * orders["batch-size"]
    passes = [torch.randperm(len(labels), generator=draw) for _ in range(-(-wanted // len(labels)))]
    seen = []
    for batch in torch.cat(passes)[:wanted].split(orders["batch-size"]):
        losses = nn.functional.cross_entropy(model(inputs[batch]), labels[batch], reduction="none")
        seen.append(losses.detach())
        gradients = torch.autograd.grad(losses.mean(), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= orders["lr"] * gradient
    first_pass = torch.cat(seen)[: len(labels)].numpy()
    told = metrics(first_pass, samples=len(labels), duration_s=time.perf_counter() - begun_s)
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": told})
    return Message(content, reply_to=message)
