"""Public data: every way of giving it, what is refused, and copies of it among private records."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from dpspan.engine.sampling import PoissonDraw, PrivateLoader
from dpspan.public.data import PublicData, Samples, move
from dpspan.public.fingerprints import fingerprints
from dpspan.public.overlap import refuse_overlap, without_public

N = 10
X = torch.randn(N, 3, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3


class Slow(Dataset):
    """A dataset that is no TensorDataset: its records are collated."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        record = tuple(tensor[index] for tensor in self.tensors)
        return record if len(record) > 1 else record[0]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


class Texts(Dataset):
    """Token ids of different lengths."""

    def __init__(self, *texts: list[int]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> list[int]:
        return self.texts[index]


def pad(texts: list[list[int]], to: int = 0) -> dict[str, Tensor]:
    width = max(to, *map(len, texts))
    return {
        "input_ids": torch.tensor([text + [0] * (width - len(text)) for text in texts]),
        "attention_mask": torch.tensor([[int(i < len(t)) for i in range(width)] for t in texts]),
    }


def gathered(data: PublicData, size: int | None = None) -> tuple[Tensor, Any, Any]:
    indices, inputs, labels = zip(*data.pieces(size), strict=True)
    if labels[0] is None:
        return torch.cat(indices), torch.cat(inputs), None
    return torch.cat(indices), torch.cat(inputs), torch.cat(labels)


# -- reading ------------------------------------------------------------------------------------

LABELLED = {
    "pair": (X, Y),
    "list": [X, Y],
    "TensorDataset": TensorDataset(X, Y),
    "Dataset": Slow(X, Y),
    "Subset": Subset(TensorDataset(X, Y), range(N)),
    "DataLoader": DataLoader(Slow(X, Y), batch_size=4),
    "shuffling DataLoader": DataLoader(Slow(X, Y), batch_size=3, shuffle=True),
    "stream": DataLoader(Stream(), batch_size=4),
}
UNLABELLED = {
    "tensor": X,
    "single": (X,),
    "TensorDataset": TensorDataset(X),
    "Dataset": Slow(X),
    "DataLoader": DataLoader(TensorDataset(X), batch_size=4),
}


@pytest.mark.parametrize("source", LABELLED.values(), ids=LABELLED)
def test_every_source_of_labelled_data_is_the_same(source: Any) -> None:
    data = PublicData.of(source)
    indices, inputs, labels = gathered(data)
    assert (data.name, data.count, data.labelled) == ("public", N, True)
    assert torch.equal(indices, torch.arange(N))
    assert torch.equal(inputs, X)
    assert torch.equal(labels, Y)
    assert data.digest == PublicData.of((X, Y)).digest
    assert data == PublicData.of((X, Y))


@pytest.mark.parametrize("source", UNLABELLED.values(), ids=UNLABELLED)
def test_every_source_of_unlabelled_data_is_the_same(source: Any) -> None:
    data = PublicData.of(source, name="web")
    _, inputs, labels = gathered(data)
    assert (data.name, data.count, data.labelled) == ("web", N, False)
    assert torch.equal(inputs, X)
    assert labels is None
    assert data.digest == PublicData.of(X).digest


@pytest.mark.parametrize("key", ["label", "labels"])
@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_mapping_keeps_its_names(key: str, kind: Any) -> None:
    data = PublicData.of(kind({"b": X, "a": Y, key: Y + 1}))
    ((_, inputs, labels),) = data.pieces()
    assert type(inputs) is dict
    assert set(inputs) == {"a", "b"}
    assert torch.equal(inputs["b"], X)
    assert torch.equal(labels, Y + 1)
    assert data.digest == PublicData.of({"a": Y, key: Y + 1, "b": X}).digest
    assert not PublicData.of(kind({"b": X})).labelled


def test_inputs_may_be_nested() -> None:
    data = PublicData.of(((X, {"mask": Y}), Y))
    ((indices, (x, rest), labels),) = data.pieces(size=4, chosen=torch.tensor([2, 7]))
    assert indices.tolist() == [2, 7]
    assert torch.equal(x, X[[2, 7]])
    assert torch.equal(rest["mask"], Y[[2, 7]])
    assert torch.equal(labels, Y[[2, 7]])


def test_built_data_pass_through() -> None:
    data = PublicData.of(X, name="first")
    assert PublicData.of(data, name="second") is data


def test_data_are_read_once_and_kept() -> None:
    x = X.clone()
    data = PublicData.of(x)
    x.zero_()
    assert torch.equal(gathered(data)[1], X)


def test_a_parameter_or_gpu_like_view_is_held_as_plain_values() -> None:
    data = PublicData.of(torch.nn.Parameter(X).expand(N, 3, 4)[:, ::2])
    _, inputs, _ = gathered(data)
    assert not inputs.requires_grad
    assert torch.equal(inputs, X[:, ::2])
    assert data.digest == PublicData.of(X[:, ::2].clone()).digest


@pytest.mark.parametrize(
    "other",
    [
        (X.double(), Y),
        (X, Y.int()),
        (X.flip(0), Y),
        (X, Y.flip(0)),
        (X.reshape(N, 4, 3), Y),
        (X,),
        (X[1:], Y[1:]),
        {"x": X, "label": Y},
    ],
)
def test_the_digest_tells_data_apart(other: Any) -> None:
    assert PublicData.of(other).digest != PublicData.of((X, Y)).digest
    assert PublicData.of(other) != PublicData.of((X, Y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.uint8])
def test_the_digest_takes_any_dtype(dtype: torch.dtype) -> None:
    one, two = torch.ones(2, 3).to(dtype), torch.eye(2, 3).to(dtype)
    assert PublicData.of(one).digest != PublicData.of(two).digest
    assert PublicData.of((one, torch.ones(2, 0))).count == 2


def test_a_sampler_that_picks_records_keeps_its_say() -> None:
    few = DataLoader(Slow(X, Y), sampler=RandomSampler(Slow(X, Y), num_samples=4), batch_size=3)
    assert PublicData.of(few).count == 4
    last = DataLoader(Slow(X, Y), batch_sampler=[[9, 8], [7]])
    assert gathered(PublicData.of(last))[2].tolist() == Y[[9, 8, 7]].tolist()


# -- pieces -------------------------------------------------------------------------------------


def test_pieces_keep_the_loaders_batch_size() -> None:
    data = PublicData.of(DataLoader(Slow(X, Y), batch_size=4))
    assert [len(indices) for indices, _, _ in data.pieces()] == [4, 4, 2]
    some = torch.tensor([0, 3, 4, 8, 9])  # out of three batches, in two pieces
    assert [indices.tolist() for indices, _, _ in data.pieces(None, some)] == [[0, 3, 4, 8], [9]]


def test_without_a_loader_pieces_stay_moderate() -> None:
    data = PublicData.of(torch.zeros(2500, 1))
    assert [len(indices) for indices, _, _ in data.pieces()] == [2048, 452]


@settings(deadline=None)
@given(st.integers(1, 12), st.sets(st.integers(0, N - 1)), st.integers(1, 5))
def test_pieces_are_the_chosen_samples_in_order(size: int, some: set[int], batch: int) -> None:
    data = PublicData.of(DataLoader(TensorDataset(X, Y), batch_size=batch))
    chosen = torch.tensor(sorted(some), dtype=torch.long)
    pieces = list(data.pieces(size, chosen))
    assert all(1 <= len(indices) <= size for indices, _, _ in pieces)
    assert [int(i) for indices, _, _ in pieces for i in indices] == chosen.tolist()
    for indices, inputs, labels in pieces:
        assert torch.equal(inputs, X[indices])
        assert torch.equal(labels, Y[indices])


def test_batches_of_different_lengths_are_not_mixed() -> None:
    texts = Texts([1, 2, 3], [4], [5, 6], [7], [8, 9])
    data = PublicData.of(DataLoader(texts, batch_size=2, collate_fn=pad))
    shapes = [tuple(inputs["input_ids"].shape) for _, inputs, _ in data.pieces(8)]
    assert shapes == [(2, 3), (3, 2)]
    assert [indices.tolist() for indices, _, _ in data.pieces(8)] == [[0, 1], [2, 3, 4]]


def test_images_of_different_sizes_come_apart() -> None:
    class Images(Texts):
        def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
            return torch.full((len(self.texts[index]),), float(index))

    data = PublicData.of(Images([1, 2], [3, 4], [5]))
    assert [tuple(inputs.shape) for _, inputs, _ in data.pieces()] == [(2, 2), (1, 1)]


@pytest.mark.parametrize("chosen", [[3, 1], [1, 1], [-1, 2], [5, N], [[1, 2]]])
def test_chosen_must_be_sorted_indices(chosen: list[Any]) -> None:
    with pytest.raises(ValueError, match="chosen to be sorted indices below 10"):
        list(PublicData.of(X).pieces(None, torch.tensor(chosen)))


def test_piece_sizes_are_counts() -> None:
    with pytest.raises(ValueError, match="size to be an integer of at least 1, got 0"):
        list(PublicData.of(X).pieces(0))


def test_move_reaches_every_tensor() -> None:
    moved = move({"a": (X, [Y]), "b": None}, torch.device("meta"))
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == "meta"
    assert moved["b"] is None


# -- refusals -----------------------------------------------------------------------------------


class NoLength(Dataset):
    def __getitem__(self, index: int) -> Tensor:
        return X[index]


def private_loader() -> PrivateLoader:
    draw = PoissonDraw.one_pass(records=N, sample_rate=0.5)
    return PrivateLoader(DataLoader(TensorDataset(X), batch_size=5), draw)


def test_a_private_loader_is_refused() -> None:
    with pytest.raises(TypeError, match=r"PrivateLoader.*private records must not become public"):
        PublicData.of(private_loader())


def test_samples_do_not_become_public_by_the_way() -> None:
    samples = Samples.of((X, Y), name="records")
    assert (samples.count, samples.labelled) == (N, True)
    assert samples != PublicData.of((X, Y), name="records")
    with pytest.raises(TypeError, match="'records' are not declared public"):
        PublicData.of(samples)
    public = PublicData.of((X, Y))
    assert Samples.of(public, name="private") is public
    with pytest.raises(ValueError, match="The data 'records' are empty"):
        Samples.of(X[:0], name="records")


@pytest.mark.parametrize("kind", [Samples, PublicData])
def test_some_of_the_samples(kind: type[Samples]) -> None:
    some = kind.of((X, Y), name="web").take(torch.tensor([1, 4]))
    assert type(some) is kind
    assert some == kind.of((X[[1, 4]], Y[[1, 4]]), name="web")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Stream(), r"The dataset \(Stream\) is an IterableDataset.*: give .* a DataLoader"),
        (NoLength(), r"The dataset \(NoLength\) .* has no length: give a map-style"),
        (X.numpy(), "Cannot read samples from a ndarray: give a map-style torch Dataset"),
        ("public.csv", "Cannot read samples from a str"),
        (None, "Cannot read samples from a NoneType"),
        (["a", "b"], "hold tensors with the samples in the first dimension, got a str"),
        ({"text": ["a", "b"]}, "samples in the first dimension, got a str.*collate_fn"),
        (torch.tensor(1.0), "got a tensor without dimensions"),
    ],
)
def test_what_cannot_be_read_is_a_type_error(source: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        PublicData.of(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (X[:0], "public data 'public' are empty: give at least one sample"),
        (TensorDataset(X[:0]), "are empty"),
        (DataLoader(TensorDataset(X[:3]), batch_size=4, drop_last=True), "are empty"),
        ((X, Y[:4]), r"samples in its first dimension, got first dimensions of \[4, 10\]"),
        ({"a": X, "b": Y[:4]}, r"first dimensions of \[4, 10\]"),
        ((X, Y, Y), r"has 3 parts: give \(inputs,\) or \(inputs, labels\), or a dict"),
        ((), "has 0 parts"),
        ({"label": Y}, r"keys \['label'\]: give inputs"),
        ({"x": X, "label": Y, "labels": Y}, "labels under one of"),
    ],
)
def test_what_makes_no_samples_is_a_value_error(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PublicData.of(source)


def test_batches_agree_on_having_labels() -> None:
    loader = DataLoader(Texts([1], [2]), collate_fn=lambda t: (X, Y) if t == [[1]] else (X,))
    with pytest.raises(ValueError, match="have labels and some have none"):
        PublicData.of(loader)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_samples_that_are_not_finite_are_refused(bad: float) -> None:
    x = X.clone()
    x[3, 0, 1] = x[3, 2, 2] = x[7, 0, 0] = bad
    message = "2 of the 10 samples of the public data 'web' hold NaN or infinity.*sample 3"
    with pytest.raises(ValueError, match=message):
        PublicData.of(DataLoader(TensorDataset(x, Y), batch_size=4), name="web")
    targets = Y.float()
    targets[9] = bad
    with pytest.raises(ValueError, match="1 of the 10 samples"):
        PublicData.of((X, targets))


# -- overlap ------------------------------------------------------------------------------------

PUBLIC = PublicData.of((X[:4], Y[:4]))
ELSEWHERE = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "private",
    [
        TensorDataset(X, Y),
        TensorDataset(X, Y + 1),
        TensorDataset(X),
        TensorDataset(X, Y, Y),
        Slow(X, Y),
        Slow(X),
        Subset(TensorDataset(ELSEWHERE, Y[:6]), [1]) + TensorDataset(X, Y),
        TensorDataset(X.double(), Y),
    ],
)
def test_copies_are_found_whatever_their_labels_and_dtypes(private: Any) -> None:
    with pytest.raises(ValueError, match=r"4 of the 4 samples .*'public' also occur.*sample 0"):
        refuse_overlap(DataLoader(private), [PUBLIC])


def test_the_message_says_what_to_do() -> None:
    private = TensorDataset(torch.cat([ELSEWHERE, X[2:3]]))
    message = r"1 of the 4 .*e\.g\. public sample 2\).*dpspan\.without_public.*do not publish it"
    with pytest.raises(ValueError, match=message):
        refuse_overlap(DataLoader(private), [PUBLIC])


@pytest.mark.parametrize(
    "private",
    [
        TensorDataset(ELSEWHERE, Y[:6]),
        TensorDataset(X[4:], Y[4:]),
        TensorDataset(X + 1e-6, Y),
        TensorDataset(X.flatten(1), Y),
        Slow(Y, X),
        Texts([1, 2], [3]),
        Subset(TensorDataset(X, Y), [5, 9]),
    ],
)
def test_what_is_no_copy_is_let_pass(private: Any) -> None:
    refuse_overlap(DataLoader(private), [PUBLIC])
    assert without_public(private, PUBLIC).indices == list(range(len(private)))


def test_strings_and_odd_batches_are_no_copies() -> None:
    class Words(Texts):
        def __getitem__(self, index: int) -> Any:
            return {"text": "word", "label": 1}

    refuse_overlap(DataLoader(Words([], [])), [PUBLIC])
    for odd in (lambda records: X[:1], lambda records: []):  # not one a record
        refuse_overlap(DataLoader(TensorDataset(X), collate_fn=odd), [PUBLIC])


def test_the_collation_counts() -> None:
    def doubled(rows: Any) -> Tensor:
        return torch.stack([row[0] * 2 for row in rows])

    refuse_overlap(DataLoader(TensorDataset(X), collate_fn=doubled), [PUBLIC])
    with pytest.raises(ValueError, match="4 of the 4"):
        refuse_overlap(DataLoader(TensorDataset(X / 2), collate_fn=doubled), [PUBLIC])


def test_augmented_views_through_a_subset_are_not_bypassed() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return tuple(2 * tensor for tensor in super().__getitem__(index))

    refuse_overlap(DataLoader(Doubled(X)), [PUBLIC])
    with pytest.raises(ValueError, match="4 of the 4"):
        refuse_overlap(DataLoader(Subset(Doubled(X / 2), range(N))), [PUBLIC])


def test_negative_zero_is_zero_and_integer_widths_are_equal() -> None:
    zeros = torch.zeros(2, 3)
    assert fingerprints(zeros) == fingerprints(-zeros)
    images = torch.arange(12).reshape(2, 6)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert fingerprints(images) == fingerprints(images.to(dtype))
    assert fingerprints(X.bfloat16()) == fingerprints(X.bfloat16().double())
    assert fingerprints(images) != fingerprints(images.reshape(2, 2, 3))
    assert fingerprints((images, X[:2])) != fingerprints((X[:2], images))
    assert fingerprints({"a": images, "b": X[:2]}) == fingerprints({"b": X[:2], "a": images})
    assert len(set(fingerprints(X.to(torch.complex64)))) == N
    assert len(set(fingerprints(torch.arange(5)))) == 5


def test_padding_hides_nothing() -> None:
    public = PublicData.of(pad([[5, 6, 7], [8]], to=6))
    private = Texts([1, 2, 3, 4], [8], [5, 6], [5, 6, 7, 0], [5, 6, 7])
    with pytest.raises(ValueError, match="2 of the 2"):
        refuse_overlap(DataLoader(private, collate_fn=pad), [public])
    assert without_public(private, public, pad).indices == [0, 2, 3]


@pytest.mark.parametrize("inverted", [False, True])
def test_masks_of_another_meaning_do_not_hide_content(inverted: bool) -> None:
    """1 for padding, or an additive float mask: what it calls padding is the text."""
    tokens = pad([[5, 6, 7], [8, 9, 10], [5, 6]])
    mask = 1 - tokens["attention_mask"] if inverted else -1e9 * (1.0 - tokens["attention_mask"])
    assert len(set(fingerprints({**tokens, "attention_mask": mask}))) == 3


def test_records_that_do_not_stack_are_compared_one_by_one() -> None:
    class Sizes(Texts):
        def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
            return torch.tensor(self.texts[index])

    public = PublicData.of(torch.tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match="1 of the 1"):
        refuse_overlap(DataLoader(Sizes([4], [1, 2, 3], [5, 6])), [public])
    assert without_public(Sizes([4], [1, 2, 3], [5, 6]), public).indices == [0, 2]


def test_without_public_takes_the_copies_out_of_the_private_side() -> None:
    private = TensorDataset(torch.cat([X[3:5], ELSEWHERE, X[:1], X[:1]]), torch.arange(10))
    rest = without_public(private, (X[:4], Y[:4]))
    assert [int(label) for _, label in rest] == [1, 2, 3, 4, 5, 6, 7]
    refuse_overlap(DataLoader(rest), [PUBLIC])
    nested = without_public(Subset(private, [9, 0, 5]), PUBLIC)
    assert [int(label) for _, label in nested] == [5]


def test_copies_beyond_the_first_batch_are_found() -> None:
    many = torch.arange(2000.0).reshape(1000, 2)
    public = PublicData.of(many[-3:])
    with pytest.raises(ValueError, match="3 of the 3"):
        refuse_overlap(DataLoader(TensorDataset(many)), [public])
    assert len(without_public(Slow(many), public)) == 997
