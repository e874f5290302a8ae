"""Storms: jobs of several shapes whose workers are killed, stopped, sent away and added at random.

The jobs are also told to end, and resumed as a whole. After every step each worker must have the bits of a job that nothing has
happened to.

By hand: `python tests/train/storm.py SHAPE SEED...` prints one line for each storm.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gang import Gang, gang
from programs import Centered, Images, ImageStream, StatelessStream, may_have_children, seed_all
from stage import new_workers, spec_of, view_of
from subject import REPLACED_EXIT
from torch import Tensor, nn

import pliant
from pliant.cluster import Worker
from pliant.elastic.client import ConfigClient
from pliant.elastic.server import ConfigServer, ServerConfig
from pliant.errors import ClusterCleared, MustBeReplaced

STALL_S = 60.0
"""A storm in which no step is done for so long has a worker that hangs."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a program does."""

    replicas: int = 4
    sync: str = "fifo"
    has_two_models: bool = False
    """Two models, and three passes in a step, as in a GAN; else one pass, or two."""
    passes: int = 1
    evaluates: bool = False
    """Whether it evaluates before the loop, in the outer body, and after the loop."""
    data: str = "images"
    """images, stream, stream-with-state, or steps: the program makes its own batches"""
    accumulates: int = 1
    """Gradients are cleared every so many steps."""
    leaves: bool = False
    """Whether it leaves some steps by `continue` before their pass, and its epochs by `break` after one."""
    num_workers: int = 0
    """Processes that load, for each replica."""
    saves: bool = False
    """Whether it asks for checkpoints itself."""
    sync_buffers: bool = True


SHAPES = {
    "plain": Shape(),
    "two-passes": Shape(passes=2, replicas=3),
    "gan": Shape(has_two_models=True),
    "evaluating": Shape(evaluates=True, replicas=6),
    "gan-evaluating": Shape(has_two_models=True, evaluates=True),
    "priority": Shape(sync="priority"),
    "priority-evaluating": Shape(sync="priority", evaluates=True, replicas=6),
    "priority-two-passes": Shape(sync="priority", passes=2),
    "stream": Shape(data="stream"),
    "stream-with-state": Shape(data="stream-with-state", evaluates=True),
    "priority-stream": Shape(sync="priority", data="stream-with-state"),
    "steps": Shape(data="steps", evaluates=True, replicas=3),
    "accumulating": Shape(accumulates=3, evaluates=True),
    "leaving": Shape(leaves=True, evaluates=True, replicas=3),
    "priority-leaving": Shape(sync="priority", leaves=True, saves=True),
    "loading": Shape(num_workers=1, passes=2, replicas=3),
    "saving": Shape(saves=True, evaluates=True, sync_buffers=False),
}
EPOCHS, STEPS_PER_EPOCH = 4, 20


# --- in a worker ---


def train(_: int, shape: str, environ: dict[str, str], journal: str, nap_s: float) -> int:
    """Train to the end, and write down what every step leaves; return the exit code."""
    may_have_children()
    for name in [name for name in os.environ if name.startswith("PLIANT_")]:
        del os.environ[name]
    os.environ.update(environ)
    output = open(f"{journal}.out", "ab", buffering=0)  # noqa: SIM115 - of the process
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=output)
    with open(journal, "ab", buffering=0) as file:

        def write(kind: str, **facts: Any) -> None:
            file.write(json.dumps([kind, facts]).encode() + b"\n")

        try:
            _train(SHAPES[shape], write, nap_s)
        except SystemExit as left:
            write("left", code=left.code or 0)
            return int(left.code or 0)
        except MustBeReplaced as error:
            write("replaced", why=str(error))
            return REPLACED_EXIT
    return 0


class Naps:
    """Short sleeps at random, other ones in every process, so that workers meet in every order."""

    def __init__(self, longest_s: float) -> None:
        self._chance, self._longest_s = random.Random(os.getpid()), longest_s

    def __call__(self) -> None:
        if self._longest_s and self._chance.random() < 0.3:
            time.sleep(self._chance.random() * self._longest_s)


def _net(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 24),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        Centered(24),
        nn.Dropout(0.2),
        nn.Linear(24, outputs),
    )


def _train(shape: Shape, write: Any, nap_s: float) -> None:
    seed_all(3)
    nap = Naps(nap_s)
    net, second = _net(10), nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 64))
    models = [net, second] if shape.has_two_models else [net]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    images = Images(STEPS_PER_EPOCH * shape.replicas * 2)
    with pliant.join(replicas=shape.replicas, sync=shape.sync, seed=5, verify=2) as job:
        job.wrap(models, optimizers, bucket_cap_mb=0.002, sync_buffers=shape.sync_buffers)
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 7, 0.5) for each in optimizers]
        for number, scheduler in enumerate(schedulers):
            job.track(f"scheduler {number}", scheduler)
        state = job.state(begun=0, epochs=[], totals=[], drawn=[], loss=0.0)

        def digest() -> str:
            """Of four parts, so that a difference tells where it is."""
            values = repr((sorted(vars(state).items()), [each.last_epoch for each in schedulers]))
            kept = [value for optimizer in optimizers for each in optimizer.state.values() for value in each.values()]
            parameters = [parameter for model in models for parameter in model.parameters()]
            parts = [
                b"".join(each.detach().numpy().tobytes() for each in tensors)
                for tensors in (parameters, kept, job._run.trainer.state.first_buffers)
            ]
            return "-".join(hashlib.sha256(part).hexdigest()[:16] for part in (values.encode(), *parts))

        def committed(event: Any) -> None:
            # Looking at parameters would wait for updates that are on their way. If one is lost, the step is taken back.
            is_sure = not job.has_pending_updates and job._run.trainer.deferred.lost is None
            seen = digest() if is_sure else None
            write("commit", step=event.step, view=job.view, rank=event.rank, size=event.num_workers, digest=seen)

        job.on_commit(committed)

        def evaluate() -> None:
            net.eval()
            for _, x, y in job.evaluate(Images(10), 2):
                nap()
                job.total(right=int((net(x).argmax(1) == y).sum()), loss=F.cross_entropy(net(x), y).item())
            net.train()
            state.totals = [*state.totals, sorted(job.total().items())]

        def body(step: Any) -> None:
            state.begun += 1
            nap()
            torch.rand(1)
            if shape.evaluates and step.number % 7 == 3:
                evaluate()
            _passes(shape, job, step, models, optimizers, images, nap)
            for scheduler in schedulers:
                scheduler.step()
            state.loss = step["loss"]
            if shape.evaluates:
                if step.number % 4 == 1:
                    evaluate()
                if step.number % 5 == 2:
                    state.drawn = [*state.drawn, job.on_first(lambda: float(torch.rand(())))]
                if step.number % 6 == 3:
                    state.drawn = [*state.drawn, *job.on_replicas(lambda replica: replica + float(torch.rand(())))]
            if shape.saves and step.number % 5 == 3 and job._run.spec is not None:
                job.save()
            nap()

        if shape.data == "steps":
            for step in job.steps(EPOCHS * STEPS_PER_EPOCH):
                body(step)
        else:
            loader = job.loader(_data(shape, images), batch_size=2, num_workers=shape.num_workers)
            for epoch in job.epochs(EPOCHS):
                state.epochs = [*state.epochs, epoch]
                if shape.evaluates:
                    evaluate()
                for step in loader:
                    if shape.leaves and step.index % 5 == 2:
                        torch.rand(2)
                        continue
                    body(step)
                    if shape.leaves and step.index == STEPS_PER_EPOCH - 5:
                        break
                if shape.evaluates:
                    evaluate()
        write("finished", step=job.step, digest=digest())


def _data(shape: Shape, images: Images) -> Any:
    streams = {"stream": StatelessStream, "stream-with-state": ImageStream}
    if shape.data == "images":
        return images
    return lambda replica: streams[shape.data](replica, STEPS_PER_EPOCH * 2)


def _passes(
    shape: Shape, job: Any, step: Any, models: Sequence[nn.Module], optimizers: Sequence[Any], images: Images, nap: Naps
) -> None:
    def batch_of(given: Any) -> tuple[Tensor, Tensor]:
        if shape.data == "steps":
            found = [images[int(torch.randint(0, len(images), ()))] for _ in range(2)]
            return torch.stack([x for _, x, _ in found]), torch.stack([y for _, _, y in found])
        return given[1], given[2]

    def clear() -> None:
        if (step.number + 1) % shape.accumulates == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()

    net = models[0]
    if shape.has_two_models:
        for given in step:
            x, _ = batch_of(given)
            nap()
            fake = models[1](torch.randn(len(x), 5))
            loss = F.cross_entropy(net(fake.view(-1, 1, 8, 8)), torch.full((len(x),), 1))
            loss.backward()
            step.keep(fake=fake.detach())
            step.log(loss=loss)
        optimizers[1].step()
        clear()
        for given in step:
            x, y = batch_of(given)
            F.cross_entropy(net(x), y).backward()
        for _ in step:
            nap()
            fake = step.kept["fake"]
            F.cross_entropy(net(fake.view(-1, 1, 8, 8)), torch.full((len(fake),), 0)).backward()
        optimizers[0].step()
        clear()
        return
    for number in range(shape.passes):
        for given in step:
            x, y = batch_of(given)
            nap()
            loss = F.cross_entropy(net(x), (y + number) % 10)
            loss.backward()
            if number == 0:
                step.log(loss=loss)
        optimizers[0].step()
        clear()


# --- the storm ---


@dataclass(slots=True)
class Crew:
    """A worker process."""

    worker: Worker
    gang: Gang
    journal: Path
    code: int | None = None

    @property
    def lives(self) -> bool:
        return self.code is None


@dataclass(slots=True)
class Seen:
    """What all journals say."""

    digests: dict[int, set[str]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    step: int = 0
    replaced: list[str] = field(default_factory=list)


def read(folder: Path) -> Seen:
    seen = Seen()
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # a torn last line of somebody who was killed
                kind, facts = json.loads(line)
                if kind == "commit":
                    seen.step = max(seen.step, facts["step"])
                    if facts["digest"] is not None:
                        seen.digests.setdefault(facts["step"], set()).add(facts["digest"])
                elif kind == "finished":
                    seen.finished.append(facts["digest"])
                elif kind == "replaced":
                    seen.replaced.append(facts["why"])
    return seen


class Failed(Exception):
    """A storm has shown a mistake."""


class Storm:
    """One job and what happens to it."""

    def __init__(self, shape: str, seed: int, folder: Path, nap_s: float = 0.06) -> None:
        self.shape, self.folder, self.chance = shape, folder, random.Random(f"{shape} {seed}")
        self.crew: list[Crew] = []
        self.events: Counter[str] = Counter()
        self._nap_s = nap_s
        self._stopped: list[Crew] = []
        self._log = (folder / "events.log").open("a")

    def note(self, what: str) -> None:
        self._log.write(f"{time.monotonic():.3f} {what}\n")
        self._log.flush()

    def run(self) -> None:
        """Let the job live, again and again, until it has finished."""
        try:
            for life in range(12):
                with self._life(life) as client:
                    self._live(client, is_last=life == 11)
                if read(self.folder).finished:
                    return
            raise Failed("the job has not finished in 12 lives")
        finally:
            for each in self.crew:
                each.gang.close()

    @contextlib.contextmanager
    def _life(self, number: int) -> Iterator[ConfigClient]:
        with ConfigServer(ServerConfig(port=0, open=True)).running() as server, ConfigClient(server.url) as client:
            self._url = server.url
            self.note(f"life {number}")
            client.put(view_of(self._new_workers(self.chance.randint(1, 4))))
            yield client

    def _new_workers(self, count: int) -> list[Worker]:
        """Return workers whose addresses nobody has had before."""
        known = {each.worker for each in self.crew}
        while known.intersection(found := new_workers(count)):
            pass
        return found

    def _live(self, client: ConfigClient, *, is_last: bool) -> None:
        began_s, told_s = time.monotonic(), 0.0
        step, step_s = -1, began_s
        next_s = began_s + self.chance.random()
        while True:
            self._tend(client)
            living = [each for each in self.crew if each.lives]
            now_s = time.monotonic()
            over = client.membership().over
            if over and not living:
                return
            if (found := read(self.folder).step) != step:
                step, step_s = found, now_s
            if now_s - step_s > STALL_S:
                self._dump()
                raise Failed(f"no step after {step} for {STALL_S:g} s: {client.membership()}")
            if not over and now_s > next_s:
                next_s = now_s + self.chance.choice([0.02, 0.1, 0.3, 0.6])
                self._happen(client, is_last=is_last)
            elif over and not told_s:
                told_s = now_s

    def _happen(self, client: ConfigClient, *, is_last: bool) -> None:
        members = [each for each in self.crew if each.lives and each.worker in client.membership().members]
        living = [each for each in self.crew if each.lives]
        event = self.chance.choices(
            ["kill", "add", "view", "leave", "pause", "clear", "kill all", "remove"], [6, 6, 3, 3, 3, 1, 0.5, 2]
        )[0]
        if not members or (event in ("clear", "kill all") and is_last):
            return
        self.events[event] += 1
        # Now and then one that has not joined yet.
        one = self.chance.choice(living if event == "kill" and self.chance.random() < 0.2 else members)
        self.note(f"{event} {one.worker.port} of {[each.worker.port for each in members]}")
        with contextlib.suppress(ClusterCleared, ProcessLookupError):
            match event:
                case "kill":
                    one.gang.kill(0)
                case "add" if len(living) < 5:
                    client.add_worker(self._new_workers(1)[0])
                case "view":
                    kept = self.chance.sample(members, self.chance.randint(1, len(members)))
                    view = [
                        *(each.worker for each in kept),
                        *self._new_workers(self.chance.randint(0, 4 - min(4, len(kept)))),
                    ]
                    self.chance.shuffle(view)
                    client.put(view_of(view))
                case "leave" if len(members) > 1 or self.chance.random() < 0.2:
                    one.gang.kill(0, signal.SIGTERM)
                case "remove" if len(members) > 1:
                    if one.worker in (client.get() or view_of([])).workers:
                        client.remove_worker(one.worker)
                case "pause":
                    one.gang.kill(0, signal.SIGSTOP)
                    self._stopped.append(one)
                case "clear":
                    client.clear()
                case "kill all":
                    for each in living:
                        each.gang.kill(0)

    def _tend(self, client: ConfigClient) -> None:
        """Do the runner's work."""
        time.sleep(0.02)
        while self._stopped:
            with contextlib.suppress(ProcessLookupError):
                time.sleep(0.05)
                self._stopped.pop().gang.kill(0, signal.SIGCONT)
        for each in self.crew:
            if each.lives and not each.gang.processes[0].is_alive():
                self._reap(each, client)
        view = client.get()
        known = {each.worker for each in self.crew}
        for worker in view.workers if view is not None else ():
            if worker not in known:
                self._start(worker, client)

    def _start(self, worker: Worker, client: ConfigClient) -> None:
        view = client.get()
        assert view is not None
        journal = self.folder / f"{len(self.crew):03d}-{worker.port}.jsonl"
        spec = spec_of(
            worker,
            view,
            elastic=True,
            config_server=self._url,
            checkpoint_dir=str(self.folder / "checkpoints"),
            checkpoint_every=4,
            resume="auto",
        )
        self.crew.append(
            Crew(worker, Gang(train, [(self.shape, spec.to_environ(), str(journal), self._nap_s)]), journal)
        )

    def _reap(self, each: Crew, client: ConfigClient) -> None:
        process = each.gang.processes[0]
        process.join(10)
        each.code = process.exitcode
        if each.code == 0:
            each.code = each.gang.hear(0, 5)  # raises what the worker raised
        self.note(f"{each.worker.port} ended with {each.code}")
        if each.code == 0:
            membership = client.membership()
            others = any(other.lives and other.worker in membership.members for other in self.crew)
            if others or membership.over or each.worker not in membership.members:
                return
            # The only one was ended at once, by a second notice.
        elif each.code not in (-signal.SIGKILL, REPLACED_EXIT):
            raise Failed(f"{each.journal} ended with {each.code}")
        with contextlib.suppress(ClusterCleared):
            wanted = client.get()
            if (
                wanted is not None
                and wanted.workers
                and not any(other.lives and other.worker in wanted.workers for other in self.crew)
            ):
                client.add_worker(self._new_workers(1)[0])
            client.lost(each.worker, f"exit code {each.code}")
            if self.chance.random() < 0.5:
                client.add_worker(self._new_workers(1)[0])

    def _dump(self) -> None:
        """Have every worker write where it is."""
        for each in self.crew:
            if each.lives:
                with contextlib.suppress(ProcessLookupError):
                    each.gang.kill(0, signal.SIGUSR1)
        time.sleep(1)


def undisturbed(shape: str, folder: Path) -> Seen:
    """What the job does alone."""
    folder.mkdir(exist_ok=True)
    if not list(folder.glob("*.jsonl")):
        with gang(train, [(shape, {}, str(folder / "alone.jsonl"), 0.0)]) as alone:
            [code] = alone.results(120)
            assert code == 0, (folder / "alone.jsonl.out").read_text()
    return read(folder)


def check(shape: str, seed: int, folder: Path) -> Storm:
    """Raise an error of a storm that has gone wrong."""
    expected = undisturbed(shape, folder / f"alone-{shape}")
    place = folder / f"{shape}-{seed}"
    place.mkdir()
    storm = Storm(shape, seed, place)
    storm.run()
    seen = read(place)
    [digest] = expected.finished
    wrong = [step for step, found in sorted(seen.digests.items()) if not found <= expected.digests.get(step, found)]
    if wrong:
        raise Failed(f"other bits after steps {wrong}")
    if set(seen.finished) != {digest}:
        raise Failed(f"other bits at the end: {seen.finished}")
    storm.events["replaced"] = len(seen.replaced)
    return storm


if __name__ == "__main__":
    where = Path(os.environ.get("STORMS", "") or tempfile.mkdtemp())
    failures = 0
    for seed in sys.argv[2:]:
        for shape in SHAPES if sys.argv[1] == "all" else sys.argv[1].split(","):
            began_s = time.monotonic()
            try:
                storm = check(shape, int(seed), where)
                said = f"ok {dict(storm.events)}"
            except BaseException as error:
                failures += 1
                said = f"FAILED {type(error).__name__}: {error}"
            print(f"{time.strftime('%H:%M:%S')} {shape} {seed} {time.monotonic() - began_s:.1f}s {said}", flush=True)
    sys.exit(failures > 0)
