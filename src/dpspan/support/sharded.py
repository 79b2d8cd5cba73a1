"""Models that torch's `fully_shard` (FSDP2) has spread over the processes.

A process runs its own samples through whole layers, which are gathered while they run. In between
it keeps one shard of every parameter, and of every sum of gradients: so no norm of a sample needs
the other processes, and no process ever holds more than one whole parameter's sum.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpspan.support.distributed import Processes, is_sharded
from dpspan.support.errors import UnsupportedModule

_AT_ONCE = 1 << 20  # numbers whose sums travel together, or one parameter's if it has more

_OTHER = "is a DTensor that fully_shard did not make (tensor parallelism, say)"

# Of whole tensors by name: what this process keeps of them.
Placement = Callable[[Iterable[tuple[str, Tensor]]], dict[str, Tensor]]


def shards_itself(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    known = sys.modules.get("torch.distributed.fsdp")
    return known is not None and isinstance(module, known.FSDPModule)


def name_of(module: nn.Module) -> str:
    """Of the class that it had before `fully_shard` put another one in front."""
    classes = type(module).__mro__
    return classes[2 if shards_itself(module) else 0].__name__


def local(x: Any) -> Any:
    """This process's part."""
    return x.to_local() if is_sharded(x) else x


def whole(x: Any) -> Any:
    """All of it, in every process: all must ask."""
    return x.full_tensor() if is_sharded(x) else x


class Shards:
    """The sharded parameters of a model, by name; without any, everything stays as it is."""

    def __init__(self, model: nn.Module, processes: Processes | None = None) -> None:
        self._model = model
        self._parts: list[Any] = [m for m in model.modules() if shards_itself(m)]
        self.reshard()
        named = model.named_parameters()
        self._parameters: dict[str, Any] = {n: p for n, p in named if is_sharded(p)}
        # Those that all take to run the model: this one, if it has all of it.
        self.processes = processes if processes and self._parameters else Processes()

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def __contains__(self, name: str) -> bool:
        return type(name) is str and name in self._parameters

    def reshard(self) -> None:
        """Let the model have shards for parameters: after a forward pass some are still whole."""
        for part in self._parts:
            part.reshard()

    def gathered(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that stand in for sharded ones while they run; all processes must ask."""
        missing = dict(self._parameters)
        for part in self._parts:
            part.unshard()
            for name, p in self._model.named_parameters():
                if name in missing and not is_sharded(p):
                    if missing.pop(name).dtype == torch.float64 != p.dtype:
                        raise UnsupportedModule(
                            f"Parameter '{name}' is kept in float64 and runs in {p.dtype} "
                            "(MixedPrecisionPolicy): norms would be less exact than they are taken "
                            "for. Keep the model in float32, or leave param_dtype out."
                        )
                    yield name, p
            part.reshard()
        if missing:
            raise UnsupportedModule(
                f"Parameter '{next(iter(missing))}' {_OTHER}. Leave the model as it is, and call "
                "fully_shard on its blocks and on itself."
            )

    def of_sums(self, sums: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Shards of the sums over all processes, each of which comes with its own samples' sums.

        What is not sharded stays this process's own.
        """
        if not self:
            return dict(sums)
        with self.processes.together():
            pass  # whoever has failed takes no part in what follows
        kept: dict[str, Tensor] = {}
        waiting: list[str] = []
        with self.processes.in_step():
            for name, value in sums:
                kept[name] = value
                if name in self:
                    waiting.append(name)
                    if sum(kept[other].numel() for other in waiting) >= _AT_ONCE:
                        self._add_up(kept, waiting)
                        waiting = []
            self._add_up(kept, waiting)
        return kept

    def _add_up(self, sums: dict[str, Tensor], names: list[str]) -> None:
        """Put shards of sums over all processes in the place of this process's own sums."""
        if not names:
            return
        mesh = self._parameters[names[0]].device_mesh
        lines = []  # one for each process: its shards, those that are shorter filled up
        for name in names:
            rows = sums[name].flatten(1) if sums[name].dim() > 1 else sums[name][:, None]
            lines.append(F.pad(rows, (0, 0, 0, -len(rows) % mesh.size())).reshape(mesh.size(), -1))
        every = torch.cat(lines, dim=1).flatten()
        own = every.new_empty(len(every) // mesh.size())
        add_up = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with self.processes.connected():
            add_up(own, every, group=mesh.get_group())
        for name, part in zip(names, own.split([x.shape[1] for x in lines]), strict=True):
            shape = local(self._parameters[name]).shape
            sums[name] = part[: shape.numel()].view(shape)

    def of_same(self, sums: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Shards of what every process has as a whole."""
        return {name: self.part(name, x) for name, x in sums} if self else dict(sums)

    def part(self, name: str, value: Tensor) -> Tensor:
        """This process's shard of what belongs to a parameter as a whole."""
        if name not in self:
            return value
        mesh = self._parameters[name].device_mesh
        rows, rank = -(-len(value) // mesh.size()), mesh.get_local_rank()
        return value[rank * rows : (rank + 1) * rows].clone()  # or the whole would be kept

    def tensor(self, name: str, value: Tensor) -> Tensor:
        """A gradient of the parameter, sharded as that is, from this process's shard of it."""
        if name not in self:
            return value
        from torch.distributed.tensor import DTensor

        like = self._parameters[name]
        if value.shape != local(like).shape:
            raise TypeError(
                f"The gradient of '{name}' is not this process's shard of it: a method sums by "
                "PerSampleGradients.combine, which knows about shards."
            )
        mesh, places, shape = like.device_mesh, like.placements, like.shape
        made: Tensor = DTensor.from_local(
            value, mesh, places, run_check=False, shape=shape, stride=like.stride()
        )
        return made

    def first(self, value: Any) -> Any:
        """The first process's value: what is decided about a model that all run is so in all."""
        if self.processes.world == 1:
            return value
        sent = tree_map_only(Tensor, lambda x: x.detach().cpu(), value)
        device = next(iter(self._parameters.values())).device
        return tree_map_only(Tensor, lambda x: x.to(device), self.processes.same(sent))


def check_sharding(model: nn.Module, processes: Processes) -> None:
    """UnsupportedModule unless what is sharded is so by its first dimension, over all processes."""
    shards = Shards(model)
    managed = {p for part in shards._parts for p in part.parameters()}
    for name, p in shards._parameters.items():
        mesh, (place, *more) = p.device_mesh, p.placements
        why = None
        if p not in managed:
            why = _OTHER
        elif mesh.ndim > 1 or more:
            why = "is sharded over a mesh of several dimensions (HSDP, or with tensor parallelism)"
        elif not place.is_shard(0):
            why = f"is placed as {place}, not by its first dimension"
        elif p.device.type != mesh.device_type:
            why = (
                f"is on {p.device}, not where it runs (CPUOffloadPolicy: leave offload_policy out)"
            )
        elif mesh.mesh.flatten().tolist() != processes.ranks:
            why = f"is sharded over the processes {mesh.mesh.tolist()}, not {processes.ranks}"
        if why is not None:
            raise UnsupportedModule(
                f"Parameter '{name}' {why}. Call fully_shard on the blocks and on the model with a "
                "mesh of one dimension that holds all processes of the run, which is its default."
            )
