"""Train privately in a folder, from its last checkpoint if there is one; perhaps until killed."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainerCallback,
    TrainingArguments,
)

from dpspan.frameworks.transformers import Privacy, PrivateTrainer


class Kill(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-after", type=int, default=0)
    options = parser.parse_args()
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(**sizes, num_hidden_layers=1))
    records = [{"input_ids": torch.full((4,), i % 20), "labels": i % 2} for i in range(20)]
    arguments = TrainingArguments(
        str(options.folder),
        per_device_train_batch_size=20,
        num_train_epochs=5,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        use_cpu=True,
    )
    trainer = PrivateTrainer(
        model,
        arguments,
        train_dataset=records,
        callbacks=[Kill(options.kill_after)],
        privacy=Privacy(epsilon=8.0, delta=1e-3, accountant="rdp"),
    )
    trainer.train(resume_from_checkpoint=any(options.folder.glob("checkpoint-*")))


if __name__ == "__main__":
    main()
