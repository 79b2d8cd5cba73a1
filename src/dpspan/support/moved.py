"""What 0.1 called otherwise: old paths work for one release, and say so."""

import importlib
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# What the documentation of 0.1 named, and what its pickled estimators hold; first by room
_ROOMS = {
    "dpspan.accounting": ["certificate", "events", "ledger"],
    "dpspan.app": ["advice", "cli", "comparison", "config", "data", "report", "run"],
    "dpspan.engine": ["checkpoint", "sampling"],
    "dpspan.gradients": ["capture"],
    "dpspan.mechanisms": ["carriers", "clipping", "low_rank", "noise"],
    "dpspan.model": ["per_sample", "text", "trainable", "validation"],
    "dpspan.public": ["augmentation", "overlap", "patches"],
    "dpspan.subspaces": ["solvers", "subspace"],
    "dpspan.support": ["errors"],
}
MOVED = {f"dpspan.{name}": f"{room}.{name}" for room, names in _ROOMS.items() for name in names} | {
    "dpspan.advice.advise": "dpspan.app.advice",
    "dpspan.anchors": "dpspan.subspaces.sources",
    "dpspan.comparison.compare": "dpspan.app.comparison",
    "dpspan.convex.linear_regression": "dpspan.convex.estimators",
    "dpspan.convex.linear_svc": "dpspan.convex.estimators",
    "dpspan.convex.logistic_regression": "dpspan.convex.estimators",
    "dpspan.convex.oracles": "dpspan.convex.subspaces",
    "dpspan.convex.schedules": "dpspan.convex.fitting",
    "dpspan.encoding": "dpspan.public.patches",
    "dpspan.mechanisms.in_subspace": "dpspan.mechanisms.subspace_method",
    "dpspan.mixing": "dpspan.mechanisms.mixing",
    "dpspan.models": "dpspan.model.networks",
    "dpspan.public_gradients": "dpspan.public.gradients",
    "dpspan.second_phase": "dpspan.public.warm_start",
    "dpspan.span": "dpspan.subspaces.sources",
    "dpspan.transfer": "dpspan.public.warm_start",
}


# Options of methods that are gone since 0.1, by their defaults
_RETIRED = {
    "embedding_share": 0.5,
    "leftover": False,
    "clean_residual": False,
    "orthogonal": True,
    "full_scale": 1.0,
}


def without_retired_options(described: Mapping[str, Any]) -> dict[str, Any]:
    """A description by 0.1, as today's: options that are gone, unless they were made use of."""
    renamed = {k: "RandomCarriers()" if v == "Chance()" else v for k, v in described.items()}
    return {k: v for k, v in renamed.items() if k not in _RETIRED or v != _RETIRED[k]}


class MovedModules(MetaPathFinder, Loader):
    """Finds a module by its old path, warns, and hands out what the new one has."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if _new_path(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module of its own: the real one keeps its name and its spec."""
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        new = _new_path(module.__name__)
        assert new is not None
        moved = f"{module.__name__} has moved to {new}; the old path goes with the next release."
        warnings.warn(moved, DeprecationWarning, stacklevel=2)
        real = importlib.import_module(new)
        module.__dict__.update(
            __doc__=real.__doc__, __path__=[], __getattr__=lambda name: getattr(real, name)
        )


def _new_path(name: str) -> str | None:
    for old, new in sorted(MOVED.items(), reverse=True):  # the longest path that fits
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None
