"""The example that asks a masked language model for a word: a tiny one with random weights."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpspan
from helpers.needs import extra
from helpers.oracle import per_sample_matrix

transformers: Any = extra("transformers")
tokenizers: Any = extra("tokenizers")

PATH = Path(__file__).parents[2] / "examples" / "prompt_text.py"
prompt_text: Any = types.ModuleType("prompt_text")
exec(compile(PATH.read_text(), PATH, "exec"), prompt_text.__dict__)

NOUNS = ["film", "story", "plot", "it", "worth"]
WORDS = ["a", "dull", "moving", "was", "great", "terrible", ".", "##while", *NOUNS]
SPECIAL = {"pad": "<p>", "unk": "<u>", "cls": "<c>", "sep": "<s>", "mask": "<m>"}
VOCABULARY = {word: index for index, word in enumerate([*SPECIAL.values(), *WORDS])}
SIZES = {
    "vocab_size": len(VOCABULARY), "hidden_size": 16, "intermediate_size": 16, "pad_token_id": 0,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 24,
    "initializer_range": 0.3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
KINDS = {
    "BERT": (transformers.BertConfig, transformers.BertForMaskedLM),
    "RoBERTa": (transformers.RobertaConfig, transformers.RobertaForMaskedLM),
}


def tokenizer_of(**special: str | None) -> Any:
    pieces = tokenizers.Tokenizer(tokenizers.models.WordPiece(VOCABULARY, unk_token="<u>"))
    pieces.normalizer = tokenizers.normalizers.Lowercase()
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ends = [(SPECIAL[each], VOCABULARY[SPECIAL[each]]) for each in ("sep", "cls")]
    pieces.post_processor = tokenizers.processors.BertProcessing(*ends)
    named = {f"{name}_token": token for name, token in {**SPECIAL, **special}.items() if token}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, **named)


def language_model(kind: str = "BERT") -> Any:
    torch.manual_seed(0)
    config, model = KINDS[kind]
    return model(config(**SIZES))


def prompted(kind: str = "BERT") -> Any:
    return prompt_text.MaskPrompt(language_model(kind), tokenizer_of())


def batch(length: int = 9) -> torch.Tensor:
    texts = ["a dull film", "a moving story", "great", "a plot was terrible . it was dull"]
    settings = {"padding": "max_length", "truncation": True, "max_length": length}
    ids: torch.Tensor = tokenizer_of()(texts, return_tensors="pt", **settings)["input_ids"]
    return ids


def test_the_prompt_stands_before_the_end_of_each_text() -> None:
    model, ids = prompted(), batch()
    asked, end = model.asked(ids)
    told = [" ".join(tokenizer_of().convert_ids_to_tokens(row)) for row in asked]
    assert told[1] == "<c> a moving story it was <m> . <s> <p> <p> <p> <p>"
    assert told[3] == "<c> a plot was terrible . it was it was <m> . <s>"  # the text was cut
    assert (asked.gather(1, end + model.mask) == tokenizer_of().mask_token_id).all()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_words_where_the_mask_is(kind: str) -> None:
    model, whole, ids = prompted(kind).eval(), language_model(kind).eval(), batch()
    asked, _ = model.asked(ids)
    logits = whole(input_ids=asked, attention_mask=(asked != 0).long()).logits
    at = (asked == tokenizer_of().mask_token_id).long().argmax(1)
    words = [VOCABULARY["terrible"], VOCABULARY["great"]]
    expected = logits[torch.arange(len(ids)), at][:, words]
    torch.testing.assert_close(model(ids), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing_and_records_are_apart(kind: str) -> None:
    model, ids = prompted(kind).double().eval(), batch()
    together = model(ids)
    for index, row in enumerate(ids):
        alone = row[: int((row != 0).sum())][None]
        torch.testing.assert_close(model(alone)[0], together[index])


@pytest.mark.parametrize("trained", ["all", *prompt_text.TRAINED])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_each_record_are_those_by_itself(kind: str, trained: str) -> None:
    if trained == "lora":
        extra("peft")
    model = prompted(kind)
    if trained != "all":
        model = dpspan.train_only(model, prompt_text.TRAINED[trained])
    model = model.double()
    embeddings = model.body.get_input_embeddings()
    decoder = model.head.decoder if kind == "RoBERTa" else model.head.predictions.decoder
    assert decoder.weight is embeddings.weight  # both of their gradients belong to one weight

    def loss(given: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(given(ids), labels, reduction="none")

    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # which starts at zero, and then its partner has no gradient
            nn.init.normal_(parameter, std=0.1)
    labels = torch.tensor([0, 1, 1, 0])
    found = dpspan.per_sample_gradients(model, loss, batch(), labels).matrix()
    torch.testing.assert_close(found, per_sample_matrix(model, loss, batch(), labels))
    assert (found.norm(dim=1) > 0).all()


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of one token, got 'worthwhile': \['worth', '##while'\]"):
        prompt_text.MaskPrompt(language_model(), tokenizer_of(), words=("dull", "worthwhile"))
    with pytest.raises(ValueError, match=r"of one token, got 'splendid': \['<u>'\]"):
        prompt_text.MaskPrompt(language_model(), tokenizer_of(), words=("dull", "splendid"))
    with pytest.raises(ValueError, match="The tokenizer has no mask"):
        prompt_text.MaskPrompt(language_model(), tokenizer_of(mask=None))


@pytest.mark.parametrize(
    ("trained", "rate", "epochs"),
    [
        ("all", "0.01", "25"),
        pytest.param("biases", "0.03", "60", marks=pytest.mark.slow),
        pytest.param("lora", "0.1", "25", marks=pytest.mark.slow),
    ],
)
def test_it_learns(
    trained: str, rate: str, epochs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if trained == "lora":
        extra("peft")
    language_model().save_pretrained(tmp_path)
    tokenizer_of().save_pretrained(tmp_path)
    nouns = [*NOUNS, "a film", "a story", "a plot"]
    words = enumerate(("dull", "moving"))
    lines = [f"a {word} {noun}\t{label}" for label, word in words for noun in nouns]
    paths = [tmp_path / "train.tsv", tmp_path / "dev.tsv"]
    for path in paths:
        path.write_text("\n".join(["sentence\tlabel", *lines * 32]))
    accuracy = prompt_text.main(
        [*map(str, paths), "--model", str(tmp_path), "--train", trained, "--epsilon", "200",
         "--batch", "256", "--epochs", epochs, "--rate", rate, "--length", "9"]
    )  # fmt: skip
    assert accuracy > 0.85  # chance is 0.5
    assert "ε = 200.0" in capsys.readouterr().out
