"""A Ray cluster as a ground: each job is a `pliant run --on ray` on this machine, kept as on the local ground.

That process is the job's driver: it holds the job's devices in the cluster, and its runners are actors there. So jobs outlive the
scheduler, and a node that is lost is for each of them what a crash is. Where its devices are is Ray's business and the
driver's; the scheduler asks it, through its config server, to have others.
Record, checkpoints and the program must be on a file system that all nodes share.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping

from pliant.errors import ConfigError, ServerUnavailable
from pliant.launch.on_ray import cluster as ray_cluster
from pliant.launch.on_ray.run import JOB_FILE
from pliant.launch.ssh import NAMED
from pliant.sched.live.ground import Counts, Ended, Run
from pliant.sched.live.local import LocalGround, LocalRunning, run_command


class RayGround(LocalGround):
    """The devices of a Ray cluster: of these types, at most as many as were given; all of them where none were."""

    name = "ray"

    def __init__(self, devices: Counts, address: str = "auto", environ: Mapping[str, str] = os.environ) -> None:
        super().__init__({}, environ)
        self._most = dict(devices)
        self._address = address
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(ray_cluster.connected(address))
        self._devices = self._seen()
        missing = [kind for kind in devices if not self._devices.get(kind)]
        if missing:
            ray_cluster.check_devices({kind: devices[kind] for kind in missing}, ray_cluster.living_nodes())
        if not any(self._devices.values()):
            self._stack.close()
            raise ConfigError("the Ray cluster has no devices to give: add nodes with `ray start --address=...`")

    def devices(self) -> dict[str, int]:
        with contextlib.suppress(Exception):  # a cluster that cannot be asked now has not changed, as far as we know
            self._devices = self._seen()
        return dict(self._devices)

    def _seen(self) -> dict[str, int]:
        there = ray_cluster.total(ray_cluster.living_nodes())
        named = [kind for kind in there if kind not in ray_cluster.BUILT_IN] or ["gpu" if "gpu" in there else "cpu"]
        wanted = self._most or {kind: there.get(kind, 0) for kind in named}
        return {kind: min(most, there.get(kind, 0)) for kind, most in wanted.items()}

    def _made(self, run: Run) -> RayRunning:
        return RayRunning(run, self)

    def _order(self, run: Run, devices: Counts) -> tuple[list[str], Mapping[str, str]]:
        named = {NAMED: ",".join(run.spec.env)}
        return _command(run, devices, self._address), {**self._environ, **named}

    def close(self) -> None:
        self._stack.close()


class RayRunning(LocalRunning):
    """A run whose workers are on other machines."""

    def __init__(self, run: Run, ground: RayGround) -> None:
        super().__init__(run, ground)
        self._seen: Counter[str] = Counter()

    def assign(self, devices: Counts) -> None:
        self._wanted = {kind: count for kind, count in devices.items() if count}

    def resize(self, devices: Counts) -> None:
        with self._client() as client:
            if client.wanted().cleared:
                raise ServerUnavailable(f"job {self._run.spec.name}: it is ending")
            client.set_devices({kind: count for kind, count in devices.items() if count})
        self.assign(devices)

    def occupied(self) -> dict[str, int]:
        try:
            with self._client() as client:
                self._seen = Counter(client.occupied_devices())
        except ServerUnavailable:
            # It has not begun, has ended, or was killed; whatever it had is its own until all of it has gone.
            self._seen |= Counter(self._wanted)
        return dict(self._seen)

    def drop(self) -> None:
        with self._client() as client:
            client.drop_unwanted()

    def _seen_end(self) -> Ended | None:
        ended = super()._seen_end()
        try:
            job = (self._place / JOB_FILE).read_text()
        except OSError:
            return ended  # it has ended its runners itself
        if ended is None or ray_cluster.has_actors(job):
            return None
        # An exit code of its own says nothing of the program: Ray ends a driver that has lost the cluster's head.
        return Ended(ended.code if ended.code is not None and ended.code < 0 else None, ended.at_s)


def _command(run: Run, devices: Counts, address: str) -> list[str]:
    wanted = ",".join(f"{kind}={count}" for kind, count in devices.items() if count)
    return run_command(run, [], {"--on": "ray", "--ray-address": address, "--devices": wanted})
