"""Private classification by filling in a word: "a moving story It was [MASK]."

    pip install 'dpspan[text]'
    python examples/prompt_text.py train.tsv dev.tsv --model FOLDER --train biases

FOLDER (or a name at Hugging Face) has BERT, RoBERTa or another masked language model whose head has
their name. The scores of the classes, "terrible" and "great", are the scores of these words: there
is no new head that would start at random. The files are those of finetune_text.py.
"""

import argparse
import csv
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForMaskedLM, AutoTokenizer

import dpspan

TRAINED = {"biases": dpspan.BiasOnly(), "lora": dpspan.LoRA(rank=8, targets=("query", "value"))}


class MaskPrompt(nn.Module):
    """Scores of token ids, padded behind, with `words` in the order of the classes."""

    def __init__(self, model, tokenizer, words=("terrible", "great"), prompt="It was {}."):
        super().__init__()
        if tokenizer.mask_token_id is None:
            raise ValueError("The tokenizer has no mask: take a masked language model's.")
        self.body, self.head = model.base_model, getattr(model, "cls", None) or model.lm_head
        self.padding = tokenizer.pad_token_id
        found = [tokenizer.encode(f" {word}", add_special_tokens=False) for word in words]
        for word, ids in zip(words, found, strict=True):
            if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
                pieces = tokenizer.convert_ids_to_tokens(ids)
                raise ValueError(f"Expected a class word of one token, got '{word}': {pieces}.")
        text = " " + prompt.format(tokenizer.mask_token)
        prompt = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
        self.register_buffer("words", torch.tensor(found)[:, 0])
        self.register_buffer("prompt", prompt)
        self.register_buffer("mask", (prompt == tokenizer.mask_token_id).nonzero()[0])

    def forward(self, ids):
        ids, end = self.asked(ids)
        real = (ids != self.padding).long()
        states = self.body(input_ids=ids, attention_mask=real).last_hidden_state
        at = (end + self.mask)[:, :, None].expand(-1, -1, states.shape[2])
        return self.head(states.gather(1, at)[:, 0])[:, self.words]

    def asked(self, ids):
        """Each text with the prompt before the token that ends it, and where the prompt begins."""
        size = len(self.prompt)
        end = (ids != self.padding).sum(1, keepdim=True) - 1
        place = torch.arange(ids.shape[1] + size, device=ids.device) - end  # from its beginning
        before = torch.cat([ids, ids[:, :1].expand(-1, size)], dim=1)  # as long as `place`
        behind = torch.cat([ids[:, :1].expand(-1, size), ids], dim=1)
        asked = self.prompt[place.clamp(0, size - 1)]
        return torch.where(place < 0, before, torch.where(place < size, asked, behind)), end


def read(path, tokenizer, length):
    """Token ids of one fixed length: padding to the longest would let a text shape others."""
    with Path(path).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    settings = {"padding": "max_length", "truncation": True, "max_length": length}
    ids = tokenizer([row["sentence"] for row in rows], return_tensors="pt", **settings)
    return TensorDataset(ids["input_ids"], torch.tensor([int(row["label"]) for row in rows]))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train_file", type=Path)
    parser.add_argument("dev_file", type=Path)
    parser.add_argument("--model", required=True, help="a folder, or a name at Hugging Face")
    parser.add_argument("--train", choices=["all", *TRAINED], default="all")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--length", type=int, default=32, help="tokens; longer ones are cut")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = MaskPrompt(AutoModelForMaskedLM.from_pretrained(options.model), tokenizer)
    if options.train in TRAINED:
        model = dpspan.train_only(model, TRAINED[options.train])
    model = model.to(options.device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    data = read(options.train_file, tokenizer, options.length)
    criterion = nn.CrossEntropyLoss()
    engine = dpspan.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(trained, lr=options.rate),
        data_loader=DataLoader(data, batch_size=options.batch),
        criterion=criterion,
        method=dpspan.DPSGD(clip=1.0),
        target_epsilon=options.epsilon,
        target_delta=1e-5,
        epochs=options.epochs,
        max_physical_batch_size=1000,
    )
    for _ in range(options.epochs):
        for ids, labels in loader:
            optimizer.zero_grad()
            criterion(model(ids.to(options.device)), labels.to(options.device)).backward()
            optimizer.step()
    ids, labels = read(options.dev_file, tokenizer, options.length).tensors
    with torch.no_grad():
        parts = [model.eval()(some.to(options.device)).argmax(1).cpu() for some in ids.split(256)]
    right = (torch.cat(parts) == labels).float().mean().item()
    print(f"ε = {engine.get_epsilon():.3f}, accuracy {100 * right:.1f} %")
    return right


if __name__ == "__main__":
    main()
