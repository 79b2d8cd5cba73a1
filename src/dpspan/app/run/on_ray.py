"""Trainings on a Ray cluster, in place of processes on this machine (the extra `ray`)."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from dpspan.app.data import optional
from dpspan.app.run.jobs import Map, Work


@dataclass(frozen=True)
class OnRay:
    """An executor: `compare(…, jobs=8, executor=OnRay())`.

    On the cluster that Ray is connected to or finds (RAY_ADDRESS), else on this machine. The folder
    must be one that all its machines see, under the same path.

    Args:
        gpus: that each training needs, or a part of one.
    """

    gpus: float = 0.0

    @contextmanager
    def __call__(self, jobs: int) -> Iterator[Map]:
        """Each training runs once: a process that dies is an error, and the run goes on later."""
        ray = optional("ray", "Runs on a cluster", "ray")
        connected = ray.is_initialized()
        if not connected:
            ray.init(log_to_driver=False, include_dashboard=False)
        # What an actor does not ask for, it would hold without Ray's knowledge.
        worker = ray.remote(num_cpus=1, num_gpus=self.gpus, max_restarts=0)(_Worker)
        actors = [worker.remote() for _ in range(jobs)]

        def each_of(work: Work, *columns: list[Any]) -> Iterator[Any]:
            waiting = zip(*columns, strict=True)
            running = deque(
                (actor, actor.call.remote(work, *arguments))
                for actor, arguments in zip(actors, islice(waiting, jobs), strict=False)
            )
            while running:
                actor, result = running.popleft()
                try:
                    found = ray.get(result)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                for arguments in islice(waiting, 1):  # only now: after an error nothing begins
                    running.append((actor, actor.call.remote(work, *arguments)))
                yield found

        try:
            yield each_of
        finally:  # after an error none may release what nobody waits for
            for actor in actors:
                ray.kill(actor)
            if not connected:
                ray.shutdown()


class _Worker:
    """A process of the cluster, with one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def call(self, work: Work, *arguments: Any) -> Any:
        return work(*arguments)
