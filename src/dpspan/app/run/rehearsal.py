"""A configuration's runs as audits need them: made anew, thrown away, and off the books."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, TensorDataset

from dpspan.accounting.certificate import sha256_of
from dpspan.accounting.ledger import Ledger
from dpspan.app.config import Config
from dpspan.app.run.folder import RunFolder, identity, read_json
from dpspan.app.run.from_config import contender_of, make_parts, task_of
from dpspan.app.run.training import Training, noise_for
from dpspan.audit.step import Prepared
from dpspan.public.data import move


class Rehearsal:
    """What `audit_step` and `audit_canaries` ask for: `prepare` and `loss`.

    A warm start is left out, and so is the schedule. Of public data that are yet to be chosen the
    first are used: to choose would cost privacy. With `stand_ins` there are records of noise in the
    place of the private ones, of which nothing but their form is used: what is measured then may be
    published. A bound of ε holds for any records, or there is no ε.
    """

    def __init__(self, config: Config, folder: RunFolder, *, stand_ins: bool = False) -> None:
        if config.data.unit is not None:
            raise ValueError("An audit takes each record for its own unit: leave data.unit out.")
        parts = make_parts(config, folder, goes_on=folder.features.exists())
        private: Any = parts.private.dataset
        inputs, labels = private[0]
        self.like = (torch.zeros_like(inputs), 0 * labels)  # a record's form, and nobody's content
        chosen = None
        if config.choose is not None:
            made = read_json(folder.choice, {})
            chosen = made.get("chosen", next(iter(parts.public)))
        records = config.data.records or len(private)
        if stand_ins:
            noise = torch.randn(records, *inputs.shape, generator=torch.Generator().manual_seed(0))
            noise *= inputs.is_floating_point()  # whole numbers may be places in a vocabulary
            classes = torch.arange(records) % parts.private.outputs  # zeros for data.target
            classes = classes.to(labels).reshape(-1, *labels.shape)
            private = TensorDataset(noise.to(inputs), classes)
        task = replace(task_of(config, parts.private, None), private=private, cuda_graphs=False)
        self.task, self.steps, self.delta = task, task.steps, config.budget.delta
        self._contender = contender_of(
            "audit", config, parts.public, steps=self.steps, chosen=chosen
        )
        digest = sha256_of(config.fixed())
        made, z = identity(read_json(folder.certificate, {}))
        # A run that was made may have spent some of its ε on a choice, or on a search.
        self._z = z if made == digest else noise_for(task, self._contender)
        self.folder, self.of = folder, [digest, self._z]
        self._seed, self._rate = config.training.seed, task.sample_rate

    def prepare(self, added: Sequence[Any] = ()) -> Prepared:
        """A private run that has not begun, with these records among the private ones."""
        records: Any = ConcatDataset([self.task.private, added]) if added else self.task.private  # type: ignore[list-item]
        task, ledger = replace(self.task, private=records), Ledger(accountant=self.task.accountant)
        training = Training(task, self._contender, self._seed)
        training.prepare(ledger, noise_multiplier=self._z, sample_rate=self._rate, goes_on=True)
        return training.engine, training.model, training.optimizer, training.loader

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = move(tuple(batch), torch.device(self.task.device))
        value: Tensor = self.task.criterion(model(inputs), labels)
        return value
