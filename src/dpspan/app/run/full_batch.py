"""Methods of `dpspan.convex` as contenders: logistic regression, every record in every step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from dpspan.accounting.certificate import weights_sha256
from dpspan.accounting.ledger import Ledger
from dpspan.convex.estimators import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    configuration,
)
from dpspan.convex.methods import Method
from dpspan.convex.public_rows import PublicRows
from dpspan.public.data import PublicData

if TYPE_CHECKING:
    from dpspan.app.run.task import Task


@dataclass(frozen=True, kw_only=True)
class FullBatch:
    """Nothing of a fit is seen before its last step, so none is kept on the way."""

    method: Method
    clip: float
    public: PublicData | None = None

    def describe(self) -> dict[str, Any]:
        how = configuration(self.method)
        return {"method": how.pop("name"), "clip": self.clip, **how}

    def fit(
        self, task: Task, model: nn.Module, ledger: Ledger, *, noise: float, rate: Any
    ) -> dict[str, Any]:
        """Put the fitted weights into the model, which is linear; the certificate's `training`."""
        x, y = _whole(DataLoader(task.private, batch_size=1024))
        (linear,) = (each for each in model.modules() if isinstance(each, nn.Linear))
        kind: Any = partial(PrivateLogisticRegression, classes=range(linear.out_features))
        fitted = (PrivateLinearRegression if task.numeric else kind)(
            delta=task.budget.delta,
            method=dataclasses.replace(self.method, learning_rate=rate),
            clip=self.clip,
            noise_multiplier=noise,
            records=task.records,
            secure_mode=task.secure_mode,
        )
        public, groups = None, None if task.units is None else task.units.owners
        if self.public is not None:
            rows, *labels = _whole(self.public.batches)
            public = PublicRows(x=rows, y=next(iter(labels), None), name=self.public.name)
        fitted.fit(x, y, public=public, ledger=ledger, groups=groups)
        with torch.no_grad():
            for to, values in ((linear.weight, fitted.coef_), (linear.bias, fitted.intercept_)):
                found = torch.from_numpy(np.atleast_1d(values)).reshape(-1, *to.shape[1:])
                to.zero_()[-len(found) :] = found  # of two classes the second
        digest = weights_sha256(model.state_dict())
        return {**fitted.certificate_["training"], "weights_sha256": digest}


def _whole(batches: Any) -> list[Any]:
    """Rows, and labels if there are any."""
    x, *y = (torch.cat(part) for part in zip(*batches, strict=True))
    return [
        x.flatten(1).double().numpy(),
        *(each.squeeze(1).numpy() if each.dim() == 2 else each.numpy() for each in y),
    ]
