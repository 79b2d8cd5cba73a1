"""Rows of an experiment that are convex estimators instead of training runs of a network."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from dpspan.app.section import Count, Positive, Section
from dpspan.convex import GradientDescent, NoisyAdaGrad, PrivateLogisticRegression
from experiments.images import Images

METHODS = {"dp-gd": GradientDescent, "noisy-adagrad": NoisyAdaGrad}


class ConvexSection(Section):
    """`PrivateLogisticRegression`; every step uses every record."""

    name: Literal["dp-gd", "noisy-adagrad"]
    steps: Count = 30
    clip: Positive = 1.0

    def fit(
        self, model: nn.Module, data: Images, *, epsilon: float, delta: float, rate: float
    ) -> dict[str, Any]:
        """Put a private fit's weights into a linear model; its certificate."""
        layer = list(model.modules())[-1]
        if not isinstance(layer, nn.Linear) or sum(1 for _ in model.parameters()) > 2:
            raise ValueError("Expected a linear model for a convex row: model: {name: logistic}.")
        estimator = PrivateLogisticRegression(
            epsilon=epsilon,
            delta=delta,
            method=METHODS[self.name](steps=self.steps, learning_rate=rate),
            clip=self.clip,
            classes=range(layer.out_features),
            records=len(data),
        ).fit(data.x.flatten(1).cpu().double().numpy(), data.y.cpu().numpy())
        with torch.no_grad():
            for parameter, found in ((layer.weight, "coef_"), (layer.bias, "intercept_")):
                values = torch.from_numpy(getattr(estimator, found))
                parameter.zero_()  # of two classes only the second has weights
                parameter[-len(values) :] = values
        certificate: dict[str, Any] = estimator.certificate_
        return certificate
