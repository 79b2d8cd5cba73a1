"""Which architectures are exact: per-sample gradients against one sample at a time, in float64.

    python -m benchmarks.architectures             # all: stores the results and writes the page
    python -m benchmarks.architectures T5 Swin     # these only, and only shows them
    python -m benchmarks.architectures --render    # writes docs/architectures.md from the results

Every model is Hugging Face's own code in a tiny random configuration, in training mode with its
dropout at zero. The batch has 1 and 3 samples, and as many as the sequence is long: there a
shared table (positions, a mask) looks like a batch. Each goes through `per_sample_gradients` and
through one step of the engine without noise.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpspan

RESULTS = Path(__file__).parent / "results" / "architectures.json"
PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
EXACT = 1e-5  # parts of these models compute in float32 whatever they are given
CLIP = 0.1
TOKENS, LABELS = 6, 4  # of a text, and of what a decoder is given

Inputs = dict[str, Tensor]
Result = dict[str, Any]

_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {**_SMALL, "vocab_size": 40, "intermediate_size": 24, "max_position_embeddings": 64}
_TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "head_dim": 8}
_BART = {"vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2}
_BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24}
_BART |= {"decoder_ffn_dim": 24, "max_position_embeddings": 64, "pad_token_id": 0}
_BART |= {"decoder_start_token_id": 2, "forced_eos_token_id": 2, "bos_token_id": 1}
_T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
_T5 |= {"pad_token_id": 0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}
_IMAGE = {**_SMALL, "intermediate_size": 24, "image_size": 16, "patch_size": 8}
_SPEECH = {**_SMALL, "vocab_size": 40, "intermediate_size": 24, "conv_dim": (8, 8)}
_SPEECH |= {"conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
_SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
_SPEECH |= {"classifier_proj_size": 8, "pad_token_id": 0}


def text(samples: int) -> Inputs:
    """Token ids, the last sample's padded."""
    mask = torch.ones(samples, TOKENS, dtype=torch.long)
    if samples > 1:
        mask[-1, -2:] = 0
    ids = torch.randint(3, 40, (samples, TOKENS))
    return {"input_ids": ids * mask, "attention_mask": mask}


def text_to_text(samples: int) -> Inputs:
    """Token ids of an encoder and of a decoder."""
    return {**text(samples), "decoder_input_ids": torch.randint(3, 40, (samples, LABELS))}


def unmasked(samples: int) -> Inputs:
    """Token ids, all of one length."""
    return {"input_ids": torch.randint(3, 40, (samples, TOKENS))}


def pages(samples: int) -> Inputs:
    """Token ids and where on the page they stand."""
    corners = torch.randint(0, 50, (samples, TOKENS, 2))
    return {**text(samples), "bbox": torch.cat([corners, corners + 10], dim=2)}


def images(side: int = 16) -> Callable[[int], Inputs]:
    """Colour images."""
    return lambda samples: {"pixel_values": torch.randn(samples, 3, side, side).double()}


def sound(samples: int) -> Inputs:
    """Waveforms."""
    return {"input_values": torch.randn(samples, 120).double()}


def spectra(samples: int) -> Inputs:
    """Spectrograms, and token ids for the decoder."""
    ids = torch.randint(3, 40, (samples, LABELS))
    return {"input_features": torch.randn(samples, 8, 12).double(), "decoder_input_ids": ids}


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers with a tiny configuration, and inputs for it."""

    family: str
    model: str
    config: str
    settings: dict[str, Any]
    inputs: Callable[[int], Inputs] = text
    samples: tuple[int, ...] = (3, 1, TOKENS)
    extra: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The model, random weights of a fixed seed, in float64, nothing random about it."""
        import transformers

        config = getattr(transformers, self.config)(**{**self.settings, **self.extra})
        _without_randomness(config)
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, self.model)(config)
        for parameter in model.parameters():  # norms start at 1 and biases at 0: too special
            parameter.data += 0.1 * torch.randn_like(parameter)
        return model.double().train()


def _without_randomness(config: Any) -> None:
    names = ("drop", "mask_time_prob", "mask_feature_prob", "apply_spec_augment", "jitter")
    for name, value in list(vars(config).items()):
        if any(part in name for part in names) and isinstance(value, float | bool):
            setattr(config, name, type(value)(0))
        elif hasattr(value, "to_dict"):
            _without_randomness(value)


def _encoder(name: str, **extra: Any) -> Architecture:
    model = f"{name}ForSequenceClassification"
    return Architecture("text encoder", model, f"{name}Config", _TEXT, extra=extra)


def _decoder(name: str, settings: dict[str, Any] = _GROUPED, **extra: Any) -> Architecture:
    return Architecture(
        "text decoder", f"{name}ForCausalLM", f"{name}Config", settings, extra=extra
    )


def _bart(name: str, **extra: Any) -> Architecture:
    model = "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration"
    return Architecture(
        "encoder-decoder",
        model,
        f"{name}Config",
        _BART,
        text_to_text,
        (3, 1, LABELS, TOKENS),
        extra,
    )


def _vision(name: str, side: int = 16, **extra: Any) -> Architecture:
    model = f"{name}ForImageClassification"
    inputs, samples = images(side), (3, 1, 4, 5)
    return Architecture("vision", model, f"{name}Config", _IMAGE, inputs, samples, extra)


def _speech(name: str, **extra: Any) -> Architecture:
    model, samples = f"{name}ForSequenceClassification", (3, 1, 7)
    return Architecture("speech", model, f"{name}Config", _SPEECH, sound, samples, extra)


_GPT = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
_GPT |= {"bos_token_id": 1, "eos_token_id": 2}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "window_size": 4}
_SWIN |= {"num_heads": [2, 2]}
_STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
_MOBILE = {"hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 8]}
_CLIP_TEXT = {**_TEXT, "projection_dim": 8}

ARCHITECTURES: dict[str, Architecture] = {
    "BERT": _encoder("Bert"),
    "RoBERTa": _encoder("Roberta"),
    "DistilBERT": Architecture(
        "text encoder",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
    ),
    "ALBERT": _encoder("Albert", embedding_size=8),
    "ELECTRA": _encoder("Electra", embedding_size=8),
    "MPNet": _encoder("MPNet"),
    "DeBERTa": _encoder(
        "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=8
    ),
    "DeBERTa-v2": _encoder(
        "DebertaV2",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=4,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
    "Longformer": _encoder("Longformer", attention_window=[4, 4]),
    "BigBird": _encoder("BigBird", attention_type="original_full", sep_token_id=2),
    "XLNet": Architecture(
        "text encoder",
        "XLNetForSequenceClassification",
        "XLNetConfig",
        {"vocab_size": 40, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
    ),
    "Funnel": Architecture(
        "text encoder",
        "FunnelForSequenceClassification",
        "FunnelConfig",
        {"vocab_size": 40, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24},
        extra={"block_sizes": [1, 1], "num_decoder_layers": 1},
    ),
    "RoFormer": _encoder("RoFormer", embedding_size=16),
    "ConvBERT": _encoder("ConvBert", embedding_size=16, conv_kernel_size=3, head_ratio=1),
    "FNet": Architecture(
        "text encoder", "FNetForSequenceClassification", "FNetConfig", _TEXT, unmasked
    ),
    "MobileBERT": _encoder("MobileBert", embedding_size=16, intra_bottleneck_size=16),
    "SqueezeBERT": _encoder("SqueezeBert", embedding_size=16),
    "XLM-RoBERTa": _encoder("XLMRoberta"),
    "ModernBERT": _encoder("ModernBert", cls_token_id=1, sep_token_id=2, local_attention=4),
    "NomicBERT": _encoder("NomicBert"),
    "LayoutLM": Architecture(
        "text encoder",
        "LayoutLMForSequenceClassification",
        "LayoutLMConfig",
        {**_TEXT, "max_2d_position_embeddings": 64},
        pages,
    ),
    "CLIP text": Architecture(
        "text encoder", "CLIPTextModelWithProjection", "CLIPTextConfig", _CLIP_TEXT
    ),
    "GPT-2": Architecture("text decoder", "GPT2LMHeadModel", "GPT2Config", _GPT),
    "GPT-Neo": _decoder(
        "GPTNeo",
        {"vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 2},
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
    ),
    "GPT-NeoX": _decoder("GPTNeoX", _TEXT),
    "GPT-J": _decoder("GPTJ", _GPT, rotary_dim=4),
    "OPT": _decoder("OPT", _TEXT, ffn_dim=24, word_embed_proj_dim=16),
    "Bloom": _decoder("Bloom", {"vocab_size": 40, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "Llama": _decoder("Llama"),
    "Mistral": _decoder("Mistral", sliding_window=4),
    "Qwen2": _decoder("Qwen2"),
    "Qwen3": _decoder("Qwen3"),
    "Gemma": _decoder("Gemma"),
    "Gemma 2": _decoder("Gemma2", sliding_window=4),
    "Gemma 3 text": Architecture(
        "text decoder",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _GROUPED,
        extra={"sliding_window": 4},
    ),
    "Phi": _decoder("Phi", _TEXT),
    "Phi-3": _decoder("Phi3", _TEXT),
    "Falcon": _decoder("Falcon", _TEXT),
    "StableLM": _decoder("StableLm"),
    "OLMo 2": _decoder("Olmo2"),
    "Cohere": _decoder("Cohere"),
    "Mamba": _decoder(
        "Mamba", {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    ),
    "Mixtral": _decoder(
        "Mixtral", num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    ),
    "Switch": Architecture(
        "encoder-decoder",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        _T5,
        text_to_text,
        (3, 1, LABELS, TOKENS),
        {"num_experts": 4, "expert_capacity": 8, "num_sparse_encoder_layers": 1},
    ),
    "T5": Architecture(
        "encoder-decoder",
        "T5ForConditionalGeneration",
        "T5Config",
        _T5,
        text_to_text,
        (3, 1, LABELS, TOKENS),
    ),
    "BART": _bart("Bart"),
    "mBART": _bart("MBart"),
    "Pegasus": _bart("Pegasus"),
    "Marian": _bart("Marian"),
    "Blenderbot": _bart("Blenderbot"),
    "ProphetNet": Architecture(
        "encoder-decoder",
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        {"vocab_size": 40, "hidden_size": 16, "num_encoder_layers": 2, "num_decoder_layers": 2},
        text_to_text,
        (3, 1, LABELS, TOKENS),
        {"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "pad_token_id": 0},
    ),
    "ViT": _vision("ViT"),
    "DeiT": _vision("DeiT"),
    "BEiT": _vision("Beit", use_relative_position_bias=True, vocab_size=40),
    "Swin": Architecture(
        "vision", "SwinForImageClassification", "SwinConfig", _SWIN, images(), (3, 1, 4)
    ),
    "Swin V2": Architecture(
        "vision", "Swinv2ForImageClassification", "Swinv2Config", _SWIN, images(), (3, 1, 4)
    ),
    "ConvNeXt": Architecture(
        "vision",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        images(32),
        (3, 1, 4),
    ),
    "ConvNeXt V2": Architecture(
        "vision",
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        images(32),
        (3, 1, 4),
    ),
    "PoolFormer": Architecture(
        "vision",
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        _STAGES,
        images(64),
        (3, 1, 4),
    ),
    "SegFormer": Architecture(
        "vision",
        "SegformerForImageClassification",
        "SegformerConfig",
        _STAGES,
        images(64),
        (3, 1, 4),
        {"num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 16},
    ),
    "MobileViT": Architecture(
        "vision",
        "MobileViTForImageClassification",
        "MobileViTConfig",
        {**_MOBILE, "image_size": 64},
        images(64),
        (3, 1, 4),
        {"num_attention_heads": 2},
    ),
    "ResNet": Architecture(
        "vision",
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        images(32),
        (3, 1, 4),
        {"layer_type": "basic"},
    ),
    "LeViT": Architecture(
        "vision",
        "LevitForImageClassification",
        "LevitConfig",
        {"image_size": 32, "hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2]},
        images(32),
        (3, 1, 4),
        {"depths": [1, 1, 1], "key_dim": [8, 8, 8]},
    ),
    "CLIP vision": Architecture(
        "vision",
        "CLIPVisionModelWithProjection",
        "CLIPVisionConfig",
        _IMAGE,
        images(),
        (3, 1, 4, 5),
    ),
    "SigLIP vision": Architecture(
        "vision",
        "SiglipForImageClassification",
        "SiglipConfig",
        {},
        images(),
        (3, 1, 4, 5),
        {"vision_config": _IMAGE, "text_config": {**_TEXT, "projection_size": 16}},
    ),
    "DINOv2": _vision("Dinov2"),
    "PVT": Architecture(
        "vision",
        "PvtForImageClassification",
        "PvtConfig",
        {**_STAGES, "image_size": 32, "num_attention_heads": [1, 2, 2, 2]},
        images(32),
        (3, 1, 4),
    ),
    "Wav2Vec2": _speech("Wav2Vec2"),
    "HuBERT": _speech("Hubert"),
    "WavLM": _speech("WavLM", num_buckets=8),
    "Whisper": Architecture(
        "speech",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_BART, "num_mel_bins": 8, "max_source_positions": 6, "max_target_positions": 16},
        spectra,
        (3, 1, LABELS, TOKENS),
    ),
}


def loss(model: nn.Module, inputs: Inputs) -> Tensor:
    """One loss per sample in which every number of the output counts differently."""
    output = model(**inputs)[0].flatten(1)
    weights = torch.linspace(-1.0, 2.0, output.shape[1], dtype=output.dtype)
    return (output.sin() * weights).mean(1)


def one_at_a_time(model: nn.Module, inputs: Inputs) -> Tensor:
    """The per-sample gradients by plain autograd on batches of one, (n, p)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(next(iter(inputs.values())))):
        value = loss(model, {name: x[i : i + 1] for name, x in inputs.items()}).sum()
        grads = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


def engine_step(model: nn.Module, inputs: Inputs) -> Tensor:
    """The clipped sum that one step of the engine releases without noise, (p,)."""
    samples = len(next(iter(inputs.values())))
    records = [{name: x[i] for name, x in inputs.items()} for i in range(samples)]
    engine = dpspan.PrivacyEngine(accountant="rdp", debug_seed=0)
    module, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(records, batch_size=samples),
        noise_multiplier=0.0,
        non_private=True,
        max_grad_norm=CLIP,
        sample_rate=1.0,
        expected_batch_size=1.0,
    )
    try:
        for batch in loader:
            optimizer.zero_grad()
            loss(module, batch).mean().backward()
            optimizer.step()
            break
    finally:
        engine.detach()
    parameters = [p for p in model.parameters() if p.requires_grad]
    released = torch.cat([p.grad.flatten() for p in parameters])
    model.zero_grad(set_to_none=True)
    return released


def check(architecture: Architecture) -> Result:
    """Exact, refused, wrong or crash, and why; what is refused is tried again after `fix`."""
    head = {"family": architecture.family, "model": architecture.model}
    model = architecture.build()
    try:
        dpspan.validate(model)
    except dpspan.UnsupportedModule as error:
        after = _check(architecture, dpspan.fix(model))
        if after["status"] == "exact":
            after["status"] = "exact after fix"
        return {**head, "reason": _first_problem(error), **after}
    return {**head, **_check(architecture, model)}


def _check(architecture: Architecture, model: nn.Module) -> Result:
    worst = 0.0
    for samples in architecture.samples:
        torch.manual_seed(samples)
        inputs = architecture.inputs(samples)
        rows = one_at_a_time(model, inputs)
        clipped = rows * (CLIP / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)).clamp(max=1)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = dpspan.per_sample_gradients(model, loss, inputs).matrix()
                step = engine_step(model, inputs)
        except (dpspan.CaptureError, dpspan.UnsupportedModule) as error:
            return {"status": "refused", "reason": _first_problem(error)}
        except Exception as error:
            reason = f"n = {samples}: {type(error).__name__}: {error}"
            return {"status": "crash", "reason": reason}
        apart = float(((found - rows).norm(dim=1) / rows.norm(dim=1)).max())
        off = float((step - clipped.sum(0)).norm() / clipped.sum(0).norm())
        worst = max(worst, apart, off)
        if worst > EXACT:
            reason = f"n = {samples}: rows off by {apart:.1e}, the step by {off:.1e}"
            return {"status": "wrong", "error": worst, "reason": reason}
    return {"status": "exact", "error": worst}


def _first_problem(error: Exception) -> str:
    """The message, of a list of modules only the first."""
    head, _, items = str(error).partition("\n  - ")
    return items.partition("\n  - ")[0] or " ".join(head.split())


HEAD = """# Which architectures

`python -m benchmarks.architectures` builds each of these models from Hugging Face's own code in a tiny random configuration and compares what dpspan records with plain autograd on one sample at a time, in float64.
It does so through `per_sample_gradients` and through one step of the engine without noise, with batches of 3 samples, of 1, and of as many as the sequence is long: there a table that all samples share looks like a batch.
The error is the largest distance of a gradient from the plain one, relative to its norm; models that compute parts in float32 whatever they are given come out at about 1e-8.
Nothing in this table may be wrong: what is not exact is refused with a sentence that says why.
It was made with torch {torch} and transformers {transformers}.

How a model is taken is found out at its first batch: it is run on two and on three samples, and what does not grow with the samples is shared by them.
A layer that sees something else than one sample after the other (a bias between positions, windows cut out of images) makes the module around it go through `torch.func` as a whole, which takes the memory of its parameters once for each sample.
Before anything is recorded in such a way, the gradients of two samples are compared with plain autograd.

| architecture | | class | error |
|---|---|---|---|
"""  # noqa: E501
MARKS = {"exact": "exact", "exact after fix": "exact after `dpspan.fix`"}


def page(results: Result) -> str:
    """The table, and below it what is refused and why."""
    found = results["architectures"]
    text = HEAD.format(**results["versions"])
    for name, each in found.items():
        error = f"{each['error']:.0e}" if "error" in each else ""
        status = MARKS.get(each["status"], each["status"])
        text += f"| {name} ({each['family']}) | {status} | `{each['model']}` | {error} |\n"
    text += "\n## What is refused, and why\n\n"
    for name, each in found.items():
        if each["status"] not in MARKS:
            text += f"- **{name}**: {each['reason']}\n"
    return text


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures")
    parser.add_argument("names", nargs="*", choices=[[], *ARCHITECTURES])
    parser.add_argument("--render", action="store_true", help="write the page and run nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.render:
        found = {}
        for name in options.names or ARCHITECTURES:
            found[name] = check(ARCHITECTURES[name])
            print(name, *(found[name].get(key, "") for key in ("status", "error", "reason")))
        versions = {name: version(name).partition("+")[0] for name in ("torch", "transformers")}
        results = {"versions": versions, "architectures": found}
        if options.names:
            return
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
