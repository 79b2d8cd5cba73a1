"""Two datasets compared by their gradients, not privately: nothing here adds noise.

Gradient subspace distance (GSD): G_priv, G_pub are per-sample gradients with random labels at the
initial weights, V their top k right singular vectors, θ the principal angles between the two spans:

    GSD = √(k − Σ cos²θ) / √k    (the paper's Definition 3 lacks the √k that its numbers have)
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from dpspan.choose.subspaces import (
    PIECE,
    Loss,
    energies,
    evaluated,
    principal_subspace,
    sample_gradients,
)
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.numerics import plain_arithmetic
from dpspan.gradients.operator import PerSampleGradients
from dpspan.public.data import PublicData, Samples
from dpspan.subspaces.subspace import Subspace
from dpspan.support.randomness import seeded


def gsd(
    model: nn.Module,
    loss_fn: Loss,
    private_batch: object,
    public_batch: object,
    rank: int = 16,
    *,
    seed: int = 0,
    piece: int = PIECE,
) -> float:
    """The distance of two batches, 0 (same subspace) to 1 (orthogonal ones). NOT private.

    Args:
        model: at the weights that training starts from, or a `ProbeNetwork`; run in
            evaluation mode, on a copy.
        loss_fn: a criterion, for which both sides get random labels of the model's classes, or a
            function (model, inputs[, labels]) → one loss per sample, by the labels there are.
        private_batch: inputs, (inputs,), (inputs, labels), a mapping, a Dataset or a DataLoader.
        public_batch: the same.
        rank: k; ValueError if one side's gradients span fewer directions.
        seed: of the random labels, the same for both sides.
        piece: samples run through the model at a time.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import dpspan
        >>> model, batch = nn.Linear(8, 3), torch.randn(50, 8)
        >>> distance = dpspan.gsd(model, nn.CrossEntropyLoss(), batch, batch, rank=4)
        >>> round(distance, 3)  # the same data, the same directions
        0.0
    """
    model = evaluated(model)
    gradients_of = partial(sample_gradients, model, loss_fn, seed=seed, piece=piece)
    private = Samples.of(private_batch, name="private")
    public = PublicData.of(public_batch, name="public")
    first, second = (  # the gradients of one are gone before those of the other are computed
        principal_subspace(gradients_of(data), rank, of=data.name, fewer=False)
        for data in (private, public)
    )
    return subspace_distance(first, second)


def unprivate_captured_energy(
    model: nn.Module,
    loss_fn: Loss,
    private_batch: object,
    public_batch: object,
    rank: int = 16,
    *,
    seed: int = 0,
    piece: int = PIECE,
) -> Tensor:
    """The share of each private gradient's energy in the public subspace, (n,). NOT private.

    By a criterion, private gradients have the labels they come with, as in training (random ones
    if there are none), and public ones random labels; a function gets the labels that there are.
    The arguments are those of `gsd`.
    """
    model = evaluated(model)
    public = PublicData.of(public_batch, name="public")
    gradients_of = partial(sample_gradients, model, loss_fn, seed=seed, piece=piece)
    subspace = principal_subspace(gradients_of(public), rank, of=public.name)
    private = Samples.of(private_batch, name="private")
    return energies(gradients_of(private, own_labels=True), [subspace])[:, 0]


@plain_arithmetic()
def subspace_distance(first: Subspace, second: Subspace) -> float:
    """√(1 − Σ cos²θ / k) of two subspaces of the same rank k with their bases written out.

    In float64 from here on: 1 − cos² of a small angle would be lost in float32. The bases are
    taken as they are, not as orthonormal as they should be.
    """
    if first.dimensions != second.dimensions:
        raise ValueError(
            f"Expected two subspaces of the same rank, got {first.dimensions} and "
            f"{second.dimensions}."
        )
    k = first.dimensions
    both = PerSampleGradients.concatenate([_doubled(first), _doubled(second)])
    gram = both.gram(both)
    lower, _ = torch.linalg.cholesky_ex(gram[:k, :k])
    other, _ = torch.linalg.cholesky_ex(gram[k:, k:])
    half: Tensor = torch.linalg.solve_triangular(lower, gram[:k, k:], upper=False)
    cosines: Tensor = torch.linalg.solve_triangular(other, half.T, upper=False)
    return float((1 - cosines.square().sum() / k).clamp(0, 1).sqrt())


def _doubled(subspace: Subspace) -> PerSampleGradients:
    basis = subspace.gradients
    rows = {name: [Rows(basis.term(name).rows(0, basis.samples).double())] for name in basis.terms}
    like = basis.like.double()
    return PerSampleGradients(basis.shapes, rows, basis.samples, like=like, scale=basis.scale)


class ProbeNetwork(nn.Module):
    """The GSD paper's probe network, for models too large to compare datasets with.

    Logits of images (n, channels, height, width) of any size; the same weights for a seed. By its
    Table 5b: 64 filters of 8 × 8, stride 5; pool 2; 16 filters of 4 × 4, stride 3; pool 2; 144
    units into the classes. 144 = 16 × 3 × 3 is what images of 224 × 224 give, so others are
    resized to that. 30,782 parameters for 3 channels and 14 classes.

    Examples:
        >>> import torch
        >>> from dpspan.choose import ProbeNetwork
        >>> ProbeNetwork(channels=3, classes=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, *, channels: int, classes: int, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.layers = nn.Sequential(
                nn.Conv2d(channels, 64, 8, stride=5),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(64, 16, 4, stride=3),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(16 * 3 * 3, classes),
            )

    def forward(self, images: Tensor) -> Tensor:
        """Logits, for a softmax or (several labels per image) a sigmoid in the loss."""
        if images.shape[-2:] != (224, 224):
            images = interpolate(images, (224, 224), mode="bilinear", antialias=True)
        logits: Tensor = self.layers(images)
        return logits
