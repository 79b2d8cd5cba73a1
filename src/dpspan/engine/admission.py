"""How a run begins: what is given is checked, public and private are kept apart, all is wired."""

import copy
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.data import DataLoader, default_collate

from dpspan.accounting.ledger import Ledger
from dpspan.engine.plan import Given, Plan
from dpspan.engine.private_step import PrivateRun, check_optimizer
from dpspan.engine.sampling import PrivateLoader
from dpspan.gradients.capture import captures_on
from dpspan.mechanisms.base import Mechanism, Setting
from dpspan.mechanisms.clipping import AdaptiveClipping
from dpspan.model.criterion import check_criterion
from dpspan.model.isolation import same, tensors_of
from dpspan.model.validation import refuse_wrappers, validate
from dpspan.public.data import PublicData, in_memory, in_order
from dpspan.public.overlap import encodings, refuse_overlap
from dpspan.public.patches import PatchFeatures
from dpspan.support.distributed import Processes, weights_of
from dpspan.support.randomness import RandomState, fresh_seed, seeded, shuffled
from dpspan.support.sharded import Shards, check_sharding, local

_logger = logging.getLogger(__name__)

_ROUNDS = 2  # the record first, and last
_ROUNDS_IF_RANDOM = 16  # a random collate_fn may mix now and then only
_OTHERS = 3  # records in company
_IN_ORDER = 8  # records whose places in a batch are looked at
_SHOWN, _READ = 128, 8192  # records by which processes compare datasets, read at a time


class PublicUse(NamedTuple):
    """Public data, and what a run does with them."""

    data: PublicData
    purpose: str

    def __str__(self) -> str:
        return f"'{self.data.name}' ({self.purpose})"


def begin(
    plan: Plan, given: Given, *, ledger: Ledger, processes: Processes, warn: Callable[[str], None]
) -> PrivateRun:
    """The run, after its warm start; whatever its guarantee would not hold for is refused first."""
    with processes.together():
        refuse_together(given)
        check_parts(given, processes)
    same_beginning(plan, given, processes, warn)
    setting = Setting(
        model=given.module,
        criterion=given.criterion,
        steps_per_epoch=plan.sampling.steps_per_epoch,
        expected_batch_size=plan.expected_batch_size,
        max_physical_batch_size=given.max_physical_batch_size,
        warn=warn,
        processes=processes,
    )
    with processes.together():
        mechanism = plan.method.bind(setting)
        loader = _loader(plan, given, processes)
        public = admit_public(given, mechanism, warn)
    loader.spread_over(processes)
    processes.agree({"debug_seed": given.seed, "public data": [use.data.digest for use in public]})
    processes.make_same(weights_of(given.module).values())  # after the warm start
    plan = dataclasses.replace(plan, public=tuple(map(str, public)))
    _put_on_record(ledger, plan, public)
    return PrivateRun(plan, given, setting, mechanism, loader=loader, ledger=ledger)


def _loader(plan: Plan, given: Given, processes: Processes) -> PrivateLoader:
    size = given.max_physical_batch_size
    if given.cuda_graphs and size is None:
        size = plan.most_at_once(processes.world)
    return PrivateLoader(
        given.data_loader,
        plan.sampling,
        size,
        seed=given.seed,
        padded=given.cuda_graphs,
        units=given.units,
        secure=plan.secure_mode,
    )


def _put_on_record(ledger: Ledger, plan: Plan, public: list[PublicUse]) -> None:
    ledger.protect(plan.unit)
    for data, purpose in public:
        ledger.declare_public(data.name, data.digest, data.count, detail=purpose)
    ledger.warn(*plan.warnings)
    if plan.noise_multiplier == 0:
        ledger.invalidate("noise_multiplier is 0")
    _logger.info("dpspan: %s", plan.describe())


def check_parts(given: Given, processes: Processes) -> None:
    """Refuse a model, an optimizer or a loss for which the guarantee would not hold."""
    module = given.module
    refuse_wrappers(module)
    check_sharding(module, processes)
    check_criterion(given.criterion, given.loss_reduction, module)
    validate(module)
    check_device(module)
    check_precision(module)
    check_optimizer(given.optimizer, module)
    hooks = given.optimizer._optimizer_step_pre_hooks.values()
    taken = any(isinstance(getattr(hook, "__self__", None), PrivateRun) for hook in hooks)
    if captures_on(module) or taken:
        raise ValueError(
            "The model or the optimizer belongs to another private run: call detach() on its "
            "engine first, or build new ones."
        )


def refuse_together(given: Given) -> None:
    """Refuse what does not go together, and what a sharded model cannot have."""
    if given.units is not None and given.cuda_graphs:
        raise ValueError(
            "unit= and cuda_graphs=True do not go together: a graph is of batches of one size, and "
            "units have different numbers of records. Leave one of them out."
        )
    refused = {
        "cuda_graphs=True cannot record a sharded model, which is gathered anew in every step: "
        "leave it out.": given.cuda_graphs,
        "warm_start= trains a whole model: run the warm start before fully_shard "
        "(warm_start.run(model, criterion)), or leave it out.": given.warm_start is not None,
        "diagnose= measures whole gradients, and of a sharded model each process has a part: "
        "leave it out.": getattr(given.method, "diagnose", 0),
        "AdaptiveClipping was not tried on a sharded model: take FlatClipping() or "
        "AutomaticClipping().": isinstance(
            getattr(given.method, "clipping", None), AdaptiveClipping
        ),
        "unit= of a sharded model is not supported: processes look at the model by the first one's "
        "records, and with units that may be none. Leave out unit=, or fully_shard.": (
            given.units is not None
        ),
    }
    for why, asked_for in refused.items():
        if asked_for and Shards(given.module):
            raise ValueError(why)


def same_beginning(
    plan: Plan, given: Given, processes: Processes, warn: Callable[[str], None]
) -> None:
    """One plan, the same records and the first process's weights in all; or an error in all."""
    if processes.world == 1:
        return
    module, loader, units = given.module, given.data_loader, given.units
    every = [*module.named_parameters(), *module.named_buffers()]
    kinds = [(n, *x.shape, str(x.dtype), x.requires_grad) for n, x in every]
    owners = None if units is None else hashlib.blake2b(units.owners.tobytes()).hexdigest()
    processes.agree({"plan": plan.describe(), "model": kinds, "units": owners})
    # If position i meant other records, one of them could take part twice in one batch.
    count = len(loader.dataset)  # type: ignore[arg-type]
    shown = processes.same((count, shuffled(count)[:_SHOWN].tolist(), fresh_seed()))
    with processes.together():
        digests = {_digest(loader, *shown) for _ in range(2)}
    first = processes.same(digests)
    if None in first or len(first) > 1:  # random in a way that no seed controls
        warn("it could not be checked that all processes have the same records in the same order")
    with processes.together():
        if len(first) == 1 and digests != first:
            raise ValueError(
                f"Process {processes.rank} has other records than the first, or in another "
                "order: a record could take part twice in a batch. Read the same files in the same "
                "order everywhere (sorted names; random_split with a seeded generator)."
            )
    processes.make_same(weights_of(module).values())


def _digest(
    loader: DataLoader[Any], count: int, positions: Sequence[int], seed: int
) -> bytes | None:
    """Of some records as the loop gets them, of all in memory; None where nothing can be seen."""
    dataset: Any = loader.dataset
    if len(dataset) != count:
        return b"another number of records"
    found, seen = hashlib.blake2b(), False
    with seeded(seed):
        if in_memory(dataset, loader.collate_fn):
            pieces: Iterable[Any] = in_order(dataset, _READ, loader.collate_fn)
        else:
            records = [dataset[i] for i in positions]
            pieces = [[(len(records), loader.collate_fn(records))]]
        for _, batch in chain.from_iterable(pieces):
            for path, x in _tensors(batch).items():
                found.update(path.encode())
                found.update(x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
                seen = True
    return found.digest() if seen else None


def check_device(module: nn.Module) -> None:
    """Refuse a device without float64 (Apple's MPS): norms and noise are computed in it."""
    for name, parameter in module.named_parameters():
        try:
            local(parameter).new_zeros(1, dtype=torch.float64)
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"Parameter '{name}' is on {parameter.device}, which has no float64. "
                "Norms and noise need it: move the model to the CPU or to a CUDA device."
            ) from error


def check_precision(module: nn.Module) -> None:
    """Refuse float64 beside lower precision: norms would be bounded for that of one of the two."""
    trained = [(name, p.dtype) for name, p in module.named_parameters() if p.requires_grad]
    double = next((name for name, kind in trained if kind == torch.float64), None)
    other, kind = next((x for x in trained if x[1] != torch.float64), (None, None))
    if double is not None and other is not None:
        raise ValueError(
            f"Parameter '{double}' is in torch.float64 and '{other}' in {kind}, so rounding cannot "
            "be bounded for both. Bring what is trained to one precision (model.float())."
        )


def admit_public(
    given: Given, mechanism: Mechanism, warn: Callable[[str], None]
) -> list[PublicUse]:
    """Everything public behind a run: a warm start, the method's data, what layers were made of.

    Refuses copies of private records, and a collate_fn that mixes them; then it trains.
    """
    private, warm_start, units = given.data_loader, given.warm_start, given.units
    by_method = f"{type(given.method).__name__}: public gradients"
    layers = [part for part in given.module.modules() if isinstance(part, PatchFeatures)]
    uses = [
        *(PublicUse(data, by_method) for data in mechanism.public),
        *(PublicUse(layer.public, type(layer).__name__) for layer in layers),
    ]
    start = [] if warm_start is None else [PublicData.of(warm_start.data)]
    refuse_overlap(private, [*(use.data for use in uses), *start], units)
    check_collation(private, warn, ordered=units is not None)
    # These were compared with the private records when they were encoded.
    uses += [PublicUse(each.public, each.layer) for each in encodings(private.dataset)]
    if warm_start is not None:  # last: whatever can be refused has been
        [data] = start
        result = dataclasses.replace(warm_start, data=data).run(given.module, given.criterion)
        uses.insert(0, PublicUse(data, warm_start.summary(result)))
    return uses


def check_collation(loader: DataLoader[Any], warn: Callable[[str], None], *, ordered: bool) -> None:
    """Raise ValueError if what a record becomes depends on the records that it is collated with.

    A few are collated in one company and in another. Padding to the longest record does not mix
    records, nor does another order, which is an error only where the rows must be `ordered`.
    """
    dataset: Any = loader.dataset
    if loader.collate_fn is default_collate or len(dataset) < 3:
        return

    def found(look: Callable[..., bool | None], what: str) -> bool | None:
        try:
            told = look(loader.collate_fn, dataset)
        except Exception:  # whatever it says may show private data
            told = None
        if told is None:
            warn(f"the collate_fn of the data loader could not be checked to keep {what}")
        return told

    if found(_mixes, "records apart"):
        raise ValueError(
            "The collate_fn of the data loader mixes records: what becomes of a record depends on "
            "the others in its batch (MixUp and CutMix do this), so its influence cannot be "
            "bounded. Give a collate_fn that treats records one by one."
        )
    order = "the order of records; if it does not, records count for other units than their own"
    if ordered and found(_keeps_order, order) is False:
        raise ValueError(
            "The collate_fn of the data loader puts records into another order, so a record would "
            "count for another unit than its own. Let it keep the order, or leave unit= out."
        )


def _keeps_order(collate: Callable[[list[Any]], Any], dataset: Any) -> bool | None:
    """Whether row i is made of record i: as it is when that one is collated alone."""
    with seeded(fresh_seed()):
        records = [dataset[int(i)] for i in shuffled(len(dataset))[:_IN_ORDER]]
        batch = _tensors(collate(copy.deepcopy(records)))
        alone = [_tensors(collate([copy.deepcopy(record)])) for record in records]
    found = set()
    for path, x in batch.items():
        if len(x) != len(records) or any(len(own.get(path, ())) != 1 for own in alone):
            continue
        rows = [own[path] for own in alone]
        in_place = [_in_both(x[i : i + 1], row) for i, row in enumerate(rows)]
        elsewhere = [_in_both(x, row) for row in rows]
        alike = all(_in_both(rows[0], row) is not False for row in rows)
        if not alike:  # else any order is right
            found.add(True if all(in_place) else False if all(elsewhere) else None)
    return False if False in found else True if True in found else None


def _mixes(collate: Callable[[list[Any]], Any], dataset: Any) -> bool | None:
    """None if nothing could be compared."""
    others = min(_OTHERS, (len(dataset) - 1) // 2)
    with seeded(fresh_seed()):
        record, *rest = (dataset[int(i)] for i in shuffled(len(dataset))[: 1 + 2 * others])
    company, another = rest[:others], rest[others:]
    # Records that are alike would hide what is made of them: numbers are changed besides.
    companies = [another, tree_map(_altered, another)]
    random, number, known = True, 0, False
    while number < (_ROUNDS_IF_RANDOM if random else _ROUNDS):
        # What is drawn for the first record does not depend on those that follow.
        place = 0 if random or number == 0 else others
        seed = fresh_seed()
        batch, random = _collated(collate, record, company, place, seed)
        again, _ = _collated(collate, record, company, place, seed)
        if any(not same(batch[path], again.get(path)) for path in batch):
            return None  # it draws random numbers that a seed does not control
        for other in companies:
            try:
                elsewhere, _ = _collated(collate, record, other, place, seed)
            except Exception:  # changed numbers may be none that it takes
                continue
            found = [_in_both(x, elsewhere[path]) for path, x in batch.items() if path in elsewhere]
            if False in found:
                return True
            known |= True in found
        number += 1
    return False if known else None


def _collated(
    collate: Callable[[list[Any]], Any], record: Any, company: Sequence[Any], place: int, seed: int
) -> tuple[dict[str, Tensor], bool]:
    """The tensors with records in front, and whether random numbers were drawn."""
    records = copy.deepcopy([*company[:place], record, *company[place:]])
    with seeded(seed):
        before = RandomState.now()
        batch = collate(records)
        drew = before != RandomState.now()
    tensors = _tensors(batch)
    return {path: x for path, x in tensors.items() if len(x) == len(records)}, drew


def _tensors(batch: Any) -> dict[str, Tensor]:
    """Those of a batch in any form that loops know."""
    if isinstance(batch, Mapping):
        batch = dict(batch)
    elif not isinstance(batch, Tensor | tuple | list) and hasattr(batch, "__dict__"):
        batch = vars(batch)
    return tensors_of(tree_map_only(np.ndarray, torch.as_tensor, batch))


def _in_both(batch: Tensor, other: Tensor) -> bool | None:
    """Whether some row of one is a row of the other, as the record must be.

    None where rows have other shapes and no common beginning or end: nothing can be said.
    """
    if batch.dim() != other.dim():
        return None
    sizes = [min(pair) for pair in zip(batch.shape[1:], other.shape[1:], strict=True)]
    crops = [tuple(slice(0, size) for size in sizes), tuple(slice(-size, None) for size in sizes)]
    found = any(same(x[crop], y[crop]) for x in batch for y in other for crop in crops)
    return found or (False if batch.shape == other.shape else None)


def _altered(leaf: Any) -> Any:
    is_array = isinstance(leaf, Tensor | np.ndarray)
    if isinstance(leaf, float) or (is_array and torch.as_tensor(leaf).is_floating_point()):
        return 0.3 - 1.7 * leaf
    return leaf
