"""A job on a Ray cluster, driven from here: `pliant run --on ray`.

Devices are held by placement groups (`cluster.Hold`), one for each, so that they can be got and given back one by one;
each node that has some runs one runner, an actor (`runner`) that goes there by affinity, because it outlives any one of
its node's devices. The config server is in this process: whichever node is lost, the job goes on as after a crash, and what was lost
is replaced where Ray finds room. When this process ends, Ray ends its actors, and the kernel the runners with them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from pliant.elastic.client import ConfigClient
from pliant.elastic.membership import Limits
from pliant.elastic.server import ConfigServer, ServerConfig
from pliant.launch import signals, state_file
from pliant.launch.duration import format_duration
from pliant.launch.on_ray import cluster
from pliant.launch.on_ray.driver import Driver, Event, RayJob
from pliant.launch.output import Console

log = logging.getLogger(__name__)

JOB_FILE = "ray-job"
"""Beside --state-file, as long as the driver drives: what Ray calls the job. Where it is left behind, the driver was
killed, or Ray is gone, and something of the job may still live."""


def run_on_ray(
    job: RayJob, *, register: Callable[..., contextlib.AbstractContextManager[object]] | None = None
) -> int:
    """Run the job to its end; the exit code. Call it from the main thread.

    `register` lists the job for the time of a block (`jobs.store.registered`), so that `pliant resize` finds it.

    Raises:
        ConfigError, LaunchError: before any worker was started, with the reason.
    """
    begun_s = time.monotonic()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with cluster.connected(job.address), signals.handed_to(events.put), contextlib.ExitStack() as stack:
        cluster.check_devices(job.devices, cluster.living_nodes(), job.asked)
        driver = Driver(job, events)
        token = job.environ.get("PLIANT_TOKEN") or secrets.token_hex(16)
        config = ServerConfig(
            host=cluster.own_address(),
            port=job.config_port,
            limits=Limits(ports=job.ports),
            token=token,
            provider=driver,
        )
        server = stack.enter_context(ConfigServer(config).running())
        client = stack.enter_context(ConfigClient(server.url, token))
        if register is not None:
            known = register(
                server.url, job.program, host=config.host, token=token, record=job.record, environ=job.environ
            )
            stack.enter_context(known)
        log.info("config server at %s", server.url)
        if job.state_file:
            # First this: who waits for the other file finds both.
            job_file = Path(job.state_file).with_name(JOB_FILE)
            job_file.write_text(cluster.own_job())
            state_file.write(Path(job.state_file), server.url, 0, {})
            stack.callback(job_file.unlink, missing_ok=True)
        code = driver.drive(server, client, token)
    if code == 0:
        told = f"all {driver.num_ended}/{driver.num_ended} nodes finished, took {format_duration(time.monotonic() - begun_s)}\n"
        Console(1, coloured=False).write(told.encode())
    return code
