"""Looking for copies of public samples: quickly, by workers, and once where once is enough."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

import dpspan
from dpspan.public import fingerprints as module
from dpspan.public import overlap, unchanged
from dpspan.public.data import PublicData, in_order
from dpspan.public.fingerprints import Sieve, fingerprints
from dpspan.public.overlap import refuse_overlap, without_public
from helpers.needs import extra

N = 1200  # more than are compared at a time
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3


# -- the sieve ----------------------------------------------------------------------------------


def inputs(form: str, values: list[list[int]], dtype: torch.dtype) -> Any:
    """Few different values, so that copies abound; rows of the same words in several forms."""
    x = torch.tensor(values).to(dtype)
    mask = (torch.tensor(values) != 0).long()
    return {
        "tensor": x,
        "square": x.reshape(-1, 2, 2),
        "first": x[:, 0],
        "two": (x[:, :2], x[:, 2:]),
        "dict": {"b": x[:, 1:], "a": x[:, :1]},
        "unnamed mask": {"mask": mask, "x": x},
        "masked": {"attention_mask": mask, "x": x},
        "transposed": x.T.contiguous().T,
    }[form]


FORMS = st.sampled_from(
    ["tensor", "square", "first", "two", "dict", "unnamed mask", "masked", "transposed"]
)
ROWS = st.lists(st.lists(st.integers(-1, 1), min_size=4, max_size=4), min_size=1, max_size=9)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8])


@settings(max_examples=300, deadline=None)
@given(FORMS, FORMS, ROWS, ROWS, DTYPES, DTYPES, st.booleans())
def test_the_sieve_finds_what_fingerprints_find(
    form: str,
    other_form: str,
    rows: list[list[int]],
    other_rows: list[list[int]],
    dtype: torch.dtype,
    other_dtype: torch.dtype,
    raw: bool,
) -> None:
    public, private = inputs(form, rows, dtype), inputs(other_form, other_rows, other_dtype)
    known = fingerprints(public)
    sieve = Sieve(lambda: [public], known if raw else None)
    made = enumerate(fingerprints(private))
    expected = {place: each for place, each in made if each in known}
    assert sieve.among(private) == expected
    places = [place for place, each in enumerate(known) if each in expected.values()]
    assert sieve.places(expected.values()) == places
    assert sieve.prints.tolist() == known


def test_pieces_of_several_widths() -> None:
    pieces = [torch.ones(2, 3), torch.ones(1, 7), torch.full((4, 5), 2.0)]
    sieve = Sieve(lambda: pieces)
    for piece in pieces:
        assert list(sieve.among(piece)) == list(range(len(piece)))
    for width in (1, 4, 6, 8, 100):
        assert sieve.among(torch.ones(3, width)) == {}


def test_padding_on_one_side_only() -> None:
    """What is left of the padded samples are the others, though no word is in its place."""
    padded = {"attention_mask": torch.tensor([[0, 1, 1]]), "x": torch.tensor([[0, 5, 6]])}
    plain = {"mask": torch.tensor([[1, 1]]), "x": torch.tensor([[5, 6]])}
    assert fingerprints(padded) == fingerprints(plain)
    for public, private in ((padded, plain), (plain, padded)):
        assert list(Sieve(lambda of=public: [of]).among(private)) == [0]


def test_special_values() -> None:
    special = torch.tensor([[0.0, torch.inf], [torch.nan, 1.0], [1e-45, -0.0]])
    sieve = Sieve(lambda: [special])
    assert list(sieve.among(special.double())) == [0, 1, 2]
    assert sieve.among(special.flip(1)) == {}
    assert list(sieve.among(-special * torch.tensor([1, 0.0]))) == []
    nothing = Sieve(lambda: [torch.ones(2, 0)])
    assert list(nothing.among(torch.zeros(3, 0))) == [0, 1, 2]  # all are equal


def test_only_suspects_have_fingerprints_made(monkeypatch: pytest.MonkeyPatch) -> None:
    public, made = PublicData.of(X[:10]), 0
    assert len(public.sieve.prints) == 10
    actual = module.fingerprints

    def counted(inputs: Any) -> list[bytes]:
        nonlocal made
        made += len(inputs)
        return actual(inputs)

    monkeypatch.setattr(module, "fingerprints", counted)
    refuse_overlap(DataLoader(TensorDataset(X[10:], Y[10:])), [public])
    assert made == 0
    assert len(without_public(TensorDataset(X, Y), public)) == N - 10
    assert made == 10


def test_nothing_public_is_read_twice_or_found_by_others() -> None:
    public = PublicData.of(X[:10])
    assert public.sieve is public.sieve
    weights = [PublicData.of(X[:10]).sieve._weights for _ in range(2)]
    assert not np.array_equal(*weights)  # nobody can make records that collide


# -- one pass, and by workers -------------------------------------------------------------------


class Read(Dataset):
    """Counts reads, and notes in a file who reads."""

    def __init__(self, log: Path | None = None) -> None:
        self.log, self.reads = log, 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        if self.log is not None and index % 100 == 0:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()}\n")
        return X[index], Y[index]


def test_all_public_data_are_compared_in_one_pass() -> None:
    private, elsewhere = Read(), torch.randn(30, 5, generator=torch.Generator().manual_seed(99))
    model = nn.Linear(5, 3)
    dpspan.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(private, batch_size=100),
        criterion=nn.CrossEntropyLoss(),
        method=dpspan.GEP(public=elsewhere, rank=2, clip=1.0, residual_clip=1.0),
        warm_start=dpspan.WarmStart(data=(elsewhere + 1, Y[:30]), max_epochs=1),
        noise_multiplier=1.0,
    )
    assert private.reads == N


def test_each_public_dataset_is_judged_by_itself() -> None:
    elsewhere = PublicData.of(X[:4] + 0.5, name="elsewhere")
    copies = PublicData.of(torch.cat([elsewhere.batches[0][0], X[700:702]]), name="copies")
    with pytest.raises(ValueError, match=r"2 of the 6 samples .* 'copies' .* public sample 4"):
        refuse_overlap(DataLoader(Read()), [elsewhere, copies])
    refuse_overlap(DataLoader(Read()), [elsewhere])
    refuse_overlap(DataLoader(Read()), [])


def test_workers_read_the_records(tmp_path: Path) -> None:
    public, private = PublicData.of(X[[3, 600, 1199]]), Read(tmp_path / "log")

    def begin(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, Read)  # and nothing wrapped around it
        with (tmp_path / "begun").open("a") as file:
            file.write(f"{worker}\n")

    state = torch.get_rng_state()
    loader = DataLoader(private, num_workers=2, worker_init_fn=begin, timeout=0.001)
    with pytest.raises(ValueError, match="3 of the 3 samples"):
        refuse_overlap(loader, [public])
    assert torch.equal(torch.get_rng_state(), state)
    pids = (tmp_path / "log").read_text().split()
    assert len(pids) == N // 100
    assert str(os.getpid()) not in pids
    assert sorted((tmp_path / "begun").read_text().split()) == ["0", "1"]
    rest = without_public(private, public, num_workers=2)
    assert sorted({*range(N)} - {*rest.indices}) == [3, 600, 1199]
    assert rest.indices == sorted(rest.indices)


def test_tensors_in_memory_need_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Subset(TensorDataset(X, Y), range(N)), num_workers=2)
    monkeypatch.setattr(overlap, "like", None)
    with pytest.raises(ValueError, match="5 of the 5"):
        refuse_overlap(loader, [PublicData.of(X[:5])])


class Lengths(Dataset):
    """Dicts that do not stack, and that the collate_fn takes apart."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(1 + index % 3), "label": torch.tensor(index)}


def taken_apart(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    labels = torch.stack([record.pop("label") for record in records])
    return {"x": torch.stack([record["x"] for record in records]), "label": labels}


@pytest.mark.parametrize("workers", [0, 1])
def test_records_that_do_not_stack(workers: int) -> None:
    public = PublicData.of(torch.ones(1, 2))
    rest = without_public(Lengths(), public, taken_apart, num_workers=workers)
    assert rest.indices == [0, 2, 3, 5, 6, 8]


def test_records_are_read_as_a_loader_reads_them() -> None:
    class Several(Read):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(X[index], Y[index]) for index in indices]

    private = Several()
    pieces = [batch for piece in in_order(private, 500, list) for batch in piece]
    assert [count for count, _ in pieces] == [500, 500, 200]
    assert private.reads == 0


class ReadyMade(Dataset):
    """Gives a batch where a DataLoader asks for records; at module level, for workers."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return X[indices], Y[indices]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_come_ready_made_hide_no_copy(workers: int) -> None:
    def collate(batch: Any) -> Any:
        return batch if isinstance(batch, tuple) else default_collate(batch)

    loader = DataLoader(ReadyMade(), batch_size=10, collate_fn=collate, num_workers=workers)
    refuse_overlap(loader, [PublicData.of(torch.full((3, *X.shape[1:]), 77.0))])
    with pytest.raises(ValueError, match="1 of the 1 samples"):
        refuse_overlap(loader, [PublicData.of(X[-1:].clone())])


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def test_streams_are_refused_with_what_to_do() -> None:
    advice = (
        r"Stream cannot be sampled .*datasets\.load_from_disk\(folder\)\.with_format\(\"torch\"\)"
    )
    model = nn.Linear(5, 3)
    with pytest.raises(TypeError, match=advice):
        dpspan.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(Stream(), batch_size=10),
            noise_multiplier=1.0,
        )
    with pytest.raises(TypeError, match=advice):
        without_public(Stream(), X)
    images = torch.rand(50, 3, 16, 16)
    layer = dpspan.PatchFeatures.learn(images, filters=9, progress=False)
    with pytest.raises(TypeError, match=advice):
        dpspan.encode(layer, Stream())


# -- what is remembered -------------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records were read in every comparison."""
    found: list[int] = []
    actual = overlap._compared

    def counted(*arguments: Any) -> Any:
        found.append(0)
        for records, copies in actual(*arguments):
            found[-1] += records
            yield records, copies

    monkeypatch.setattr(overlap, "_compared", counted)
    return found


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old as soon as they are written."""
    monkeypatch.setattr(unchanged, "_SETTLED", -(10**12))


def on_disk(folder: Path, x: Tensor = X, **settings: Any) -> Any:
    datasets = extra("datasets")
    made = datasets.Dataset.from_dict({"x": x.tolist(), "label": Y[: len(x)].tolist()})
    made.save_to_disk(folder, **settings)
    return datasets.load_from_disk(folder).with_format("torch")


PUBLIC = torch.full((3, 5), 7.0)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("shards", [1, 3])
def test_mapped_files_are_compared_once(tmp_path: Path, passes: list[int], shards: int) -> None:
    private, public = on_disk(tmp_path / "a", num_shards=shards), PublicData.of(PUBLIC)
    for _ in range(3):
        refuse_overlap(DataLoader(private), [public])
    assert passes == [N]
    other = PublicData.of(PUBLIC + 1)
    refuse_overlap(DataLoader(private), [public, other])
    assert passes == [N, N]
    refuse_overlap(DataLoader(private), [PublicData.of(PUBLIC)])  # nothing is kept elsewhere
    assert len(passes) == 3
    again = type(private).load_from_disk(tmp_path / "a").with_format("torch")
    refuse_overlap(DataLoader(again), [public])
    assert len(passes) == 3
    refuse_overlap(DataLoader(private.select(range(5))), [public])
    assert passes[3:] == [5]


@pytest.mark.usefixtures("settled")
def test_copies_are_never_forgiven(tmp_path: Path, passes: list[int]) -> None:
    private, public = on_disk(tmp_path / "a"), PublicData.of(X[:2])
    for count in (1, 2):
        with pytest.raises(ValueError, match="2 of the 2"):
            refuse_overlap(DataLoader(private), [public])
        assert len(passes) == count


@pytest.mark.usefixtures("settled")
def test_a_file_that_was_changed_in_its_place_is_compared_again(tmp_path: Path) -> None:
    private, public = on_disk(tmp_path / "a"), PublicData.of(PUBLIC)
    refuse_overlap(DataLoader(private), [public])
    (file,) = (Path(each["filename"]) for each in private.cache_files)
    before, content = file.stat(), file.read_bytes()
    wanted = np.asarray(X[0].tolist()).tobytes()  # saved as doubles
    assert content.count(wanted) == 1
    with file.open("r+b") as opened:
        opened.seek(content.index(wanted))
        opened.write(np.full(5, 7.0).tobytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_ino, after.st_mtime_ns) == (
        before.st_size, before.st_ino, before.st_mtime_ns)  # fmt: skip
    with pytest.raises(ValueError, match="3 of the 3"):
        refuse_overlap(DataLoader(private), [public])


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "change",
    ["transform", "collate", "in memory", "added column", "subset", "tensors", "subclass"],
)
def test_what_may_change_unseen_is_always_compared(
    tmp_path: Path, passes: list[int], change: str
) -> None:
    mapped = on_disk(tmp_path / "a")

    class Own(type(mapped)):
        pass

    private = {
        "transform": lambda: mapped.with_transform(lambda rows: {"x": PUBLIC[: len(rows["x"])]}),
        "collate": lambda: mapped,
        "in memory": lambda: type(mapped).load_from_disk(tmp_path / "a", keep_in_memory=True)
        .with_format("torch"),
        "added column": lambda: mapped.add_column("z", Y.tolist()),
        "subset": lambda: Subset(mapped, range(N)),
        "tensors": lambda: TensorDataset(X, Y),
        "subclass": lambda: Own(mapped._data, fingerprint=mapped._fingerprint).with_format("torch"),
    }[change]()  # fmt: skip
    collate = {"collate_fn": lambda rows: torch.stack([row["x"] for row in rows])}
    loader = DataLoader(private, **(collate if change == "collate" else {}))
    assert unchanged.stamp(loader) is None
    assert unchanged.stamp(DataLoader(mapped)) is not None
    if change == "tensors":
        public = PublicData.of(PUBLIC)
        for _ in range(2):
            refuse_overlap(loader, [public])
        assert passes == [N, N]


@pytest.mark.usefixtures("settled")
def test_stamps_differ_where_records_do(tmp_path: Path) -> None:
    private = on_disk(tmp_path / "a")
    order = np.arange(N)
    made = [
        private,
        private.select([5, 3]),
        private.select([3, 5]),
        private.shuffle(seed=1),
        private.select_columns(["x"]),
        private.with_format("numpy"),
        private.with_format("torch", dtype=torch.float64),
        on_disk(tmp_path / "b"),
        private.map(lambda row: {"x": [value + 1 for value in row["x"]]}),
    ]
    stamps = [unchanged.stamp(DataLoader(each)) for each in made]
    assert None not in stamps
    assert len({*stamps}) == len(stamps)
    picked = private.select(order[::-1])
    before = unchanged.stamp(DataLoader(picked))
    assert before is not None
    order[:] = 0  # whether or not the library shares its memory
    same = picked[0]["label"] == Y[N - 1]
    assert same == (unchanged.stamp(DataLoader(picked)) == before)


def test_a_file_that_has_just_been_written_is_not_trusted(tmp_path: Path) -> None:
    private = on_disk(tmp_path / "a")
    assert unchanged.stamp(DataLoader(private)) is None
    (file,) = (Path(each["filename"]) for each in private.cache_files)
    file.unlink()
    assert unchanged.stamp(DataLoader(private)) is None


@pytest.mark.usefixtures("settled")
def test_images_by_path_are_not_trusted(tmp_path: Path) -> None:
    datasets = extra("datasets")
    from PIL import Image

    Image.new("L", (2, 2)).save(tmp_path / "a.png")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [str(tmp_path / "a.png")], "label": [0]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "images")
    private = datasets.load_from_disk(tmp_path / "images").with_format("torch")
    assert unchanged.stamp(DataLoader(private)) is None


@pytest.mark.usefixtures("settled")
def test_a_file_changed_while_it_was_compared_is_not_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = on_disk(tmp_path / "a"), PublicData.of(PUBLIC)
    (file,) = (Path(each["filename"]) for each in private.cache_files)
    actual = overlap._compared

    def touched(*arguments: Any) -> Any:
        yield from actual(*arguments)
        os.utime(file)

    monkeypatch.setattr(overlap, "_compared", touched)
    refuse_overlap(DataLoader(private), [public])
    assert not public.sieve.cleared
