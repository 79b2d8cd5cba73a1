"""Where the modules of 0.1 are now: their old paths work for one release, and say so."""

import importlib
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "dpspan.advice": "dpspan.app.advice",
    "dpspan.advice.usual": "dpspan.app.advice.defaults",
    "dpspan.anchors": "dpspan.subspaces.sources",
    "dpspan.augmentation": "dpspan.public.augmentation",
    "dpspan.capture": "dpspan.gradients.capture",
    "dpspan.carried": "dpspan.mechanisms.carried_weights",
    "dpspan.carriers": "dpspan.mechanisms.carriers",
    "dpspan.certificate": "dpspan.accounting.certificate",
    "dpspan.checkpoint": "dpspan.engine.checkpoint",
    "dpspan.checks": "dpspan.support.checks",
    "dpspan.choose.company": "dpspan.choose.others",
    "dpspan.choose.energy": "dpspan.choose.gsd",
    "dpspan.choose.probe": "dpspan.choose.gsd",
    "dpspan.choose.records": "dpspan.choose.scores",
    "dpspan.choose.samples": "dpspan.choose.subspaces",
    "dpspan.choose.task2vec": "dpspan.choose.ranking",
    "dpspan.cli": "dpspan.app.cli",
    "dpspan.clipping": "dpspan.mechanisms.clipping",
    "dpspan.collation": "dpspan.engine.collation",
    "dpspan.comparison": "dpspan.app.comparison",
    "dpspan.config": "dpspan.app.config",
    "dpspan.criterion": "dpspan.model.criterion",
    "dpspan.data": "dpspan.app.data",
    "dpspan.demo": "dpspan.app.demo",
    "dpspan.encoded": "dpspan.public.overlap",
    "dpspan.encoding": "dpspan.public.encoding",
    "dpspan.errors": "dpspan.support.errors",
    "dpspan.events": "dpspan.accounting.events",
    "dpspan.files": "dpspan.support.files",
    "dpspan.guard": "dpspan.model.guard",
    "dpspan.health": "dpspan.support.device_facts",
    "dpspan.layers": "dpspan.gradients.layers",
    "dpspan.layout": "dpspan.gradients.layout",
    "dpspan.ledger": "dpspan.accounting.ledger",
    "dpspan.loss_graph": "dpspan.model.loss_graph",
    "dpspan.low_rank": "dpspan.mechanisms.low_rank",
    "dpspan.mechanisms.in_subspace": "dpspan.mechanisms.subspace_method",
    "dpspan.mixing": "dpspan.mechanisms.schedule",
    "dpspan.models": "dpspan.model.networks",
    "dpspan.noise": "dpspan.mechanisms.noise",
    "dpspan.numerics": "dpspan.gradients.numerics",
    "dpspan.overlap": "dpspan.public.overlap",
    "dpspan.patch_filters": "dpspan.public.patches",
    "dpspan.patches": "dpspan.public.patches",
    "dpspan.per_sample": "dpspan.model.per_sample",
    "dpspan.private_step": "dpspan.engine.private_step",
    "dpspan.probe": "dpspan.model.isolation",
    "dpspan.processes": "dpspan.support.processes",
    "dpspan.progress": "dpspan.support.progress",
    "dpspan.promises": "dpspan.accounting.promises",
    "dpspan.public_gradients": "dpspan.public.gradients",
    "dpspan.quiet": "dpspan.support.quiet",
    "dpspan.randomness": "dpspan.support.randomness",
    "dpspan.report": "dpspan.app.report",
    "dpspan.residual": "dpspan.subspaces.residual",
    "dpspan.run": "dpspan.app.run",
    "dpspan.run.parts": "dpspan.app.run.run_inputs",
    "dpspan.run.scalars": "dpspan.app.run.tensorboard",
    "dpspan.sample_losses": "dpspan.public.losses",
    "dpspan.sampling": "dpspan.engine.sampling",
    "dpspan.second_phase": "dpspan.public.warm_start",
    "dpspan.section": "dpspan.app.config.section",
    "dpspan.solvers": "dpspan.subspaces.solvers",
    "dpspan.span": "dpspan.subspaces.sources",
    "dpspan.strict_json": "dpspan.support.strict_json",
    "dpspan.subspace": "dpspan.subspaces.subspace",
    "dpspan.text": "dpspan.model.text",
    "dpspan.trainable": "dpspan.model.trainable",
    "dpspan.transfer": "dpspan.public.warm_start",
    "dpspan.trial": "dpspan.gradients.trial",
    "dpspan.untouched": "dpspan.support.untouched",
    "dpspan.validation": "dpspan.model.validation",
    "dpspan.views": "dpspan.model.views",
    "dpspan.wrappers": "dpspan.model.wrappers",
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
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None
