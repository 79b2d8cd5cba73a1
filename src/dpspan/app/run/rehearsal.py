"""A configuration's runs as audits need them: made anew, thrown away, and off the books."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from dpspan.accounting.certificate import sha256_of
from dpspan.accounting.ledger import Ledger
from dpspan.app.config import Config
from dpspan.app.run.folder import RunFolder, identity, read_json
from dpspan.app.run.from_config import contender_of, make_parts, task_of
from dpspan.app.run.task import Contender, Task
from dpspan.app.run.training import Training, noise_for
from dpspan.audit.step import Prepared
from dpspan.public.data import move


@dataclass(frozen=True)
class Rehearsal:
    """What `audit_step` and `audit_canaries` ask for: `prepare` and `loss`.

    A warm start is left out, and so is the schedule. Of public data that are yet to be chosen the
    first are used: to choose would cost privacy. `of` says what it rehearses, so that a finding is
    known as one of these settings and this noise.
    """

    task: Task
    contender: Contender
    noise_multiplier: float
    seed: int
    delta: float
    folder: RunFolder
    of: Sequence[Any]

    @classmethod
    def from_config(cls, config: Config, folder: RunFolder, *, stand_ins: bool = False) -> Self:
        """Of a configuration's run. With `stand_ins` there are records of noise in the place of the
        private ones, of which nothing but their form is used: what is measured then may be
        published. A bound of ε holds for any records, or there is no ε.
        """
        if config.data.unit is not None:
            raise ValueError("An audit takes each record for its own unit: leave data.unit out.")
        parts = make_parts(config, folder, goes_on=folder.features.exists())
        private: Any = parts.private.dataset
        chosen = None
        if config.choose is not None:
            made = read_json(folder.choice, {})
            chosen = made.get("chosen", next(iter(parts.public)))
        if stand_ins:
            records = config.data.records or len(private)
            private = _noise_like(private, records, parts.private.outputs)
        task = replace(task_of(config, parts.private, None), private=private, cuda_graphs=False)
        contender = contender_of("audit", config, parts.public, steps=task.steps, chosen=chosen)
        digest = sha256_of(config.fixed())
        made, z = identity(read_json(folder.certificate, {}))
        # A run that was made may have spent some of its ε on a choice, or on a search.
        z = z if made == digest else noise_for(task, contender)
        seed, delta = config.training.seed, config.budget.delta
        return cls(task, contender, z, seed, delta, folder, [digest, z])

    @property
    def steps(self) -> int:
        """Of the run."""
        return self.task.steps

    @property
    def like(self) -> tuple[Tensor, Tensor]:
        """A record's form, and nobody's content."""
        inputs, labels = self.task.private[0]
        return torch.zeros_like(inputs), 0 * labels

    def prepare(self, added: Sequence[Any] = ()) -> Prepared:
        """A private run that has not begun, with these records among the private ones."""
        records: Any = ConcatDataset([self.task.private, added]) if added else self.task.private  # type: ignore[list-item]
        task, ledger = replace(self.task, private=records), Ledger(accountant=self.task.accountant)
        rate, z = self.task.sample_rate, self.noise_multiplier
        training = Training(task, self.contender, self.seed)
        training.prepare(ledger, noise_multiplier=z, sample_rate=rate, goes_on=True)
        return training.engine, training.model, training.optimizer, training.loader

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = move(tuple(batch), torch.device(self.task.device))
        value: Tensor = self.task.criterion(model(inputs), labels)
        return value


def _noise_like(private: Dataset[Any], records: int, outputs: int) -> TensorDataset:
    """So many records of noise, in the form of these."""
    inputs, labels = private[0]
    noise = torch.randn(records, *inputs.shape, generator=torch.Generator().manual_seed(0))
    noise *= inputs.is_floating_point()  # whole numbers may be places in a vocabulary
    classes = torch.arange(records) % outputs  # zeros for data.target
    return TensorDataset(noise.to(inputs), classes.to(labels).reshape(-1, *labels.shape))
