"""Membership inference by the loss: can the training samples of a model be told from others?

Yeom et al. (2018) and Sablayrolles et al. (2019) call a sample a member of the training set if its
loss is small. As in section 5.3 of the RGP paper, the threshold is fitted on one half of the
samples and the attack is evaluated on the other.
"""

import math
from dataclasses import asdict, dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest
from sklearn.metrics import auc, roc_curve
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset

from dpspan.engine.sampling import PrivateLoader
from dpspan.model.per_sample import SampleCriterion, SampleLosses, check_one_each
from dpspan.public.data import move, read
from dpspan.public.fingerprints import Array
from dpspan.support.checks import check_count, check_seed, expect
from dpspan.support.left_as_found import left_as_found
from dpspan.support.strict_json import plain

FEWEST = 20  # of each kind
FEWEST_FOR_1_PERCENT = 100  # non-members to evaluate on: of fewer, 1 % is not even one


@dataclass(frozen=True, kw_only=True)
class MembershipResult:
    """How well the loss tells members of the training set from other samples.

    Everything here is computed from private data without noise: it is for the operator to read,
    and to publish it costs privacy that no ledger counts. An attack gives a lower bound of what
    leaks. A high success rate proves a leak, but a rate near 50 % proves nothing: a better attack
    may succeed where this one fails, and single records may be exposed where the average is not.

    Attributes:
        success_rate: the mean of the shares of members and of non-members that are told right on
            the half that the threshold was not fitted on; 0.5 is guessing, whatever the set sizes.
        confidence: 95 % interval of the success rate (Newcombe's, from Wilson's intervals of the
            two shares). It covers the choice of the samples evaluated on, for this model and
            threshold; not how another training run would come out.
        auc: area under the ROC curve on that half; a tie counts one half.
        tpr_at_1_percent_fpr: the share of that half's members found when at most 1 % of its
            non-members are taken for members; NaN if it has fewer than 100 non-members.
        threshold: a loss of at most this is called a member's; -inf if on the half it was fitted
            on no threshold did better than to guess.
        members: number of members given, of which half are evaluated on.
        non_members: likewise.
    """

    success_rate: float
    confidence: tuple[float, float]
    auc: float
    tpr_at_1_percent_fpr: float
    threshold: float
    members: int
    non_members: int

    def describe(self) -> dict[str, Any]:
        """The result as plain data, None for what is not finite; tagged as not private."""
        return {**plain(asdict(self)), "unprivate": True}


def membership_inference(
    model: nn.Module,
    members: object,
    non_members: object,
    *,
    loss: SampleLosses | None = None,
    criterion: nn.Module | None = None,
    batch_size: int = 512,
    seed: int = 0,
) -> MembershipResult:
    """Attack a model by the losses of its samples; see `MembershipResult` for what that proves.

    The model runs in evaluation mode on its own device and is left as it was, and so is torch's
    random state. Whether a sample is in both sets is not checked; each set must hold every sample
    once. A loss of NaN is refused, an infinite one is merely larger than all others.

    Args:
        model: the trained model.
        members: samples that it was trained on: a Dataset, DataLoader or tensors, with labels.
            Give them without random augmentation.
        non_members: other samples of the same distribution, likewise. If they differ in anything
            but membership, the attack measures that difference too.
        loss: `loss(model, inputs, labels)` gives one loss per sample, instead of the criterion;
            labels are None for samples that have none.
        criterion: of the training; cross-entropy if neither it nor a loss is given.
        batch_size: samples at a time, at the most.
        seed: for the halves, and for whatever the model or a DataLoader draws from torch.
    """
    check_count("batch_size", batch_size)
    seed = check_seed(seed)
    expect(loss is None or callable(loss), "loss to be a function", loss)
    expect(loss is None or criterion is None, "a loss or a criterion, not both", criterion)
    if loss is None:
        loss = SampleCriterion(criterion or nn.CrossEntropyLoss(), instead="loss=")
    with left_as_found(model, seed, mode="evaluation"), torch.no_grad():
        inside = _losses("members", members, loss, model, batch_size)
        outside = _losses("non-members", non_members, loss, model, batch_size)
    generator = np.random.default_rng(seed)
    (fit_inside, inside_held_out), (fit_outside, outside_held_out) = (
        np.split(generator.permutation(losses), [len(losses) // 2]) for losses in (inside, outside)
    )
    threshold = best_threshold(fit_inside, fit_outside)
    found = int((inside_held_out <= threshold).sum())
    mistaken = int((outside_held_out <= threshold).sum())
    rate, confidence = balanced_rate(found, len(inside_held_out), mistaken, len(outside_held_out))
    _, fpr, tpr = _roc(inside_held_out, outside_held_out)
    return MembershipResult(
        success_rate=rate,
        confidence=confidence,
        auc=float(auc(fpr, tpr)),
        tpr_at_1_percent_fpr=tpr_at_1_percent_fpr(inside_held_out, outside_held_out),
        threshold=threshold,
        members=len(inside),
        non_members=len(outside),
    )


def best_threshold(inside: Array, outside: Array) -> float:
    """The threshold of the best balanced success rate; of equally good ones, the lowest.

    In the middle between the largest loss that is called a member's and the next one.
    """
    values, fpr, tpr = _roc(inside, outside)
    called = int(np.argmax(tpr - fpr))  # so many of the values; never all, which only guesses
    below = float(values[called - 1]) if called else -math.inf
    above = float(values[called])
    middle = below / 2 + above / 2
    return middle if below <= middle < above else below  # neighbours, or an infinite loss


def balanced_rate(
    found: int, inside: int, mistaken: int, outside: int
) -> tuple[float, tuple[float, float]]:
    """The mean of TPR and TNR with its 95 % interval, from `found` of the members and so on.

    It is 1/2 + (TPR − FPR) / 2, and for the difference of two shares Newcombe (1998, method 10)
    joins Wilson's intervals. They keep a width at shares of 0 and 1, where attacks often end up.
    """
    tpr, fpr = found / inside, mistaken / outside
    of_tpr = binomtest(found, inside).proportion_ci(0.95, method="wilson")
    of_fpr = binomtest(mistaken, outside).proportion_ci(0.95, method="wilson")
    rate = 0.5 + (tpr - fpr) / 2
    down = math.hypot(tpr - of_tpr.low, of_fpr.high - fpr) / 2
    up = math.hypot(of_tpr.high - tpr, fpr - of_fpr.low) / 2
    return rate, (max(rate - down, 0.0), min(rate + up, 1.0))


def tpr_at_1_percent_fpr(inside: Array, outside: Array) -> float:
    """The largest TPR of a threshold with an FPR of at most 1 %; equal losses stay together."""
    if len(outside) < FEWEST_FOR_1_PERCENT:
        return math.nan
    _, fpr, tpr = _roc(inside, outside)
    return float(tpr[fpr <= 0.01].max())


def _roc(inside: Array, outside: Array) -> tuple[Array, Array, Array]:
    """The distinct losses in order, and FPR and TPR when the 0, 1, 2, … lowest are members'."""
    members = np.repeat([1, 0], [len(inside), len(outside)])
    values, places = np.unique(np.concatenate([inside, outside]), return_inverse=True)
    # By place, since scikit-learn takes no infinite scores. The score falls with the loss.
    fpr, tpr, _ = roc_curve(members, -places, drop_intermediate=False)
    return values, fpr, tpr


def _losses(
    name: str, source: object, losses_of: SampleLosses, model: nn.Module, batch_size: int
) -> Array:
    """One loss per sample of a set, in double precision, so many samples at a time."""
    if isinstance(source, PrivateLoader):
        raise TypeError(
            f"The {name} were given as a PrivateLoader, which draws records at random and leaves "
            "some out: give its dataset, or a DataLoader over its dataset."
        )
    if isinstance(source, Dataset):
        source = DataLoader(source, batch_size=batch_size)
    tensor = next(chain(model.parameters(), model.buffers()), torch.empty(0))
    pieces = [np.empty(0)]
    try:
        for batch in read(source):
            count = len(tree_leaves(batch)[0])
            for start in range(0, count, batch_size):
                some = tree_map(itemgetter(slice(start, start + batch_size)), batch)
                inputs, *labels = move(some, tensor.device)
                losses = losses_of(model, inputs, labels[0] if labels else None)
                losses = check_one_each(losses, min(batch_size, count - start))
                pieces.append(losses.double().cpu().numpy())
    except (TypeError, ValueError) as error:
        error.add_note(f"This was said of the {name}.")
        raise
    found = np.concatenate(pieces)
    cure = "Half of them fit the threshold and half evaluate it: give more."
    expect(len(found) >= FEWEST, f"at least {FEWEST} {name}", len(found), cure)
    if missing := int(np.isnan(found).sum()):
        raise ValueError(
            f"The losses of {missing} of the {len(found)} {name} are NaN, neither small nor "
            "large: look for NaN in the weights of the model, and leave out samples that hold NaN."
        )
    return found
