"""Fine-tune MiniLM on private sentences with Hugging Face's Trainer: plain.py is the plain one.

    pip install 'dpspan[text,transformers]'
    python examples/with_trainer/private.py train.tsv dev.tsv runs/sst2

The files have a header and two columns, `sentence` and `label` (0 or 1), separated by tabs, as
SST-2 has. A run that was interrupted goes on when the command is given again.
"""

import argparse
import csv
from pathlib import Path

from dpspan.frameworks.transformers import Privacy, PrivateTrainer as Trainer
from transformers import TrainingArguments

from dpspan.model.text import minilm_classifier, minilm_tokenizer


def read(path, length):
    """Records of one fixed length: padding to the longest would let a sentence shape others."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    options = {"padding": "max_length", "truncation": True, "max_length": length}
    tokens = minilm_tokenizer()([row["sentence"] for row in rows], **options)
    names = ("input_ids", "attention_mask")
    return [
        {**{name: tokens[name][i] for name in names}, "labels": int(row["label"])}
        for i, row in enumerate(rows)
    ]


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", type=Path)
    parser.add_argument("dev", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--batch", type=int, default=250, help="sentences on the device at a time")
    parser.add_argument("--accumulate", type=int, default=16, help="times that many to a step")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--length", type=int, default=32, help="tokens; longer ones are cut")
    options = parser.parse_args(arguments)

    model = minilm_classifier(classes=2)
    model.base_model.embeddings.requires_grad_(False)
    trainer = Trainer(
        model,
        TrainingArguments(
            str(options.folder),
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulate,
            num_train_epochs=options.epochs,
            learning_rate=options.rate,
            warmup_steps=5,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="epoch",
            report_to=[],
        ),
        train_dataset=read(options.train, options.length),
        eval_dataset=read(options.dev, options.length),
        compute_metrics=accuracy,
        privacy=Privacy(epsilon=8.0, delta=1e-5),
    )
    trainer.train(resume_from_checkpoint=any(options.folder.glob("checkpoint-*")))
    trainer.save_model(str(options.folder / "model"))
    return trainer.evaluate()


if __name__ == "__main__":
    print(main())
