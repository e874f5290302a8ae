"""Three tenants on four slots of `pliant serve`, live: their parts of the device time, and how soon they borrow and give back.

    python benchmarks/tenants.py                                 # 180 s of load, then 5 times borrowed and given back
    python benchmarks/tenants.py --seconds 60 --repeat 2 --weights 2,1,1 --json FILE

Each tenant has an elastic job that never ends, so the rule says four slots times its weight over all weights. Device time is
what the server says that each has (`GET /cluster`), every 50 ms. Then the first tenant's job is stopped and another one of its
is submitted, in turn. To give back takes from the submission to the start of the job, by the job's history; to borrow, from the
request to stop the job, which ends after its step, until others have all slots. Goals: parts within 5 % of the rule, a second to give back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "repro")]

from pliant_repro.contest import form  # noqa: E402

from pliant.jobs.client import JobsClient, ServerAddress, find_server  # noqa: E402
from pliant.jobs.schema import job_from_json  # noqa: E402

SLOTS, REPLICAS = 4, 12
NAMES = ("a", "b", "c")
WITHIN = 0.05
GIVEN_BACK_S = 1.0
SAMPLE_S = 0.05
WAIT_S = 180.0
PLIANT = (sys.executable, "-c", "from pliant.cli.main import main; main()")
PROGRAM = """
import time, torch, pliant
torch.set_num_threads(1)
job = pliant.join(replicas=12)
model = torch.nn.Linear(8, 2)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
loader = job.loader(torch.utils.data.TensorDataset(torch.randn(4800, 8), torch.randint(2, (4800,))), batch_size=8)
for epoch in job.epochs(10000):
    for step in loader:
        for x, y in step:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
"""


def until(happened: Callable[[], Any], what: str) -> Any:
    """Return what `happened` returns, once that is something."""
    deadline_s = time.monotonic() + WAIT_S
    while not (found := happened()):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"waited {WAIT_S:g} s for {what}")
        time.sleep(SAMPLE_S)  # pacing a poll with a deadline
    return found


class SharedCluster:
    """A server with a client for its owner and for each tenant."""

    def __init__(self, folder: Path, clients: dict[str, JobsClient]) -> None:
        self._folder, self._clients = folder, clients
        self.owner = clients[""]

    def submit(self, tenant: str, name: str) -> None:
        job = {"name": name, "program": str(self._folder / "train.py"), "directory": str(self._folder)}
        self._clients[tenant].submit(job_from_json({**job, "replicas": REPLICAS, "max": SLOTS}))

    def has(self) -> dict[str, int]:
        """Return the slots that each tenant has."""
        return {each.name: each.has.get("cpu", 0) for each in self.owner.cluster().tenants}

    def at_s(self, job: str, what: str) -> float:
        """Return when something happened to a job for the first time, by its history; 0 if it has not."""
        return next((event.at for event in self.owner.job(job).events if event.what == what), 0.0)

    def num_dropped(self) -> int:
        """Return how many times workers were killed because they did not leave a slot in time."""
        names = [job.name for job in self.owner.jobs()]
        return sum(event.what == "dropped" for name in names for event in self.owner.job(name).events)

    def is_measured(self, job: str) -> bool:
        return self.owner.job(job).steps_per_s is not None


@contextlib.contextmanager
def shared_cluster(folder: Path, weights: dict[str, float]) -> Iterator[SharedCluster]:
    """Run a server until the block ends; then all of its jobs are killed."""
    (folder / "train.py").write_text(PROGRAM)
    tokens = {name: os.urandom(16).hex() for name in weights}
    for name, token in tokens.items():
        (folder / f"{name}.token").write_text(token)
    entries = [f"{name}: {{weight: {weight}, token_file: {name}.token}}\n" for name, weight in weights.items()]
    (folder / "tenants.yml").write_text("".join(entries))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PLIANT_")}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "repro"), clean.get("PYTHONPATH", "")])
    state = folder / "state"
    words = ["serve", "--state", state, "--port", "0", "--devices", f"cpu={SLOTS}", "--tenants", folder / "tenants.yml"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [*PLIANT, *map(str, words)], env={**clean, "PYTHONPATH": paths}, stdout=log, stderr=log
        )
    try:
        until((state / "server.json").exists, f"the server: {(folder / 'log').read_text()}")
        address = find_server(state=str(state), environ={})
        with contextlib.ExitStack() as stack:
            given = {name: ServerAddress(url=address.url, token=token) for name, token in tokens.items()}
            clients = {name: stack.enter_context(JobsClient(each)) for name, each in {"": address, **given}.items()}
            try:
                yield SharedCluster(folder, clients)
            finally:
                for job in clients[""].jobs():
                    clients[""].stop(job.name, kill=True)
                until(lambda: all(job.is_over for job in clients[""].jobs()), "the jobs to end")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def measure_parts(cluster: SharedCluster, seconds: float) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return each tenant's part of the device time, and who had what, whenever that changed."""
    spent: Counter[str] = Counter()
    history: list[dict[str, Any]] = []
    begun_s = before_s = time.monotonic()
    has = cluster.has()
    while before_s - begun_s < seconds:
        time.sleep(SAMPLE_S)
        now_s, now = time.monotonic(), cluster.has()
        for name, count in has.items():
            spent[name] += count * (now_s - before_s)
        if not history or history[-1]["has"] != now:
            history.append({"at_s": round(now_s - begun_s, 2), "has": now})
        before_s, has = now_s, now
    return {name: spent[name] / spent.total() for name in NAMES}, history


def measure_borrowing(cluster: SharedCluster, turn: int) -> dict[str, float]:
    """Stop the first tenant's job and submit another one; return how long it took to borrow and to give back."""
    old, new = f"a-{turn}", f"a-{turn + 1}"
    cluster.owner.stop(old)

    def all_borrowed_s() -> float:
        has = cluster.has()
        return time.time() if has["b"] + has["c"] == SLOTS else 0.0

    borrowed_s = until(all_borrowed_s, "the others to borrow") - cluster.at_s(old, "ending")
    until(lambda: all(cluster.is_measured(name) for name in ("b-0", "c-0")), "the others to train on all slots")
    cluster.submit("a", new)
    started_s = until(lambda: cluster.at_s(new, "starting"), "its start")
    given_back_s = started_s - cluster.at_s(new, "submitted")
    until(lambda: cluster.is_measured(new), "it to train")
    return {"borrowed_s": round(borrowed_s, 3), "given_back_s": round(given_back_s, 3)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    weights = dict(zip(NAMES, map(float, options.weights.split(",")), strict=True))
    rule = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    with (
        tempfile.TemporaryDirectory(prefix="pliant-tenants-") as folder,
        shared_cluster(Path(folder), weights) as cluster,
    ):
        for name in NAMES:
            cluster.submit(name, f"{name}-0")
        until(lambda: all(cluster.is_measured(f"{name}-0") for name in NAMES), "all jobs to train")
        parts, history = measure_parts(cluster, options.seconds)
        turns = [measure_borrowing(cluster, turn) for turn in range(options.repeat)]
        num_dropped = cluster.num_dropped()
    off = {name: parts[name] / rule[name] - 1 for name in NAMES}
    remarks = [
        f"{name} had {parts[name]:.1%}, the rule says {rule[name]:.1%}" for name in NAMES if abs(off[name]) > WITHIN
    ]
    times = {key: [turn[key] for turn in turns] for key in ("borrowed_s", "given_back_s")}
    if turns and max(times["given_back_s"]) > GIVEN_BACK_S:
        remarks.append(f"given back after {max(times['given_back_s']):.2f} s, the goal is {GIVEN_BACK_S:g} s")
    args = {"seconds": options.seconds, "repeat": options.repeat, "weights": options.weights}
    return form(
        "tenants", args, not remarks, remarks, rule=rule, parts=parts, off=off, **times, num_dropped=num_dropped,
        medians={key: statistics.median(values) for key, values in times.items() if values}, history=history,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="how long shares are measured")
    parser.add_argument("--repeat", type=int, default=5, help="how often devices are borrowed and given back")
    parser.add_argument("--weights", default="3,2,2", help="of the three tenants")
    parser.add_argument("--json", default="", help="file for the result")
    options = parser.parse_args()
    result = run(options)
    shown = {key: value for key, value in result.items() if key not in ("history", "machine")}
    print(json.dumps(shown, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
