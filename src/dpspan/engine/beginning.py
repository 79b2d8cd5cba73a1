"""How a run begins: what is given is checked, public and private are kept apart, all is wired."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpspan.accounting.ledger import Ledger
from dpspan.engine.admission import (
    PublicUse,
    admit_public,
    check_parts,
    refuse_together,
    same_beginning,
)
from dpspan.engine.plan import Plan
from dpspan.engine.private_step import PrivateRun
from dpspan.engine.sampling import PrivateLoader
from dpspan.mechanisms.base import Setting
from dpspan.public.warm_start import WarmStart
from dpspan.support.distributed import Processes, weights_of
from dpspan.support.units import Units

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """What a run is made of, besides its plan."""

    module: nn.Module
    optimizer: Optimizer
    data_loader: DataLoader[Any]
    criterion: nn.Module | None
    units: Units | None
    warm_start: WarmStart | None
    max_physical_batch_size: int | None
    cuda_graphs: bool
    seed: int | None  # for debugging: such a run is not private


def begin(
    plan: Plan,
    given: Given,
    *,
    ledger: Ledger,
    processes: Processes,
    warn: Callable[[str], None],
) -> PrivateRun:
    """The run, after its warm start; whatever its guarantee would not hold for is refused first."""
    module, criterion = given.module, given.criterion
    with processes.together():
        refuse_together(
            module,
            plan.method,
            warm_start=given.warm_start,
            cuda_graphs=given.cuda_graphs,
            units=given.units,
        )
        check_parts(module, given.optimizer, criterion, plan.loss_reduction, processes)
    same_beginning(processes, plan, module, given.data_loader, given.units, warn)
    setting = Setting(
        model=module,
        criterion=criterion,
        steps_per_epoch=plan.sampling.steps_per_epoch,
        expected_batch_size=plan.expected_batch_size,
        max_physical_batch_size=given.max_physical_batch_size,
        warn=warn,
        processes=processes,
    )
    with processes.together():
        mechanism = plan.method.bind(setting)
        loader = _loader(plan, given, processes)
        public = admit_public(
            plan.method, mechanism, setting, given.data_loader, given.warm_start, given.units
        )
    loader.spread_over(processes)
    processes.agree({"debug_seed": given.seed, "public data": [use.data.digest for use in public]})
    processes.make_same(weights_of(module).values())  # after the warm start
    plan = dataclasses.replace(plan, public=tuple(map(str, public)))
    _put_on_record(ledger, plan, public)
    return PrivateRun(
        plan,
        setting,
        mechanism,
        optimizer=given.optimizer,
        loader=loader,
        ledger=ledger,
        seed=given.seed,
        cuda_graphs=given.cuda_graphs,
    )


def _loader(plan: Plan, given: Given, processes: Processes) -> PrivateLoader:
    size = given.max_physical_batch_size
    if given.cuda_graphs and size is None:
        size = plan.most_at_once(processes.world)
    return PrivateLoader(
        given.data_loader,
        plan.sampling,
        size,
        seed=given.seed,
        padded=given.cuda_graphs,
        units=given.units,
        secure=plan.secure_mode,
    )


def _put_on_record(ledger: Ledger, plan: Plan, public: list[PublicUse]) -> None:
    ledger.protect(plan.unit)
    for data, purpose in public:
        ledger.declare_public(data.name, data.digest, data.count, detail=purpose)
    ledger.warn(*plan.warnings)
    if plan.noise_multiplier == 0:
        ledger.invalidate("noise_multiplier is 0")
    _logger.info("dpspan: %s", plan.describe())
