"""Methods of `dpspan.convex` as contenders: logistic regression, every record in every step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from dp_accounting import GaussianDpEvent
from torch import nn
from torch.utils.data import DataLoader

from dpspan.accounting.calibration import calibrate_event
from dpspan.accounting.certificate import weights_sha256
from dpspan.accounting.ledger import RECORDS_TOLD, Ledger
from dpspan.accounting.promises import Budget
from dpspan.convex.estimators import PrivateLogisticRegression, configuration
from dpspan.convex.methods import Method
from dpspan.convex.public_rows import PublicRows
from dpspan.public.data import PublicData

if TYPE_CHECKING:
    from dpspan.app.run.training import Task

_TOLD = f"{RECORDS_TOLD}: sums are divided by it. State data.records if it is a secret"


@dataclass(frozen=True, kw_only=True)
class FullBatch:
    """Nothing of a fit is seen before its last step, so none is kept on the way."""

    method: Method
    clip: float
    public: PublicData | None = None

    def describe(self) -> dict[str, Any]:
        how = configuration(self.method)
        return {"method": how.pop("name"), "clip": self.clip, **how}

    def noise_for(self, budget: Budget, spent: Any, accountant: str) -> float:
        """z of a step, beside what is spent."""
        steps = self.method.steps
        return calibrate_event(GaussianDpEvent, steps, budget, accountant=accountant, spent=spent)

    def fit(
        self, task: Task, model: nn.Module, ledger: Ledger, *, noise: float, rate: Any
    ) -> dict[str, Any]:
        """Put the fitted weights into the model, which is linear; the certificate's `training`."""
        batches = zip(*DataLoader(task.private, batch_size=1024), strict=True)
        x, y = (torch.cat(part) for part in batches)
        (linear,) = (each for each in model.modules() if isinstance(each, nn.Linear))
        estimator = PrivateLogisticRegression(
            delta=task.budget.delta,
            method=dataclasses.replace(self.method, learning_rate=rate),
            clip=self.clip,
            noise_multiplier=noise,
            records=task.count,
            secure_mode=task.secure_mode,
            classes=range(linear.out_features),
        )
        if task.records is None:
            ledger.warn(_TOLD)
        groups = None if task.units is None else task.units.owners
        estimator.fit(_rows(x), y.numpy(), public=self._known(), ledger=ledger, groups=groups)
        found = torch.from_numpy(estimator.coef_), torch.from_numpy(estimator.intercept_)
        with torch.no_grad():
            for weights, fitted in zip((linear.weight, linear.bias), found, strict=True):
                weights.zero_()[-len(fitted) :] = fitted  # of two classes the second has all
        digest = weights_sha256(model.state_dict())
        return {**estimator.certificate_["training"], "weights_sha256": digest}

    def _known(self) -> PublicRows | None:
        if self.public is None:
            return None
        x, *y = (torch.cat(part) for part in zip(*self.public.batches, strict=True))
        return PublicRows(x=_rows(x), y=y[0].numpy() if y else None, name=self.public.name)


def _rows(x: torch.Tensor) -> Any:
    return x.flatten(1).double().numpy()
