"""A model that fully_shard has spread over two processes is trained as one process would."""

from __future__ import annotations

import ctypes
import io
import os
import re
import resource
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from scipy import stats
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dpspan import (
    DPSGD,
    GEP,
    PDPSGD,
    RGP,
    BiasedGEP,
    ConstantMixing,
    MirrorDescent,
    PrivacyEngine,
    RandomSubspace,
    WarmStart,
    per_sample_gradients,
)
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.base import Method
from dpspan.mechanisms.dpsgd import DPSGDMechanism
from dpspan.support.sharded import Shards, whole
from helpers.distributed import Failed, Killed, in_processes
from helpers.training import data, network, setup, train

PUBLIC = data(12).tensors[0].double().flip(0) + 0.5, torch.arange(12) % 2
METHODS: dict[str, Method] = {
    "DPSGD": DPSGD(clip=1.0),
    "RGP": RGP(rank=1, clip=1.0),
    "GEP": GEP(public=PUBLIC, rank=4, clip=1.0),
    "GEP in groups": GEP(public=PUBLIC, rank=4, clip=1.0, groups=2, refresh=3),
}

OTHERS: dict[str, Method] = {
    "PDPSGD": PDPSGD(public=PUBLIC, rank=4, clip=1.0),
    "random": PDPSGD(subspace=RandomSubspace(rank=20), clip=1.0),
    "BiasedGEP": BiasedGEP(public=PUBLIC, rank=4, clip=1.0),
    "RGP left only": RGP(rank=2, clip=1.0, left_only=True, carriers="weights"),
    "MirrorDescent": MirrorDescent(public=PUBLIC, mixing=ConstantMixing(share=0.5), clip=1.0),
}


class Block(nn.Module):
    """Attention and two linear layers, as a transformer has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(self.before(x)).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
        x = x + self.out(weights @ v)
        return x + self.down(torch.tanh(self.up(self.between(x))))


class Transformer(nn.Module):
    """Six tokens of one number each; odd sizes, so that shards are uneven."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 3)  # of which one process has two lines, another one
        self.gate = nn.Linear(3, 1)  # and of which it has nothing

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unsqueeze(-1))
        for block in self.blocks:
            x = block(x)
        x = self.head(x.mean(1))
        return x[:, :2] * torch.sigmoid(self.gate(x))


def sharded(model: nn.Module, how: str) -> nn.Module:
    if how in ("blocks", "without root"):
        for block in model.blocks:
            fully_shard(block)
    if how == "leaves":
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                fully_shard(module)
    return model if how == "without root" else fully_shard(model)


def whole_weights(model: nn.Module) -> Tensor:
    Shards(model).reshard()
    return torch.cat([whole(p.detach()).flatten() for p in model.parameters()])


def without_noise(rank: int, method: Method, how: str | None, changes: dict[str, Any]) -> Any:
    """Weights after an epoch, and how many records each piece of this process had."""
    changes = dict(changes)
    x, y = data().tensors
    loader = DataLoader(TensorDataset(x.double(), y), batch_size=changes.pop("batch_size", 10))
    torch.manual_seed(0)
    module = changes.pop("module", Transformer)().double()
    if how is not None:
        module = sharded(module, how)
    optimizer = changes.pop("optimizer", lambda p: torch.optim.SGD(p, lr=0.5))(module.parameters())
    engine, model, optimizer, loader = setup(
        module=module,
        optimizer=optimizer,
        data_loader=loader,
        method=method,
        noise_multiplier=0.0,
        non_private=True,
        criterion=nn.CrossEntropyLoss(),
        **changes,
    )
    told, sizes = loader.on_piece, []
    loader.on_piece = lambda piece: (sizes.append(piece.samples), told(piece))
    train(model, optimizer, loader)
    if "average_weights" in changes:
        engine.adopt_average()
    return whole_weights(model), sizes


def results(world: int, function: Any, *args: Any) -> list[Any]:
    """Of processes that all must end well."""
    found = in_processes(world, function, *args)
    for each in found:
        assert not isinstance(each, Failed), each.trace
        assert not isinstance(each, Killed), each
    return found


def same_as_one_process(method: Method, how: str, changes: dict[str, Any], world: int = 2) -> Any:
    expected, sizes = without_noise(0, method, None, changes)
    found = results(world, without_noise, method, how, changes)
    assert sum(sum(own) for _, own in found) == sum(sizes)
    for own, _ in found:
        assert torch.allclose(own, expected, rtol=0, atol=1e-12), (own - expected).abs().max()
    return found


@pytest.mark.parametrize("name", METHODS)
def test_a_step_without_noise_is_that_of_one_process(name: str) -> None:
    same_as_one_process(METHODS[name], "blocks", {"max_physical_batch_size": 3})


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Own(nn.Module):
    """A parameter without a rule: torch.func takes this one as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.scale * x))


class WithOwn(nn.Module):
    """Blocks of which torch.func takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 5)
        self.blocks = nn.ModuleList([Own(), Own()])
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recomputed(WithOwn):
    """Blocks that run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Encoder(nn.Module):
    """torch's own layers: attention uses a layer's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 4)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unsqueeze(-1))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # Of gradients that are zero but for rounding a smaller eps would make steps.
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-3, foreach=True)


@pytest.mark.parametrize(
    ("how", "changes"),
    [
        ("root", {"optimizer": adamw}),
        ("leaves", {}),
        ("blocks", {"low_pass": 0.8, "average_weights": 0.6}),
        ("root", {"module": Tied, "batch_size": 3}),
        ("blocks", {"module": WithOwn}),
        ("blocks", {"module": Recomputed}),
        ("blocks", {"module": Encoder}),
        ("without root", {"max_physical_batch_size": 4}),
    ],
    ids=[
        "root, AdamW",
        "leaves",
        "smoothed",
        "tied, few records",
        "torch.func",
        "recomputed",
        "encoder",
        "no root",
    ],
)
def test_ways_to_shard(how: str, changes: dict[str, Any]) -> None:
    found = same_as_one_process(DPSGD(clip=1.0), how, changes)
    # Pieces in which a process had no record.
    assert "batch_size" not in changes or any(0 in own for _, own in found)


def settings(rank: int, what: str | None) -> Tensor:
    torch.manual_seed(0)
    model, again = Recomputed().double(), {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(what != "frozen" or ("blocks.0" not in name and "bias" in name))
    if what == "ignored":
        again = {"ignored_params": {model.head.weight}}
    elif what is not None and what != "frozen":
        again = {"reshard_after_forward": {"kept": False, "freed": True, "by two": 2}[what]}
    if dist.is_initialized():
        for block in model.blocks:
            fully_shard(block, **again)
        fully_shard(model, **again)
    x, y = data().tensors
    train(
        *setup(
            module=model,
            data_loader=DataLoader(TensorDataset(x.double(), y), batch_size=10),
            noise_multiplier=0.0,
            non_private=True,
        )[1:]
    )
    return whole_weights(model)


@pytest.mark.parametrize(
    ("what", "world"), [("kept", 2), ("freed", 2), ("by two", 4), ("frozen", 2), ("ignored", 2)]
)
def test_options_of_fully_shard(what: str, world: int) -> None:
    expected = settings(0, "frozen" if what == "frozen" else None)
    for own in results(world, settings, what):
        assert torch.allclose(own, expected, rtol=0, atol=1e-12), (own - expected).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_no_record_counts_more_than_the_clip(dtype: torch.dtype | None) -> None:
    """Of records that are huge, tiny or not finite, each alone in its batch."""
    x = torch.cat([10.0 ** torch.arange(-6.0, 6.0, 1.0).repeat_interleave(6), torch.ones(12)])
    x = x.view(-1, 6) * torch.randn(14, 6, generator=torch.Generator().manual_seed(1))
    x[-1, 0], x[-2, 3] = torch.nan, torch.inf

    def run(rank: int) -> list[tuple[int, float]]:
        model = network()
        for part in (model[0], model[2], model):
            fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        _, model, optimizer, loader = setup(
            module=model,
            data_loader=DataLoader(TensorDataset(x, torch.arange(14) % 2), batch_size=1),
            method=DPSGD(clip=0.5),
            noise_multiplier=0.0,
            non_private=True,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        )
        told, records, found = loader.on_piece, [], []
        loader.on_piece = lambda piece: (records.append(piece.samples), told(piece))
        for _ in range(3):
            for inputs, labels in loader:
                nn.functional.cross_entropy(model(inputs).float(), labels).backward()
                optimizer.step()
                gradient = torch.cat([whole(p.grad).flatten() for p in model.parameters()])
                found.append(float(gradient.double().norm()))
        return list(zip(records, found, strict=True))

    first, second = results(2, run)
    steps = [(mine + other, norm) for (mine, norm), (other, _) in zip(first, second, strict=True)]
    assert all(norm <= 0.5 * count for count, norm in steps)
    assert sum(count == 1 and norm > 0.49 for count, norm in steps) >= 4


def test_half_precision() -> None:
    """Layers that run in bfloat16: as far from float32 as its eight bits take it."""

    def run(rank: int | None) -> Tensor:
        model = network()
        if rank is not None:
            fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        options: Any = {"noise_multiplier": 0.0, "non_private": True}
        train(*setup(module=model, criterion=nn.CrossEntropyLoss(), **options)[1:])
        return whole_weights(model)

    expected = run(None)
    moved = (expected - whole_weights(network())).norm()
    for own in results(2, run):
        assert 0 < (own - expected).norm() < 0.05 * moved


@pytest.mark.parametrize("world", [1, 3])
def test_other_numbers_of_processes(world: int) -> None:
    same_as_one_process(METHODS["GEP"], "blocks", {"module": Recomputed}, world)


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods(name: str) -> None:
    same_as_one_process(OTHERS[name], "blocks", {"module": Recomputed})


# -- noise ----------------------------------------------------------------------------------------

WIDE = torch.randn(6, 300, generator=torch.Generator().manual_seed(5)).double(), torch.arange(6)


def with_noise(rank: int, method: Method, seed: int | None) -> Any:
    """The released sum of a step without a gradient, whole; and this process's shard of it."""
    wide = nn.Linear(300, 41).double()
    with torch.no_grad():
        wide.weight.zero_()
        wide.bias.zero_()
    records = TensorDataset(torch.zeros(40, 300).double(), torch.zeros(40).long())
    _, model, optimizer, loader = setup(
        PrivacyEngine(accountant="rdp", debug_seed=seed),
        module=sharded(wide, "root"),
        data_loader=DataLoader(records, batch_size=10),
        method=method,
        noise_multiplier=2.0,
        criterion=nn.CrossEntropyLoss(),
    )
    for x, _ in loader:
        (model(x).sum() * 0.0).backward()
        optimizer.step()
        break
    gradients = [model.weight.grad, model.bias.grad]
    return (
        torch.cat([whole(x).flatten() for x in gradients]) * 10,
        torch.cat([x.to_local().flatten() for x in gradients]) * 10,
    )


def is_noise(x: Tensor, std: float) -> bool:
    """A chi-square test of the variance."""
    return 1e-6 < stats.chi2(x.numel()).cdf(float((x / std).square().sum())) < 1 - 1e-6


@pytest.mark.filterwarnings("ignore:dpspan")  # that this loss could not be checked
@pytest.mark.parametrize("seed", [None, 0])
def test_noise_of_shards(seed: int | None) -> None:
    (all_of_it, first), (same, second) = results(2, with_noise, DPSGD(clip=1.5), seed)
    assert torch.equal(all_of_it, same)
    for own in (first, second):
        assert is_noise(own, 3.0)  # z·C, whatever the number of processes
    # 21 and 20 lines: the correlation of what both have.
    n = second.numel()
    correlation = float(torch.corrcoef(torch.stack([first[:n], second]))[0, 1])
    assert abs(correlation) < 5 / n**0.5
    (again, _), _ = results(2, with_noise, DPSGD(clip=1.5), seed)
    assert torch.equal(again, all_of_it) == (seed is not None)


@pytest.mark.filterwarnings("ignore:dpspan")
def test_noise_of_embedding_and_residual() -> None:
    """The embedding's is the same in all processes: what it becomes lies in the subspace."""
    wide = nn.Linear(300, 41).double()
    with torch.no_grad():
        wide.weight.zero_()
        wide.bias.zero_()
    loss = nn.CrossEntropyLoss(reduction="none")
    gradients = per_sample_gradients(wide, lambda model, x, y: loss(model(x), y), *WIDE)
    basis, _ = torch.linalg.qr(gradients.matrix().T)
    options: Any = {"public": WIDE, "rank": 6, "public_labels": "real", "clip": 1.5}
    (biased, _), _ = results(2, with_noise, BiasedGEP(**options), None)
    assert torch.allclose(basis @ (basis.T @ biased), biased, atol=1e-9)
    assert is_noise(basis.T @ biased, 2.0 * 1.5)
    (both, _), _ = results(2, with_noise, GEP(**options, residual_clip=0.5), None)
    inside = basis.T @ both
    z = 2**0.5 * 2.0
    assert is_noise(both - basis @ inside, z * 0.5 * (1 - 6 / both.numel()) ** 0.5)
    assert is_noise(inside, z * (1.5**2 + 0.5**2) ** 0.5)


# -- saving ---------------------------------------------------------------------------------------


def trained(
    rank: int, folder: str, how: str | None, epochs: int, method: Method, noise: float
) -> Any:
    """Train from the last checkpoint on; the books, the weights, and their digest."""
    torch.manual_seed(3)
    module = Recomputed().double()
    module = module if how is None else sharded(module, how)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, eps=1e-3)
    x, y = data().tensors
    engine = PrivacyEngine(accountant="rdp", debug_seed=None if noise else 0)
    _, model, optimizer, loader = setup(
        engine,
        module=module,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x.double(), y), batch_size=10),
        method=method,
        noise_multiplier=noise,
        non_private=not noise,
        criterion=nn.CrossEntropyLoss(),
    )
    path, told = Path(folder, "checkpoint"), {}
    if path.exists():
        told = engine.load_checkpoint(path, module=model, optimizer=optimizer)
    resumed = engine.ledger.steps
    start = whole_weights(model)
    while loader.epoch < epochs:
        train(model, optimizer, loader)
        if how is not None:
            engine.save_checkpoint(
                path, module=model, optimizer=optimizer, checkpoint_dict={"epoch": loader.epoch}
            )
    sha256 = engine.certificate(delta=1e-5)["training"]["weights_sha256"]
    return resumed, engine.ledger.steps, start, whole_weights(model), sha256, told


def test_saved_and_resumed(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = results(2, trained, folder, "blocks", 1, RGP(rank=1), 1.0)
    assert [each[:2] for each in first] == [(0, 4)] * 2
    names = sorted(path.name for path in Path(folder, "checkpoint").iterdir())
    assert len(names) == 2  # the books, and the shards of the last checkpoint
    assert names[0] == "books.safetensors"
    second = results(3, trained, folder, "root", 2, RGP(rank=1), 1.0)  # another number of processes
    assert [each[:2] for each in second] == [(4, 8)] * 3
    for each in second:
        assert torch.equal(each[2], first[0][3])
        assert each[5] == {"epoch": 1}
    assert len({each[4] for each in second}) == 1
    alone = trained(0, folder, None, 2, RGP(rank=1), 1.0)  # one model, not sharded
    assert alone[:2] == (8, 8)
    assert torch.equal(alone[3], second[0][3])
    assert alone[4] == second[0][4]  # the digest is that of the whole weights


@pytest.mark.parametrize("name", ["RGP", "GEP"])
def test_resumed_is_as_if_never_stopped(name: str, tmp_path: Path) -> None:
    """Without noise, and with all records in every step."""

    def run(rank: int, epochs: list[int], folder: str) -> Tensor:
        for until in epochs:
            torch.manual_seed(3)
            module = sharded(Recomputed().double(), "blocks")
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, eps=1e-3)
            x, y = data().tensors
            engine, model, optimizer, loader = setup(
                module=module,
                optimizer=optimizer,
                data_loader=DataLoader(TensorDataset(x.double(), y), batch_size=40),
                method=METHODS[name],
                noise_multiplier=0.0,
                non_private=True,
                criterion=nn.CrossEntropyLoss(),
                low_pass=0.8,
                average_weights=0.6,
            )
            if Path(folder).exists():
                engine.load_checkpoint(folder, module=model, optimizer=optimizer)
            while loader.epoch < until:
                train(model, optimizer, loader)
            engine.save_checkpoint(folder, module=model, optimizer=optimizer)
            engine.adopt_average()
            engine.detach()
        return whole_weights(module)

    (expected, _), (found, _) = (
        results(2, run, epochs, str(tmp_path / str(len(epochs)))) for epochs in ([4], [2, 4])
    )
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    results(2, trained, str(tmp_path), "blocks", 1, RGP(rank=1), 1.0)
    for each in in_processes(2, trained, str(tmp_path), "blocks", 2, DPSGD(), 1.0):
        assert "The state does not fit this run" in each.text
    books = tmp_path / "checkpoint" / "books.safetensors"
    shards = sorted(tmp_path.glob("checkpoint/shards-*/*"))
    assert len(shards) == 2
    for file in (books, *shards):  # a part of each, or nothing
        content = file.read_bytes()
        for rest in (content[:-50], b"", None):
            file.unlink() if rest is None else file.write_bytes(rest)
            for each in in_processes(2, trained, str(tmp_path), "blocks", 2, RGP(rank=1), 1.0):
                known = "There is no checkpoint" if file is books and rest is None else None
                assert (known or "is not a complete dpspan checkpoint") in each.text, each.trace
        file.write_bytes(content)

    def into_a_file(rank: int) -> None:
        engine, model, *_ = setup(module=sharded(network(), "root"))
        engine.save_checkpoint(io.BytesIO(), module=model)

    for each in in_processes(2, into_a_file):
        assert "A sharded model is saved into a folder" in each.text

    def of_a_whole_model(rank: int, path: str) -> None:
        engine, model, *_ = setup(module=sharded(network(), "root"))
        engine.load_checkpoint(path, module=model)

    engine, model, *_ = setup()
    path = str(engine.save_checkpoint(tmp_path / "whole", module=model))
    for each in in_processes(2, of_a_whole_model, path):
        assert "load it before fully_shard" in each.text


class DiesWhileItSaves:
    """Process 1 is killed when it has begun to write its second checkpoint."""

    def __init__(self, rank: int) -> None:
        self.rank, self.saved = rank, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.saved += 1
        if (self.rank, self.saved) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        return save_shards(*args, **options)


save_shards = torch.distributed.checkpoint.save


def test_killed_while_saving(tmp_path: Path) -> None:
    def run(rank: int, folder: str) -> Any:
        torch.distributed.checkpoint.save = DiesWhileItSaves(rank)
        return trained(rank, folder, "blocks", 2, DPSGD(), 1.0)

    first, second = in_processes(2, run, str(tmp_path))
    assert isinstance(first, Failed)
    assert isinstance(second, Killed)
    # The checkpoint before is whole, its ledger with it, and the next one clears up.
    for each in results(2, trained, str(tmp_path), "blocks", 2, DPSGD(), 1.0):
        assert each[:2] == (4, 8)
        assert each[5] == {"epoch": 1}
    assert len(list(tmp_path.glob("checkpoint/*"))) == 2


# -- what is refused, and what goes wrong ---------------------------------------------------------


def on_a_mesh(rank: int, what: str) -> None:
    model, options = network(), {}
    if what == "HSDP":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "shards"))
        fully_shard(model, mesh=mesh)
    elif what == "by column":
        fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    elif what == "tensor parallel":
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif what == "one process":
        mesh = DeviceMesh("cpu", torch.arange(2))
        fully_shard(model, mesh=mesh)
        options["engine"] = PrivacyEngine(processes=dist.new_subgroups(1)[0])
    elif what == "graphs":
        fully_shard(model)
        options["cuda_graphs"] = True
    elif what == "warm start":
        fully_shard(model)
        options["warm_start"] = WarmStart(data=(PUBLIC[0].float(), PUBLIC[1]))
    elif what == "diagnose":
        fully_shard(model)
        options["method"] = GEP(public=PUBLIC, rank=2, diagnose=1)
    elif what == "units":
        fully_shard(model)
        options["unit"] = torch.arange(40) // 2
    elif what == "around blocks":
        model = Own().float()
        fully_shard(model.linear)
        fully_shard(model)
    elif what == "beside":
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        fully_shard(model, ignored_params=set(model[0].parameters()))
    elif what == "less exact":
        policy = MixedPrecisionPolicy(param_dtype=torch.float32)
        fully_shard(model.double(), mp_policy=policy)
    elif what == "elsewhere":
        fully_shard(model.to("meta"), mesh=init_device_mesh("cpu", (2,)))
    elif what == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif what == "tied":
        model = Tied()
        fully_shard(model.first)
        _, model, optimizer, loader = setup(module=fully_shard(model))
        train(model, optimizer, loader)
    elif what == "buffers":
        model.register_buffer("some", torch.zeros(3 + rank))
        fully_shard(model)
    elif what == "sums":
        _, model, optimizer, loader = setup(module=fully_shard(model), method=SumsItself())
        train(model, optimizer, loader)
    elif what == "optimizer":
        options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        fully_shard(model)
    elif what == "late":
        _, model, optimizer, loader = setup()
        fully_shard(model)
        train(model, optimizer, loader)
    elif what == "detached":
        engine, model, *_ = setup(module=fully_shard(model))
        engine.detach()
        engine.certificate(delta=1e-5)
    setup(module=model, **options)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("HSDP", "'0.weight' is sharded over a mesh of several dimensions"),
        ("by column", "'0.weight' is placed as .*, not by its first dimension"),
        ("tensor parallel", "'0.weight' is a DTensor that fully_shard did not make"),
        ("one process", r"is sharded over the processes \[0, 1\], not \[[01]\]"),
        ("graphs", "cuda_graphs=True cannot record a sharded model"),
        ("warm start", "run the warm start before fully_shard"),
        ("diagnose", "diagnose= measures whole gradients"),
        ("units", "unit= of a sharded model is not supported"),
        ("around blocks", "fully_shard was called on 'linear' inside of it"),
        ("beside", "'0.weight' is a DTensor that fully_shard did not make"),
        ("less exact", "'0.weight' is kept in float64 and runs in torch.float32"),
        ("elsewhere", "'0.weight' is on meta, not where it runs"),
        ("FSDP1", "wrapped in FullyShardedDataParallel"),
        ("tied", "'first.weight' is shared with a parameter already managed by another FSDP group"),
        ("buffers", "Process 1 has another model than the first"),
        ("sums", "The gradient of '0.weight' is not this process's shard of it"),
        ("optimizer", "holds a parameter that is not part of the model"),
        ("late", "fully_shard was called on the model after make_private"),
        ("detached", r"ask for it before detach\(\)"),
    ],
)
def test_refused(what: str, said: str) -> None:
    for each in in_processes(2, on_a_mesh, what):
        assert isinstance(each, Failed), each
        assert re.search(said, each.text), each.trace


class SumsItself(DPSGD):
    """Does not leave the sums to `combine`."""

    def bind(self, setting: Any) -> Any:
        class Mechanism(DPSGDMechanism):
            def clipped_sum(self, gradients: Any) -> Any:
                weights = torch.ones(gradients.samples)
                return dict(gradients.sums(weights))

        return Mechanism(self.clip_norm, self.clipping)


class FailsInOne(DPSGD):
    """Process 1 fails in the first step, before its sums travel."""

    def bind(self, setting: Any) -> Any:
        class Mechanism(DPSGDMechanism):
            def clipped_sum(self, gradients: Any) -> Any:
                if dist.get_rank() == 1:
                    raise ValueError("no sum")
                return super().clipped_sum(gradients)

        return Mechanism(self.clip_norm, self.clipping)


def test_what_fails_in_one_fails_in_all() -> None:
    def run(rank: int) -> None:
        train(*setup(module=sharded(network(), "root"), method=FailsInOne())[1:])

    first, second = in_processes(2, run)
    assert (second.kind, second.text) == ("ValueError", "no sum")
    assert first.text.startswith("Process 1 of 2 stopped, so all do, and nothing was released")


def test_who_fails_between_two_sums_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for its next sum, and must not take anything else for it."""
    monkeypatch.setattr("dpspan.support.sharded._AT_ONCE", 1)
    sums = PerSampleGradients.sums

    def failing(self: Any, *args: Any, **options: Any) -> Any:
        for number, found in enumerate(sums(self, *args, **options)):
            if number == 2 and dist.get_rank() == 1 and self.placement == self.of_sums:
                raise RuntimeError("no memory")
            yield found

    def run(rank: int) -> Any:
        engine, model, optimizer, loader = setup(module=sharded(network(), "root"))
        PerSampleGradients.of_sums = engine._run._capture.shards.of_sums
        PerSampleGradients.sums = failing
        said = []
        for _ in range(2 if rank == 1 else 1):  # who goes on after an error gets another one
            try:
                x, y = next(iter(loader))
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            except RuntimeError as error:
                said.append(str(error))
        raise RuntimeError(f"{engine.ledger.steps} steps, {' | '.join(said)}")

    first, second = in_processes(2, run)
    assert first.text.startswith("0 steps, Another process of this run is gone")
    assert second.text.startswith("0 steps, no memory | Another process of this run is gone")


class Mixes(nn.Module):
    """What a sample gets depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - x.mean(0))


def test_the_guard_watches() -> None:
    def mixes(rank: int) -> None:
        train(*setup(module=sharded(Mixes(), "root"))[1:])

    for each in in_processes(2, mixes):
        assert "it mixes samples" in each.text

    def changed(rank: int) -> tuple[str, ...]:
        engine, model, optimizer, loader = setup(module=sharded(network(), "root"))
        train(model, optimizer, loader)
        with torch.no_grad():
            model[0].weight.add_(1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, optimizer, loader)
        return engine.ledger.warnings

    for said in results(2, changed):
        assert any("weights were changed between private steps" in each for each in said)


class Sideways(nn.Module):
    """Never calls its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inside.weight)


@pytest.mark.parametrize("how", ["leaves", "root", "inside", "unshard", "method"])
def test_a_gradient_by_another_way(how: str) -> None:
    def run(rank: int) -> None:
        module = network()
        if how == "inside":
            module = nn.Sequential(fully_shard(Sideways()), module)
        if how == "method":
            last = fully_shard(module[2])
            last.other = lambda x: nn.functional.linear(x, last.weight)
            register_fsdp_forward_method(last, "other")
        module = sharded(module, how)
        _, model, optimizer, loader = setup(module=module, loss_reduction="sum")
        for x, _ in loader:
            if how == "unshard":  # not by the model's own forward, which would have them watched
                model.unshard()
                loss = model[0](x).sum() + (x[:, :1] * model[2].weight.sum()).sum()
            elif how == "method":
                loss = model[2].other(x.repeat(1, 2)[:, :8]).sum()
            else:
                loss = model(x).sum()
            if how in ("leaves", "root"):
                loss = loss + whole(model[0].weight).sum()
            loss.backward()
            optimizer.step()

    for each in in_processes(2, run):
        assert "outside its own module's forward" in each.text, each.trace


def test_hooks_on_parameters_see_no_gradient_of_a_rehearsal() -> None:
    """To try a module that torch.func takes, plain gradients of two samples are computed."""

    def run(rank: int) -> Any:
        module, seen = sharded(WithOwn(), "blocks"), []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: seen.append(float(whole(p.grad).abs().max()))
            )
        _, model, optimizer, loader = setup(module=module)
        x, y = next(iter(loader))
        nn.functional.cross_entropy(model(x), y).backward()
        Shards(model).reshard()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        return seen

    for seen in results(2, run):
        assert not any(seen)


# -- memory ---------------------------------------------------------------------------------------


def megabytes(what: str) -> float:
    """Of this process, as Linux counts them."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def in_little_memory(rank: int, how: str | None, limit: float | None) -> float:
    """How much more memory at most was used to train six million parameters by AdamW, in MB."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # what is freed goes back to the system
    if limit is not None:
        most = int((megabytes("VmData") + limit) * 2**20)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = megabytes("VmHWM")
    blocks = [nn.Sequential(nn.Linear(1000, 1000), nn.Tanh()) for _ in range(6)]
    module = nn.Sequential(nn.Sequential(*blocks), nn.Linear(1000, 2))
    if how is not None:
        for block in blocks:
            fully_shard(block)
        fully_shard(module)
    records = TensorDataset(torch.randn(8, 1000), torch.arange(8) % 2)
    _, model, optimizer, loader = setup(
        module=module,
        optimizer=torch.optim.AdamW(module.parameters()),
        data_loader=DataLoader(records, batch_size=4),
    )
    train(model, optimizer, loader)
    return megabytes("VmHWM") - before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dpspan")  # random batches: perhaps none to check the model by
@pytest.mark.skipif(sys.platform != "linux", reason="counts and limits memory as Linux does")
def test_a_model_too_large_for_one_process() -> None:
    limit = 190.0  # parameters, gradients and AdamW's state are 96 MB; with sums and noise 240
    for each in in_processes(2, in_little_memory, None, limit):
        assert isinstance(each, Failed)
        assert "allocate memory" in each.text
    whole_model = results(2, in_little_memory, None, None)
    shards = results(2, in_little_memory, "blocks", limit)
    assert shards[0] < 0.75 * whole_model[0], (shards, whole_model)
    assert shards[1] < whole_model[1], (shards, whole_model)  # which draws no noise if not sharded
