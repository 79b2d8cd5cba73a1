"""Hugging Face datasets that `save_to_disk` wrote (the extra `datasets`)."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from dpspan.data.source import Classes, Layout, Raw, Source
from dpspan.section import Texts


class HuggingFace(Source):
    """One column of images, vectors or tokens, or several columns of numbers."""

    format: Literal["datasets"] = "datasets"
    inputs: str | Texts = "image"
    label: str | None = "label"
    split: str | None = None
    tokens: bool = False

    @property
    def records(self) -> tuple[object, ...]:
        """Other splits are other records."""
        return *super().records, self.split

    def read(self, classes: Classes) -> Raw:
        """The named columns of the split."""
        dataset, images = self._opened()
        names = [self.inputs] if isinstance(self.inputs, str) else list(self.inputs)
        for name in [*names, *([] if self.label is None else [self.label])]:
            if name not in dataset.column_names:
                raise ValueError(
                    f"{self.path} has no column '{name}': it has {', '.join(dataset.column_names)}."
                )
        rows = dataset.with_format("numpy")[:]
        columns = [np.asarray(rows[name]) for name in names]
        single = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
        is_image = isinstance(dataset.features[names[0]], images)
        layout: Layout | None = "channels_last" if is_image and single.ndim == 4 else None
        return Raw(
            inputs=single[:, None] if single.ndim == 1 and single.dtype != object else single,
            labels=None if self.label is None else np.asarray(rows[self.label]),
            tokens=self.tokens,
            layout=layout,
        )

    def _opened(self) -> tuple[Any, Any]:
        try:
            from datasets import DatasetDict, Image, load_from_disk
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Hugging Face datasets need the package datasets: pip install 'dpspan[datasets]'."
            ) from error
        try:
            opened = load_from_disk(str(self.path))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} is not a dataset that save_to_disk wrote: {error}"
            ) from error
        if not isinstance(opened, DatasetDict):
            return opened, Image
        if self.split not in opened:
            raise ValueError(
                f"Expected split to be one of {', '.join(opened)} for {self.path}, got "
                f"{self.split!r}."
            )
        return opened[self.split], Image
