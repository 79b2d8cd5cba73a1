"""LoRA by peft: no weight is silently off, and it trains by the private Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import dpspan
from helpers.needs import extra

transformers: Any = extra("transformers")
peft: Any = extra("peft")
extra("accelerate")

VOCABULARY = 30


def bert() -> nn.Module:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
    config = transformers.BertConfig(**sizes, **layers, **off, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off))


def llama() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **layers))


# The model, which of its layers get adapters, and what else peft is told.
CASES: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "bert": (bert, ("query", "value"), {}),
    "bert, head": (bert, ("query", "dense"), {"modules_to_save": ["classifier"]}),
    "bert, scaled by the root": (bert, ("value",), {"use_rslora": True, "lora_alpha": 7}),
    "bert, biases": (bert, ("query",), {"bias": "lora_only"}),
    "bert, all biases": (bert, ("query",), {"bias": "all"}),
    "gpt2": (gpt2, ("c_attn", "c_fc"), {"fan_in_fan_out": True}),
    "gpt2, embedding": (gpt2, ("wte", "c_attn"), {"fan_in_fan_out": True}),
    "llama": (llama, ("q_proj", "v_proj", "down_proj"), {}),
    "llama, head": (llama, ("q_proj",), {"modules_to_save": ["lm_head"]}),
}


def adapted(name: str, **more: Any) -> tuple[nn.Module, nn.Module]:
    """A model, and itself with adapters that do something already; both in float64."""
    make, targets, options = CASES[name]
    torch.manual_seed(0)
    plain = make()
    config = peft.LoraConfig(r=2, target_modules=list(targets), **options, **more)
    torch.manual_seed(0)
    model = peft.get_peft_model(make(), config).double()
    for path, parameter in model.named_parameters():
        if "lora_" in path or "modules_to_save" in path:
            nn.init.normal_(parameter, std=0.3)
    return plain.double(), model


def unwrapped(plain: nn.Module, model: Any, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """The plain model's weights as functions of the adapters', without a line of peft's layers."""
    base = model.base_model.model
    found: dict[str, Tensor] = {}
    for name, parameter in plain.named_parameters():
        path, _, leaf = name.rpartition(".")
        layer = base.get_submodule(path)
        prefix = f"base_model.model.{path}"

        def value(inner: str, default: Any = None, prefix: str = prefix) -> Any:
            return trained.get(f"{prefix}.{inner}", default)

        if hasattr(layer, "modules_to_save"):
            own = getattr(layer.modules_to_save["default"], leaf)
            found[name] = value(f"modules_to_save.default.{leaf}", own)
            continue
        if not hasattr(layer, "base_layer"):
            found[name] = value(leaf, parameter.detach())
            continue
        found[name] = value(f"base_layer.{leaf}", parameter.detach())
        if leaf != "weight":
            continue
        scale = layer.scaling["default"]
        if isinstance(layer.base_layer, nn.Embedding):
            a, b = value("lora_embedding_A.default"), value("lora_embedding_B.default")
            found[name] = found[name] + scale * (b @ a).T
        else:
            a, b = value("lora_A.default.weight"), value("lora_B.default.weight")
            change = scale * (b @ a)
            turned = not isinstance(layer.base_layer, nn.Linear)  # GPT-2's Conv1D
            found[name] = found[name] + (change.T if turned else change)
    return found


def losses(model: Any, ids: Tensor) -> Tensor:
    """One for each record: of the next token, or of a class."""
    logits = model(input_ids=ids).logits
    if logits.dim() == 3:
        every = nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        )
        return every.mean(1)
    return nn.functional.cross_entropy(logits, ids[:, 0] % 3, reduction="none")


def expected_rows(plain: nn.Module, model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Per-record gradients by plain autograd on the plain model, one record at a time."""
    trained = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
    wanted = [n for n, p in model.named_parameters() if p.requires_grad]
    rows: dict[str, list[Tensor]] = {name: [] for name in wanted}

    class Caller(nn.Module):
        def forward(self, **inputs: Any) -> Any:
            values = unwrapped(plain, model, trained)
            return functional_call(plain, values, kwargs=inputs, tie_weights=False)

    for one in ids:
        (loss,) = losses(Caller(), one[None])
        found = torch.autograd.grad(loss, [trained[name] for name in wanted], allow_unused=True)
        for name, gradient in zip(wanted, found, strict=True):
            rows[name].append(torch.zeros_like(trained[name]) if gradient is None else gradient)
    return {name: torch.stack(gradients) for name, gradients in rows.items()}


@pytest.mark.parametrize("name", CASES)
def test_per_sample_gradients_are_those_of_the_unwrapped_model(name: str) -> None:
    plain, model = adapted(name)
    ids = torch.randint(2, VOCABULARY, (5, 6), generator=torch.Generator().manual_seed(1))
    expected = expected_rows(plain, model, ids)
    assert all(float(rows.norm()) > 0 for rows in expected.values())
    J = dpspan.per_sample_gradients(model, losses, ids)
    for path, rows in expected.items():
        found = J.select([path]).matrix()
        torch.testing.assert_close(found, rows.flatten(1), rtol=1e-6, atol=1e-9, msg=path)


VARIANTS: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "dropout": {"lora_dropout": 0.5},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_variants_are_exact(name: str, variant: str) -> None:
    """Against peft's own layers, one record at a time."""
    _, model = adapted(name, **VARIANTS[variant])
    model.eval()  # a record alone draws another dropout
    ids = torch.randint(2, VOCABULARY, (5, 6), generator=torch.Generator().manual_seed(1))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows = [torch.autograd.grad(losses(model, one[None])[0], [*trained.values()]) for one in ids]
    J = dpspan.per_sample_gradients(model, losses, ids)
    for index, path in enumerate(trained):
        expected = torch.stack([row[index].flatten() for row in rows])
        found = J.select([path]).matrix()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9, msg=path)


@pytest.mark.parametrize("name", ["bert, head", "gpt2"])
def test_adapters_train_by_the_private_trainer_and_go_on(name: str, tmp_path: Path) -> None:
    from dpspan.frameworks.transformers import Privacy, PrivateTrainer

    class StopOnceSaved(transformers.TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    def trainer(*callbacks: Any) -> Any:
        _, model = adapted(name)
        tokens = torch.randint(2, VOCABULARY, (16, 6), generator=torch.Generator().manual_seed(2))
        labels = [row if name == "gpt2" else int(row[0]) % 3 for row in tokens]
        records = [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]
        options = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=0.1,
            save_strategy="epoch",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        privacy = Privacy(epsilon=8.0, delta=1e-3, accountant="rdp")
        return PrivateTrainer(
            model, options, train_dataset=records, callbacks=[*callbacks], privacy=privacy
        )

    first = trainer(StopOnceSaved())
    before = {n: p.detach().clone() for n, p in first.model.named_parameters()}
    with pytest.raises(KeyboardInterrupt):
        first.train()
    after = {n: p.detach().clone() for n, p in first.model.named_parameters()}
    for path, parameter in first.model.named_parameters():
        assert torch.equal(after[path], before[path]) != parameter.requires_grad, path
    second = trainer()
    second.train(resume_from_checkpoint=True)
    assert second.engine.ledger.steps == second.state.global_step == 2
    assert any(not torch.equal(p, after[n]) for n, p in second.model.named_parameters())
    assert second.engine.plan.model.startswith("PeftModel")
