"""Fine-tune a language model on private sentences, with a Hugging Face tokenizer and a plain loop.

    pip install 'dpspan[text]'
    python examples/finetune_text.py train.tsv dev.tsv --device cuda

The files have a header and two columns, `sentence` and `label` (0 or 1), separated by tabs, as
SST-2 has. RGP keeps of each sample's gradient two thin matrices per weight: a step takes the time
and memory of one without privacy, and batches stay as large as the model allows.
"""

import argparse
import csv
from pathlib import Path

import torch
from rich.progress import track
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from dpspan.model.text import minilm_classifier, minilm_tokenizer


def read(path, length):
    """Token ids of one fixed length: padding to the longest would let a sentence shape others."""
    with Path(path).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    tokens = minilm_tokenizer()(
        [row["sentence"] for row in rows],
        padding="max_length",
        truncation=True,
        max_length=length,
        return_tensors="pt",
    )
    labels = torch.tensor([int(row["label"]) for row in rows])
    return TensorDataset(tokens["input_ids"], tokens["attention_mask"], labels)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", type=Path)
    parser.add_argument("dev", type=Path)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4000)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--length", type=int, default=32, help="tokens; longer ones are cut")
    parser.add_argument("--physical", type=int, default=1000, help="sentences at a time")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)

    data, dev = read(options.train, options.length), read(options.dev, options.length)
    model = minilm_classifier(classes=2).to(options.device).train()
    for name, parameter in model.named_parameters():  # the matrices and the head, as in the paper
        trained = parameter.dim() == 2 and "embeddings" not in name
        parameter.requires_grad_(trained or name.startswith("classifier"))

    engine = dpspan.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(
            [p for p in model.parameters() if p.requires_grad], lr=options.rate
        ),
        data_loader=DataLoader(data, batch_size=options.batch),
        criterion=nn.CrossEntropyLoss(),
        method=dpspan.RGP(rank=options.rank, clip=1.0),
        target_epsilon=options.epsilon,
        target_delta=1e-5,
        epochs=options.epochs,
        max_physical_batch_size=options.physical,
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(options.epochs):
        for batch in track(loader, f"epoch {epoch + 1}"):
            ids, mask, labels = (part.to(options.device) for part in batch)
            optimizer.zero_grad()
            criterion(model(input_ids=ids, attention_mask=mask).logits, labels).backward()
            optimizer.step()

    model.eval()
    right = 0
    with torch.no_grad():
        for batch in DataLoader(dev, batch_size=256):
            ids, mask, labels = (part.to(options.device) for part in batch)
            scores = model(input_ids=ids, attention_mask=mask).logits
            right += int((scores.argmax(1) == labels).sum())
    accuracy = right / len(dev)
    print(f"ε = {engine.get_epsilon():.3f}, accuracy {100 * accuracy:.1f} %")
    return accuracy


if __name__ == "__main__":
    main()
