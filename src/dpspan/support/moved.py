"""Where the modules of 0.1 are now: their old paths work for one release, and say so."""

import importlib
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {  # what the documentation of 0.1 named, and what its pickled estimators hold
    "dpspan.advice": "dpspan.app.advice",
    "dpspan.advice.advise": "dpspan.app.advice",
    "dpspan.anchors": "dpspan.subspaces.sources",
    "dpspan.augmentation": "dpspan.public.augmentation",
    "dpspan.capture": "dpspan.gradients.capture",
    "dpspan.carriers": "dpspan.mechanisms.carriers",
    "dpspan.certificate": "dpspan.accounting.certificate",
    "dpspan.checkpoint": "dpspan.engine.checkpoint",
    "dpspan.clipping": "dpspan.mechanisms.clipping",
    "dpspan.comparison": "dpspan.app.comparison",
    "dpspan.comparison.compare": "dpspan.app.comparison",
    "dpspan.config": "dpspan.app.config",
    "dpspan.convex.linear_regression": "dpspan.convex.estimators",
    "dpspan.convex.linear_svc": "dpspan.convex.estimators",
    "dpspan.convex.logistic_regression": "dpspan.convex.estimators",
    "dpspan.convex.oracles": "dpspan.convex.subspaces",
    "dpspan.convex.schedules": "dpspan.convex.fitting",
    "dpspan.data": "dpspan.app.data",
    "dpspan.encoding": "dpspan.public.encoding",
    "dpspan.errors": "dpspan.support.errors",
    "dpspan.events": "dpspan.accounting.events",
    "dpspan.ledger": "dpspan.accounting.ledger",
    "dpspan.low_rank": "dpspan.mechanisms.low_rank",
    "dpspan.mechanisms.in_subspace": "dpspan.mechanisms.subspace_method",
    "dpspan.mixing": "dpspan.mechanisms.schedule",
    "dpspan.models": "dpspan.model.networks",
    "dpspan.noise": "dpspan.mechanisms.noise",
    "dpspan.overlap": "dpspan.public.overlap",
    "dpspan.patches": "dpspan.public.patches",
    "dpspan.per_sample": "dpspan.model.per_sample",
    "dpspan.public_gradients": "dpspan.public.gradients",
    "dpspan.report": "dpspan.app.report",
    "dpspan.run": "dpspan.app.run",
    "dpspan.sampling": "dpspan.engine.sampling",
    "dpspan.second_phase": "dpspan.public.warm_start",
    "dpspan.solvers": "dpspan.subspaces.solvers",
    "dpspan.span": "dpspan.subspaces.sources",
    "dpspan.subspace": "dpspan.subspaces.subspace",
    "dpspan.text": "dpspan.model.text",
    "dpspan.trainable": "dpspan.model.trainable",
    "dpspan.transfer": "dpspan.public.warm_start",
    "dpspan.validation": "dpspan.model.validation",
}


class MovedModules(MetaPathFinder, Loader):
    """Finds a module by its old path, warns, and hands out what the new one has."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for the paths in `MOVED`, and for what lay below them."""
        return ModuleSpec(name, self) if _new_path(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module of its own: the real one keeps its name and its spec."""
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Look every name up in the new module."""
        new = _new_path(module.__name__)
        assert new is not None
        warnings.warn(
            f"{module.__name__} has moved to {new}; the old path goes with the next release.",
            DeprecationWarning,
            stacklevel=2,
        )
        real = importlib.import_module(new)
        module.__dict__.update(
            __doc__=real.__doc__, __path__=[], __getattr__=lambda name: getattr(real, name)
        )


def _new_path(name: str) -> str | None:
    for old, new in sorted(MOVED.items(), reverse=True):  # the longest path that fits
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None
