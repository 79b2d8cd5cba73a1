import pytest
import torch
from benchmarks.text_models import TransformerEncoder
from torch import nn

from dpspan.model.networks import MLP, PaperCNN, ResNet20, WideResNet


def images(n, *shape):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(0))


def tokens(n, length, vocabulary=50):
    return torch.randint(vocabulary, (n, length), generator=torch.Generator().manual_seed(0))


def small_transformer(**changes):
    return TransformerEncoder(
        **{"vocabulary": 50, "width": 16, "heads": 2, "hidden": 32, "layers": 2, "length": 8}
        | changes
    )


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (PaperCNN(), 26_010),
        (ResNet20(), 268_346),
        (ResNet20(classes=100), 268_346 + 90 * 65),
        # Zagoruyko and Komodakis' WRN-28-4; group norms have as many parameters as batch norms
        (WideResNet(), 5_849_050),
        (MLP(), 785_000 + 1_001_000 + 10_010),
        (MLP(inputs=4, hidden=(), classes=3), 15),
        # embeddings, four blocks of 12 w² + 13 w (hidden = 4 w), final norm, head
        (TransformerEncoder(1000), 1064 * 256 + 4 * (12 * 256**2 + 13 * 256) + 512 + 514),
    ],
)
def test_number_of_parameters(model, parameters):
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("model", "x", "classes"),
    [
        (MLP(classes=7), images(3, 1, 28, 28), 7),
        (PaperCNN(), images(3, 1, 28, 28), 10),
        (PaperCNN(channels=3, size=32, classes=5), images(3, 3, 32, 32), 5),
        (ResNet20(), images(3, 3, 32, 32), 10),
        (WideResNet(depth=10, widen=1, classes=4), images(3, 3, 32, 32), 4),
        (small_transformer(classes=4), tokens(3, 8), 4),
        (small_transformer(), tokens(3, 5), 2),
    ],
)
def test_shape_and_independence_of_samples(model, x, classes):
    logits = model(x)
    assert logits.shape == (3, classes)
    alone = torch.cat([model(sample[None]) for sample in x])
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "model", [MLP(), PaperCNN(), ResNet20(), WideResNet(10, 1), small_transformer()]
)
def test_every_parameter_gets_a_gradient(model):
    if isinstance(model, TransformerEncoder):
        x = tokens(4, 8)
    else:
        x = images(4, *((3, 32, 32) if isinstance(model, ResNet20 | WideResNet) else (1, 28, 28)))
    nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 0, 1])).backward()
    for name, parameter in model.named_parameters():
        # a key's bias shifts all scores of a query alike: its gradient is zero by nature
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0 or name.endswith("key.bias"), name


def test_resnet_has_biases_and_norms_as_in_gep():
    model = ResNet20()
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert len(convolutions) == 19
    assert all(m.bias is None for m in convolutions)
    assert model.head.bias is not None
    assert all(m.num_groups == 4 and not m.affine for m in norms)


def test_resnet_shortcut_strides_and_pads_with_zeros():
    block = ResNet20().blocks[3]  # 16 → 32 channels
    with torch.no_grad():
        block.conv2.weight.zero_()
    x = images(2, 16, 8, 8)
    expected = nn.functional.group_norm(x[:, :, ::2, ::2], 4).relu()
    y = block(x)
    torch.testing.assert_close(y[:, :16], expected)
    assert not y[:, 16:].any()


def test_transformer_uses_positions():
    model = small_transformer()
    x = tokens(1, 8)
    assert not torch.allclose(model(x), model(x.flip(1)))
