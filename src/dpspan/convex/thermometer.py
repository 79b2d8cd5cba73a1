"""Numbers beside thermometers of them, as a frozen first layer: for any method, and in YAML.

    x ↦ ((x − shift)/scale, cut to ±limit; whether x exceeds cut points)

By means, deviations and quantiles of public rows: what the estimators make by `scaling="public"`
and `cuts=`. Each record is treated by itself, by public constants.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from dpspan.convex.scaling import PublicScaling, cut_points
from dpspan.public.data import PublicData
from dpspan.public.patches import PatchFeatures
from dpspan.support.checks import check_count, check_number, check_seed, expect


class ThermometerFeatures(PatchFeatures):
    """(n, columns) to (n, features), for `dpspan.encode`; by `ThermometerFeatures.learn`."""

    @classmethod
    def learn(  # type: ignore[override]
        cls,
        public: Any,
        *,
        cuts: int = 4,
        limit: float = 3.0,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Learn from public rows; their labels are not used.

        Each column has so many `cuts`, quantiles of the public rows; one of two values or fewer
        has none. What is beyond `limit` deviations is cut. Nothing is random: `seed` has no effect.
        """
        settings = {
            "cuts": check_count("cuts", cuts),
            "limit": check_number("limit", limit),
            "seed": check_seed(seed),  # as of other layers
        }
        expect(limit >= 1, "limit >= 1", limit)
        data = PublicData.of(public)
        tables = [inputs for inputs, *_ in data.batches]
        if not all(isinstance(x, Tensor) and x.dim() == 2 for x in tables):
            raise ValueError(f"Expected the public data '{data.name}' to be rows, (n, columns).")
        rows = torch.cat(tables).double().numpy()
        scaled, points = PublicScaling().prepare(rows), cut_points(cuts, rows.shape[1], rows)
        columns = torch.tensor([column for column, at in points for _ in at], dtype=torch.int64)
        above = torch.tensor([point for _, at in points for point in at])
        more = torch.zeros(len(columns))
        mean = torch.cat([torch.as_tensor(scaled.shift).float(), more])
        basis = torch.cat([1 / torch.as_tensor(scaled.scale).float(), more + 1])[None]
        return cls(data, _Thermometer(columns, above.float()), mean, basis, settings).to(device)

    def forward(self, rows: Tensor) -> Tensor:
        limit = self.settings["limit"]
        features: Tensor = (self.responses(rows) - self.mean) * self.basis
        return features.clamp(-limit, limit)

    @classmethod
    def _network(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
        return _Thermometer(tensors["responses.columns"], tensors["responses.points"])


class _Thermometer(nn.Module):
    """Numbers, and beside them 1 where one exceeds a point, else 0."""

    def __init__(self, columns: Tensor, points: Tensor) -> None:
        super().__init__()
        self.columns, self.points = nn.Buffer(columns), nn.Buffer(points)

    def forward(self, rows: Tensor) -> Tensor:
        above = rows[:, self.columns] > self.points
        return torch.cat([rows, above.to(rows.dtype)], dim=1)
