"""Hugging Face datasets that `save_to_disk` wrote (the extra `datasets`)."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from dpspan.app.config.section import Texts
from dpspan.app.data.source import Classes, Layout, Raw, Source, unreadable
from dpspan.support.checks import near


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
                found = dataset.column_names
                raise ValueError(
                    f"{self.path} has no column '{name}' among its {len(found)}{near(name, found)}."
                )
        try:
            rows = dataset.with_format("numpy")[:]
            columns = [np.asarray(rows[name]) for name in names]
        except Exception as error:  # of the many readers behind it
            raise unreadable(self.path, "dataset", error) from None
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
        except Exception as error:
            raise unreadable(self.path, "dataset of save_to_disk", error) from None
        if not isinstance(opened, DatasetDict):
            return opened, Image
        if self.split not in opened:
            raise ValueError(
                f"Expected split to be one of the {len(opened)} of {self.path}, got {self.split!r}"
                f"{near(str(self.split), list(opened))}."
            )
        return opened[self.split], Image
