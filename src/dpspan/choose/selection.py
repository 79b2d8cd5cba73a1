"""`choose_public`: which public data to train with, decided by private records with ε-DP.

Record i gives candidate j the score s_ij = ‖V_jᵀ g_i‖² / ‖g_i‖² (captured energy), between 0 and 1.
V_j comes from public data and public weights alone; q_j = Σ_i s_ij.

The guarantee: s_ij depends on record i and on public things only. So adding a record raises every
q_j by something between 0 and 1, and both mechanisms of `picking` are ε-DP. "No public data" is a
candidate like any other: every record gives it the score `threshold`, so adding one raises it by
`threshold` ≤ 1; it is ahead of candidates that capture less than that on average. A record
whose gradient is not finite gives 0 to all candidates with data.

Nor does what a record looks like depend on the others: each is collated alone, so that a collate
function that pads to the longest record, mixes records or counts them sees one. Only records that
come out in one shape get into one batch.

Where records belong to units, the score of a unit is the mean of its records' scores, between 0 and
1 as well, and all the above holds with units in place of records.

On a Poisson sample of rate r the mechanism is run with a larger ε₀: what is ε₀-DP on the sample is
log(1 + r(exp(ε₀) − 1))-DP on the data, so ε₀ = log(1 + (exp(ε) − 1)/r).
"""

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpspan.accounting.events import pure_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.picking import MECHANISMS, pick, probability_of_best
from dpspan.choose.probe import PIECE, Loss, Probe, check_independence, drawn, principal_subspace
from dpspan.engine.plan import units_of
from dpspan.engine.sampling import PoissonDraw, PrivateLoader, records_of
from dpspan.public.data import PublicData, hold, like
from dpspan.public.overlap import refuse_overlap
from dpspan.subspaces.subspace import Subspace
from dpspan.support.checks import check_count, check_number, check_share, expect
from dpspan.support.processes import refuse_several_processes
from dpspan.support.randomness import FreshWorker, fresh_randomness
from dpspan.support.units import RECORDS_PER_UNIT, Ids, Units

UNIT = 2**24  # scores are counted in whole numbers of 1/UNIT, so that their sums are exact
# Last bits of a record's score can depend on the records it is computed beside. If the others'
# scores together move each sum by up to η, either way, when one record comes or goes, a candidate
# gains or loses up to 1 + 2η against another, and a mechanism of ε costs ε(1 + 2η). This share of ε
# is kept for that, which is enough for η = 1/254. (Batches are of one size; a record's place in
# its batch has changed scores by up to 1e-7 on one CPU and not at all on others. 60,000 scores off
# by 1e-7 each, either way as often, would move their sum by 2e-5; all the same way, 39,000 may.)
_KEPT = Fraction(1, 128)
_LARGEST_EPSILON = 10.0
_SUCCESS = 0.95


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen, and what that says. All of it may be published."""

    name: str | None  # None: no public data
    public: PublicData | None  # the samples compared, at most `samples`: for `GEP(public=...)`
    epsilon: float
    mechanism: str
    candidates: tuple[str, ...]  # those with public data
    threshold: float | None
    note: str  # how close candidates may be to be told apart


def choose_public(
    model: nn.Module,
    loss_fn: Loss,
    private: object,
    candidates: Mapping[str, object],
    *,
    ledger: Ledger,
    epsilon: float = 0.1,
    threshold: float | None = None,
    rank: int = 16,
    samples: int = 2000,
    mechanism: str = "permute-and-flip",
    sample_rate: float = 1.0,
    records: int | None = None,
    unit: Ids | Units | None = None,
    records_per_unit: int = RECORDS_PER_UNIT,
    seed: int = 0,
    piece: int = PIECE,
) -> Choice:
    """Choose public data by captured energy, ε-DP, and put it on the ledger.

    Args:
        model: at weights that do not come from the private data (initial, or trained on public
            data), or a `ProbeNetwork`. It is run in evaluation mode, on a copy for each batch.
        loss_fn: a criterion, or a function (model, inputs, labels) → one loss per sample.
        private: the private data, a DataLoader, a Dataset or tensors (inputs, labels).
        candidates: public datasets by name. With a criterion their gradients have random labels;
            a function gets the labels that they come with, so they need some.
        ledger: `engine.ledger` of the run that will train, so that it pays for the choice.
        epsilon: what the choice costs.
        threshold: choose no public data (name None) unless a candidate captures more than this
            share of the energy, on average over the records.
        rank: k, how many directions of each candidate count.
        samples: how many samples of each candidate. The choice holds these; train with the whole
            dataset of that name if you want more.
        mechanism: "permute-and-flip" or "exponential".
        sample_rate: look at a Poisson sample of the records only. Saves time, and for rates that
            leave some thousand records little accuracy.
        records: about how many private records there are, if that is public; used to say how close
            candidates may be, and to refuse what would be chance. With `unit`, how many units.
        unit: one id a record, or a function of a record, if a person may have several: a unit then
            counts once, by the mean score of at most `records_per_unit` of its records.
        records_per_unit: most records of one unit that count.
        seed: of the samples and random labels of the candidates; no secret.
        piece: samples run through the model at a time.
    """
    refuse_several_processes()
    epsilon, sample_rate = _checked(epsilon, sample_rate, mechanism)
    if threshold is not None:
        expect(0 <= check_number("threshold", threshold) <= 1, "0 <= threshold <= 1", threshold)
    choices: list[str | None] = [*candidates, *([] if threshold is None else [None])]
    enough = len(choices) >= 2 and bool(candidates)
    cure = "With one, pass threshold= to choose between it and no public data."
    expect(enough, "at least 2 candidates to choose from", len(choices), cure)
    what = "record" if unit is None else "unit"
    note = _note(len(choices), epsilon, mechanism, sample_rate, records, what)
    loader = private_loader(private)
    probe = Probe.of(model, loss_fn, seed=seed, piece=piece)
    event = pure_event(epsilon)
    ledger.protect(what)
    ledger.reserve(event, 1)  # before the work: a choice that cannot be paid for is not computed
    data = {
        name: drawn(each, samples, seed=probe.seed, name=name, kind=PublicData)
        for name, each in candidates.items()
    }
    subspaces = [principal_subspace(probe.gradients(each), rank, of=n) for n, each in data.items()]
    for each in data.values():
        check_independence(probe, subspaces, each)
    # Private records are not read before this line, so no refusal above tells anything of them.
    units = units_of(unit, records_per_unit, loader)
    refuse_overlap(loader, data.values(), units)
    batches = sampled_batches(loader, sample_rate, probe.piece, units)
    sums = totals(probe, subspaces, batches, threshold, units=0 if units is None else len(units))
    for each in data.values():
        detail = f"candidate of a private choice: {mechanism}, ε = {epsilon:g}, rank {rank}"
        ledger.declare_public(each.name, each.digest, each.count, detail=detail)
    ledger.charge(event)  # before anything is released
    rate = Fraction(_on_sample(epsilon, sample_rate)) * (1 - _KEPT) / UNIT
    chosen = choices[pick(mechanism, sums, rate, secrets.randbelow)]
    return Choice(
        name=chosen,
        public=None if chosen is None else data[chosen],
        epsilon=epsilon,
        mechanism=mechanism,
        candidates=tuple(data),
        threshold=threshold,
        note=note,
    )


def resolution(
    records: int,
    candidates: int,
    epsilon: float,
    *,
    mechanism: str = "permute-and-flip",
    sample_rate: float = 1.0,
) -> float:
    """By how much the best candidate must lead in mean captured energy to be found.

    Found with a probability of 95 %, whatever the data: above 1 it is out of reach. From public
    knowledge only. `candidates` counts "no public data" too.
    """
    records = check_count("records", records)
    candidates = check_count("candidates", candidates, least=2)
    epsilon, sample_rate = _checked(epsilon, sample_rate, mechanism)
    spread, success = 0.0, _SUCCESS
    if sample_rate < 1:
        # Half of the failures may come from the sample: by Bernstein's inequality, for differences
        # between −1 and 1, a lead in the sample is this much smaller at the worst.
        likely = math.log(2 * (candidates - 1) / (1 - success))
        variance = records * sample_rate * (1 - sample_rate)
        spread = likely / 3 + math.sqrt((likely / 3) ** 2 + 2 * likely * variance)
        success = (1 + success) / 2
    gap = brentq(lambda gap: probability_of_best(mechanism, candidates, gap) - success, 0.0, 700.0)
    lead = gap / (_on_sample(epsilon, sample_rate) * float(1 - _KEPT))
    return float((lead + spread) / (records * sample_rate))


def _checked(epsilon: float, sample_rate: float, mechanism: str) -> tuple[float, float]:
    epsilon = float(check_number("epsilon", epsilon))
    expect(0 < epsilon <= _LARGEST_EPSILON, f"0 < epsilon <= {_LARGEST_EPSILON:g}", epsilon)
    check_share("sample_rate", sample_rate)
    expect(mechanism in MECHANISMS, f"mechanism to be one of {sorted(MECHANISMS)}", mechanism)
    return epsilon, float(sample_rate)


def _on_sample(epsilon: float, sample_rate: float) -> float:
    """ε₀, what may be spent on a Poisson sample to spend ε on the data."""
    return epsilon if sample_rate == 1 else math.log1p(math.expm1(epsilon) / sample_rate)


def _note(
    candidates: int,
    epsilon: float,
    mechanism: str,
    sample_rate: float,
    records: int | None,
    what: str,
) -> str:
    if records is None:
        return (
            "How close candidates may be to be told apart is not said, as that depends on the "
            f"number of {what}s: give it (records=, or data.records in a configuration) if it is "
            "public."
        )
    gap = resolution(records, candidates, epsilon, mechanism=mechanism, sample_rate=sample_rate)
    setting = f"{records:,} {what}s, ε = {epsilon:g} and {candidates} candidates"
    if gap >= 1:
        raise ValueError(
            f"With {setting} no candidate could be told from the others with {_SUCCESS:.0%} "
            f"success (the lead would have to be {gap:.2g}, of at most 1): the choice would be "
            "chance, and nothing was spent. Raise epsilon, compare fewer candidates, or choose by "
            "public knowledge."
        )
    return (
        f"With {setting}, the best is found in {_SUCCESS:.0%} of cases or more if its captured "
        f"energy is {gap:.2g} above every other's; closer ones are told apart less often."
    )


def totals(
    probe: Probe,
    subspaces: Sequence[Subspace],
    batches: Iterable[tuple[Any, ...]],
    threshold: float | None,
    *,
    units: int = 0,
) -> list[int]:
    """q_j in whole numbers: exact, in any order of the records.

    Of so many `units` each counts by the mean of its records' scores, rounded down.
    """
    constants = torch.tensor([] if threshold is None else [threshold], dtype=torch.float64)
    sums = torch.zeros(max(1, units), len(subspaces) + len(constants), dtype=torch.int64)
    counts = torch.zeros(len(sums), 1, dtype=torch.int64)
    for inputs, labels, *owners in batches:
        scores = probe.scores(subspaces, inputs, labels)
        scores = torch.cat([scores, constants.expand(len(scores), -1)], dim=1)
        rows = owners[0] if owners else torch.zeros(len(scores), dtype=torch.int64)
        sums.index_add_(0, rows, (scores * UNIT).long())
        counts.index_add_(0, rows, torch.ones(len(scores), 1, dtype=torch.int64))
    if units:
        sums = sums // counts.clamp(min=1)
    result: list[int] = sums.sum(0).tolist()
    return result


def private_loader(private: Any) -> DataLoader[Any]:
    """A loader over the private records, whatever they came as."""
    if isinstance(private, tuple | list) and all(isinstance(x, Tensor) for x in private):
        private = TensorDataset(*private)
    if isinstance(private, Dataset):
        private = DataLoader(private, batch_size=PIECE)
    if isinstance(private, DataLoader | PrivateLoader):
        records_of(private)  # refuses what cannot be sampled record by record
    if not isinstance(private, DataLoader):
        raise TypeError(
            f"Cannot read private records from a {type(private).__name__}: give a DataLoader, a "
            "map-style Dataset, or tensors (inputs, labels)."
        )
    return private


def sampled_batches(
    loader: DataLoader[Any], sample_rate: float, piece: int, units: Units | None = None
) -> Iterator[tuple[Any, ...]]:
    """The records of a Poisson sample, each with its label, in batches of one shape each.

    With `units` those are drawn, and each record comes with the number of its own.
    """
    dataset: Any = loader.dataset
    count = len(dataset if units is None else units)
    draw = PoissonDraw(records=count, sample_rate=sample_rate, steps_per_epoch=1)
    (drawn,) = draw.epoch(np.random.default_rng())  # by OS entropy: who is in it is a secret
    chosen: list[tuple[int, int | None]] = [(record, None) for record in drawn.tolist()]
    if units is not None:
        secret = secrets.randbits(128)
        chosen = [(x, unit) for unit in drawn.tolist() for x in units.drawn(unit, [secret])]
    if not chosen:
        return
    with fresh_randomness():  # the seeds of workers come from here
        alone = like(
            loader,
            dataset=_Single(dataset, chosen),
            batch_size=piece,
            collate_fn=partial(_collated, loader.collate_fn),
            timeout=loader.timeout,
            worker_init_fn=FreshWorker(loader.worker_init_fn),
        )
        batches = iter(alone)
    waiting: dict[Any, Any] = {}
    while True:
        with fresh_randomness():
            read = next(batches, None)
        if read is None:
            break
        for kind, batch in read.items():
            held = [waiting.pop(kind)] if kind in waiting else []
            full = _joined([*held, batch])  # copies: handles of workers' shared memory are few
            if len(tree_leaves(full)[0]) >= piece:
                yield tree_map(lambda leaf: leaf[:piece], full)
                full = tree_map(lambda leaf: leaf[piece:], full)
            if len(tree_leaves(full)[0]):
                waiting[kind] = full
    yield from waiting.values()


class _Single(Dataset[Any]):
    """Some of the records, each with its unit (or None) and asked for alone.

    A dataset may read several at once in a way of its own.
    """

    def __init__(self, dataset: Dataset[Any], chosen: list[tuple[int, int | None]]) -> None:
        self._dataset, self._chosen = dataset, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, place: int) -> Any:
        record, owner = self._chosen[place]
        return self._dataset[record], owner


def _collated(collate: Callable[[list[Any]], Any], records: list[Any]) -> dict[Any, Any]:
    """A batch for each structure, shapes and dtypes that there are.

    Made in a worker, which had better not send each record by itself.
    """
    alike: dict[Any, list[Any]] = {}
    for record, owner in records:
        batch = hold(collate([record]))
        leaves, form = tree_flatten(batch)
        if len(batch) != 2 or len(leaves[0]) != 1:
            raise ValueError(
                "Expected private batches of (inputs, labels), or mappings with the labels under "
                "'labels', that hold tensors with one row for each record, in the first dimension: "
                "private gradients are those of training, with the records' own labels."
            )
        batch = batch if owner is None else (*batch, torch.tensor([owner]))
        kind = repr(form), *((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        alike.setdefault(kind, []).append(batch)
    return {kind: _joined(held) for kind, held in alike.items()}


def _joined(batches: list[Any]) -> Any:
    return tree_map(lambda *leaves: torch.cat(leaves), *batches)
