"""The contenders that are worth a try where nobody has named any."""

from __future__ import annotations

import dataclasses

from dpspan.app.comparison import Contender, Task
from dpspan.mechanisms import DPSGD, GEP, PDPSGD, RGP, Method
from dpspan.public.data import PublicData

_RATE = 1.0  # a placeholder: `advise` tries its own


def usual_contenders(task: Task, subspace: object = None) -> tuple[Contender, ...]:
    """Each method with a few ranks and clips, from scratch and, with public labels, warm-started.

    `subspace` is public data for subspaces, labels not needed; by default the task's.
    """
    source = task.public if subspace is None else subspace
    methods: dict[str, Method] = {f"DP-SGD, clip {clip:g}": DPSGD(clip=clip) for clip in (1.0, 0.3)}
    methods["RGP, rank 2"] = RGP(rank=2, clip=1.0)
    if source is not None:
        data = PublicData.of(source)
        for rank in sorted({max(1, data.count // 5), max(1, data.count // 2)}):
            methods[f"PDP-SGD, rank {rank}"] = PDPSGD(public=data, rank=rank, clip=1.0)
            methods[f"GEP, rank {rank}, clips 1 and 0.2"] = GEP(
                public=data, rank=rank, clip=1.0, residual_clip=0.2
            )
    cold = [Contender(name=n, method=m, learning_rate=_RATE) for n, m in methods.items()]
    start = task.start
    if start is None:
        return tuple(cold)
    warm = [dataclasses.replace(c, name=f"warm start + {c.name}", warm_start=start) for c in cold]
    return (*cold, *warm)
