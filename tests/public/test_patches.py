"""Features from public patches: what they are, that each image stands alone, and the record."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import dpspan
from dpspan.public import patch_filters, patches
from dpspan.public.patch_filters import PatchResponses, _centres
from dpspan.public.patches import PatchFeatures, _directions


def images(count: int, seed: int, channels: int = 3, side: int = 14) -> Tensor:
    """Smooth random images: neighbouring pixels are alike, as in photographs."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, channels, side // 2, side // 2, generator=generator)
    return nn.functional.interpolate(coarse, (side, side), mode="bilinear") * 0.2 + 0.5


@pytest.fixture(scope="module")
def learnt() -> PatchFeatures:
    return PatchFeatures.learn(images(60, seed=0), filters=12, size=4, directions=30)


def responses_slowly(responses: PatchResponses, image: Tensor) -> Tensor:
    """Of one image, patch by patch, as the algorithm is written down."""
    pools = []
    for bank in responses.banks:
        count, _, size, _ = bank.filters.shape
        rows = bank.filters.reshape(count, -1).double()
        across = image.shape[-1] - size + 1
        positive, negative = torch.zeros(2, count, across, across, dtype=torch.float64)
        for y in range(across):
            for x in range(across):
                patch = image[:, y : y + size, x : x + size].reshape(-1).double()
                patch = patch - patch.mean()
                patch = patch / (patch.var() + responses.flat.double() ** 2).sqrt()
                response = rows @ patch - bank.offset.double()
                positive[:, y, x] = (response - responses.threshold).clamp_min(0)
                negative[:, y, x] = (-response - responses.threshold).clamp_min(0)
        pools += [
            nn.functional.adaptive_avg_pool2d(part, grid).flatten()
            for grid in responses.grids
            for part in (positive, negative)
        ]
    return torch.cat(pools)


def second_slowly(responses: PatchResponses, image: Tensor) -> Tensor:
    """The second layer's responses to one image, place by place."""
    second = responses.second.double()
    threshold, filters = responses.threshold, second.first.filters
    size, across = filters.shape[-1], image.shape[-1] - filters.shape[-1] + 1
    exceeding = torch.zeros(2 * len(filters), across, across, dtype=torch.float64)
    for y in range(across):
        for x in range(across):
            patch = image[:, y : y + size, x : x + size].reshape(-1).double()
            patch = patch - patch.mean()
            patch = patch / (patch.var() + responses.flat.double() ** 2).sqrt()
            response = filters.flatten(1) @ patch - second.first.offset
            exceeding[:, y, x] = (torch.cat([response, -response]) - threshold).clamp_min(0)
    places = range(0, across - 2, 2)
    maps = torch.stack(
        [
            torch.stack([exceeding[:, y : y + 3, x : x + 3].mean((1, 2)) for x in places])
            for y in places
        ]
    )
    maps = (maps.sqrt() - second.mean) @ second.channels  # (height, width, channels)
    inner = range(len(places) - 2)
    found = torch.zeros(2 * len(second.filters), len(inner), len(inner), dtype=torch.float64)
    for y in inner:
        for x in inner:
            patch = maps[y : y + 3, x : x + 3].permute(2, 0, 1).reshape(-1)
            patch = patch / (patch.square().sum() + second.short**2).sqrt()
            response = second.filters.flatten(1) @ patch - second.offset
            both = torch.cat([response, -response])
            found[:, y, x] = (both - second.threshold).clamp_min(0)
    pools = [nn.functional.adaptive_avg_pool2d(found, grid) for grid in responses.grids]
    count = len(second.filters)
    return torch.cat([p.flatten() for pool in pools for p in (pool[:count], pool[count:])])


def slowly(layer: PatchFeatures, image: Tensor) -> Tensor:
    """The features of one image."""
    found = responses_slowly(layer.responses, image)
    if layer.responses.mirror:
        found = (found + responses_slowly(layer.responses, image.flip(2))) / 2
    vector = (found ** layer.settings["power"] - layer.mean.double()) @ layer.basis.double()
    return vector / vector.norm()


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize(("size", "grid"), [(4, 2), ((3, 5), 2), (4, (1, 3))])
def test_features_are_those_of_the_slow_algorithm(
    size: int | tuple[int, ...], grid: int | tuple[int, ...], mirror: bool, power: float
) -> None:
    learnt = PatchFeatures.learn(
        images(60, seed=0),
        filters=13,
        size=size,
        grid=grid,
        directions=20,
        mirror=mirror,
        power=power,
    )
    seen = images(3, seed=1)
    found = learnt(seen)
    assert found.shape == (3, 20)
    for image, features in zip(seen, found, strict=True):
        assert torch.allclose(slowly(learnt, image), features.double(), atol=1e-3)


@pytest.mark.parametrize("grid", [2, (1, 2)])
def test_responses_of_a_second_layer_are_those_of_the_slow_algorithm(grid: Any) -> None:
    learnt = PatchFeatures.learn(
        images(60, seed=0), filters=6, size=4, grid=grid, directions=20, mirror=False, second=15
    )
    for image in images(2, seed=1):
        found = learnt.responses(image[None])[0].double()
        first = responses_slowly(learnt.responses, image)
        assert torch.allclose(found[: len(first)], first, atol=1e-3)
        second = second_slowly(copy.deepcopy(learnt.responses), image)
        assert second.count_nonzero() > len(second) / 4
        assert torch.allclose(found[len(first) :], second, atol=1e-3 * float(second.max()))


def test_a_second_layer_keeps_images_apart_and_knows_mirror_images() -> None:
    learnt = PatchFeatures.learn(images(60, seed=0), filters=6, size=4, directions=20, second=15)
    seen = images(5, seed=1)
    assert learnt(seen).shape == (5, 20)
    assert torch.allclose(learnt(seen), learnt(seen.flip(3)), atol=1e-3)
    other = seen.clone()
    other[1:] = 1e4
    assert torch.allclose(learnt(other)[0], learnt(seen)[0], atol=1e-3)
    assert learnt(torch.zeros(2, 3, 14, 14)).isfinite().all()


def test_a_mirror_image_has_the_same_features() -> None:
    seen = images(4, seed=1)
    for mirror in (True, False):
        learnt = PatchFeatures.learn(
            images(60, seed=0), filters=8, size=4, directions=9, mirror=mirror
        )
        assert torch.allclose(learnt(seen), learnt(seen.flip(3)), atol=1e-4) is mirror


def test_an_image_does_not_see_the_others(
    learnt: PatchFeatures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_filters, "_CPU_RESPONSES", 12 * 14 * 14 * 50)  # several pieces
    seen = images(130, seed=2)
    alone = torch.cat([learnt(image[None]) for image in seen])
    assert torch.allclose(learnt(seen), alone, atol=1e-4)
    other = seen.clone()
    other[1:] = 1e4
    assert torch.allclose(learnt(other)[0], learnt(seen)[0], atol=1e-4)


def test_the_scale_and_the_brightness_of_pixels_do_not_matter() -> None:
    public, seen = images(40, seed=0), images(6, seed=1)
    plain = PatchFeatures.learn(public, filters=8, size=4, directions=10)(seen)
    scaled = PatchFeatures.learn(255 * public, filters=8, size=4, directions=10)(255 * seen)
    assert torch.allclose(plain.abs(), scaled.abs(), atol=1e-2)  # a direction's sign is free
    features = PatchFeatures.learn(public, filters=8, size=4, directions=10)
    assert torch.allclose(features(seen + 3.0), features(seen), atol=1e-3)


def test_flat_images_have_finite_features(learnt: PatchFeatures) -> None:
    assert learnt(torch.full((2, 3, 14, 14), 0.5)).isfinite().all()
    assert learnt(torch.zeros(2, 3, 14, 14)).isfinite().all()


def test_centres_find_directions_whatever_their_sign() -> None:
    torch.manual_seed(0)
    truth = torch.eye(6)[:3]
    signs = torch.randint(2, (600, 1)) * 2.0 - 1
    rows = signs * truth.repeat(200, 1) + 0.05 * torch.randn(600, 6)
    best = max(
        (_centres(rows, 3, torch.Generator().manual_seed(seed)) for seed in range(8)),
        key=lambda centres: float((centres @ truth.T).abs().max(0).values.min()),
    )
    assert (best @ truth.T).abs().max(0).values.min() > 0.99


@pytest.mark.parametrize("samples", [500, 15])  # more than features, and fewer
@pytest.mark.parametrize("whitening", [0.0, 0.5, 1.0])
def test_whitening_makes_directions_alike(
    whitening: float, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "_COLUMNS", 7)
    torch.manual_seed(0)
    features = torch.randn(samples, 20) * torch.linspace(1, 8, 20) @ torch.randn(20, 20)
    mean, basis = _directions(features.clone(), 12, whitening)
    turned = (features - mean) @ basis
    covariance = torch.cov(turned.T)
    lengths = covariance.diagonal()
    off = covariance - torch.diag(lengths)
    assert off.abs().max() < 1e-3 * lengths.max()  # principal directions
    unchanged = _directions(features.clone(), 12, 0.0)[1]
    plain = torch.cov(((features - mean) @ unchanged).T).diagonal()
    expected = plain / (plain / plain[0]) ** whitening
    assert torch.allclose(lengths, expected, rtol=1e-3)


def test_no_more_directions_than_the_public_images_have() -> None:
    five = images(5, seed=0)
    features = PatchFeatures.learn(five, filters=8, size=4, directions=500)
    assert features.basis.shape[1] == 14  # three views of five images, without their mean
    features = PatchFeatures.learn(five, filters=8, size=4, directions=500, views=9)
    assert features.basis.shape[1] == 44  # nine views


def test_further_views_change_public_images_at_random_for_directions_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    public, seen = images(30, seed=0), []

    def noted(batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch)
        return batch + torch.rand(len(batch), 1, 14, 14)

    monkeypatch.setattr(patches, "_AUGMENT", noted)
    settings: Any = {"filters": 8, "size": 4, "directions": 9}
    found = []
    for views in (1, 3, 3):
        torch.rand(7)
        before = torch.get_rng_state()
        found.append(PatchFeatures.learn(public, **settings, views=views))
        assert torch.equal(torch.get_rng_state(), before)  # the caller's own draws
    one, three, again = found
    assert len(seen) == 4
    assert all(torch.equal(batch, public) for batch in seen)
    for name, filters in one.responses.state_dict().items():
        assert torch.equal(three.responses.state_dict()[name], filters)
    assert not torch.allclose(one.mean, three.mean, atol=1e-3)
    assert torch.equal(three.mean, again.mean)


def test_the_same_seed_gives_the_same_features() -> None:
    public, seen = images(30, seed=0), images(4, seed=1)
    one, two, other = (
        PatchFeatures.learn(public, filters=6, size=4, directions=8, seed=seed)(seen)
        for seed in (3, 3, 4)
    )
    assert torch.equal(one, two)
    assert not torch.allclose(one, other, atol=1e-3)


def private_run(features: PatchFeatures, private: Tensor) -> tuple[dpspan.PrivacyEngine, nn.Module]:
    model = nn.Sequential(features, nn.Linear(features.basis.shape[1], 2))
    loader = DataLoader(
        TensorDataset(private, torch.arange(len(private)) % 2), batch_size=16, shuffle=True
    )
    engine = dpspan.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=loader,
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return engine, model


def test_a_private_run_keeps_the_public_images_on_record(learnt: PatchFeatures) -> None:
    before = copy.deepcopy(learnt.state_dict())
    engine, model = private_run(learnt, images(64, seed=5))
    (record,) = engine.certificate(1e-5)["public"]
    assert (record["sha256"], record["detail"]) == (learnt.public.digest, "PatchFeatures")
    after = model[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_private_images_must_not_be_among_the_public_ones(learnt: PatchFeatures) -> None:
    private = images(64, seed=5)
    private[7] = learnt.public.batches[0][0][3]
    with pytest.raises(ValueError, match="also occur in the private dataset"):
        private_run(learnt, private)


def test_nothing_trainable_may_come_before_it(learnt: PatchFeatures) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), learnt, nn.Linear(30, 2))
    with pytest.raises(ValueError, match="Put it first"):
        model(images(4, seed=1))


def test_a_copy_shares_the_public_images(learnt: PatchFeatures) -> None:
    assert copy.deepcopy(learnt).public is learnt.public


def placed(layer: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {k: (t.stride(), t.data_ptr() % 64) for k, t in layer.state_dict().items()}


class TestFiles:
    @pytest.mark.parametrize(
        "own", [{}, {"grid": (1, 2)}, {"second": 11}, {"rotation": 15.0}], ids=str
    )
    def test_what_is_loaded_is_what_was_saved(self, own: Any, tmp_path: Path) -> None:
        public, seen = images(30, seed=0), images(4, seed=1)
        one = PatchFeatures.learn(public, filters=7, size=(3, 5), directions=9, mirror=False, **own)
        one.save(tmp_path / "f.safetensors")
        again = PatchFeatures.load(tmp_path / "f.safetensors", public)
        # The same numbers at like places in memory, hence the same kernels and the same bits.
        assert again.digest == one.digest
        assert placed(again) == placed(one)
        assert torch.equal(again(seen), one(seen))
        assert again.public == one.public
        assert str(again) == str(one)

    def test_files_from_before_there_were_rotations_are_read(
        self, learnt: PatchFeatures, tmp_path: Path
    ) -> None:
        path, seen = tmp_path / "f.safetensors", images(4, seed=1)
        learnt.save(path)
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()[patches._FORMAT])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        del about["settings"]["rotation"]
        save_file(tensors, path, metadata={patches._FORMAT: json.dumps(about)})
        assert torch.equal(PatchFeatures.load(path)(seen), learnt(seen))

    def test_other_public_data_are_refused(self, learnt: PatchFeatures, tmp_path: Path) -> None:
        learnt.save(tmp_path / "f.safetensors")
        with pytest.raises(ValueError, match="60 samples called 'public', got others"):
            PatchFeatures.load(tmp_path / "f.safetensors", images(60, seed=9))

    def test_without_public_data_it_can_be_used_but_not_trained_behind(
        self, learnt: PatchFeatures, tmp_path: Path
    ) -> None:
        learnt.save(tmp_path / "f.safetensors")
        layer = PatchFeatures.load(tmp_path / "f.safetensors")
        seen = images(64, seed=5)
        assert torch.equal(layer(seen), learnt(seen))
        with pytest.raises(ValueError, match="was loaded without its public data"):
            private_run(layer, seen)
        with pytest.raises(ValueError, match="was loaded without its public data"):
            dpspan.encode(layer, TensorDataset(seen, torch.arange(64)))

    def test_other_files_are_refused(self, learnt: PatchFeatures, tmp_path: Path) -> None:
        path = tmp_path / "f.safetensors"
        learnt.save(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match="or a damaged one"):
            PatchFeatures.load(path)
        save_file({"a": torch.zeros(1)}, path)
        with pytest.raises(ValueError, match="holds no PatchFeatures"):
            PatchFeatures.load(path)
        with pytest.raises(FileNotFoundError):
            PatchFeatures.load(tmp_path / "none.safetensors")


class TestEncode:
    @pytest.fixture(autouse=True)
    def several_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(patches, "_ENCODED_AT_ONCE", 10)

    def test_is_what_the_layer_makes_of_each_record(self, learnt: PatchFeatures) -> None:
        private = TensorDataset(images(23, seed=3), torch.arange(23))
        encoded = dpspan.encode(learnt, private, progress=False)
        inputs, labels = encoded.tensors
        assert torch.allclose(inputs, learnt(private.tensors[0]), atol=1e-4)
        assert torch.equal(labels, torch.arange(23))

    def test_a_record_does_not_tell_how_many_others_there_are(self, learnt: PatchFeatures) -> None:
        seen = images(23, seed=3)

        def features(count: int) -> Tensor:
            private = TensorDataset(seen[:count], torch.arange(count))
            inputs: Tensor = dpspan.encode(learnt, private).tensors[0]
            return inputs

        whole = features(23)
        for count in (22, 21, 11):
            assert torch.equal(features(count), whole[:count])  # to the last bit

    @pytest.mark.parametrize("form", ["all", "part", "parts"])
    def test_the_public_images_are_on_record(self, learnt: PatchFeatures, form: str) -> None:
        private = TensorDataset(images(64, seed=5), torch.arange(64) % 2)
        encoded = dpspan.encode(learnt, private, progress=False)
        half = Subset(encoded, range(40))
        forms = {"all": encoded, "part": half, "parts": ConcatDataset([half, encoded])}
        engine = behind(forms[form])
        (record,) = engine.certificate(1e-5)["public"]
        assert (record["sha256"], record["detail"]) == (learnt.public.digest, "PatchFeatures")

    def test_records_that_are_encoded_in_part(self, learnt: PatchFeatures) -> None:
        encoded = dpspan.encode(learnt, TensorDataset(images(20, seed=5), torch.arange(20) % 2))
        plain = TensorDataset(*encoded.tensors)
        with pytest.raises(ValueError, match="Some of the private records are encoded and others"):
            behind(Subset(ConcatDataset([encoded, plain]), range(30)))

    def test_copies_of_public_images_are_refused(self, learnt: PatchFeatures) -> None:
        private = images(20, seed=5)
        private[7] = learnt.public.batches[0][0][3]
        with pytest.raises(ValueError, match="also occur in the private dataset"):
            dpspan.encode(learnt, TensorDataset(private, torch.arange(20)))

    def test_a_methods_public_data_are_told_by_their_images(self, learnt: PatchFeatures) -> None:
        private, public = images(64, seed=5), images(30, seed=6)
        encoded = dpspan.encode(learnt, TensorDataset(private, torch.arange(64) % 2))
        seen = dpspan.encode_public(learnt, dpspan.PublicData.of(public, name="scans"))
        assert torch.allclose(seen.batches[0][0], learnt(public), atol=1e-4)
        engine = behind(encoded, dpspan.GEP(public=seen, rank=3))
        digests = {
            record["name"]: record["sha256"] for record in engine.certificate(1e-5)["public"]
        }
        assert digests["scans"] == dpspan.PublicData.of(public).digest
        public[4] = private[9]
        leaked = dpspan.encode_public(learnt, public)
        with pytest.raises(ValueError, match="1 of the 30 samples"):
            behind(encoded, dpspan.GEP(public=leaked, rank=3))
        with pytest.raises(ValueError, match=r"use dpspan\.encode_public"):
            behind(encoded, dpspan.GEP(public=learnt(public), rank=3))

    def test_labels_go_with_public_data(self, learnt: PatchFeatures) -> None:
        labels = torch.arange(30)
        seen = dpspan.encode_public(learnt, (images(30, seed=6), labels))
        assert torch.equal(seen.batches[0][1], labels)
        assert len(seen.raw) == 30

    def test_copies_are_taken_out_before(self, learnt: PatchFeatures) -> None:
        private = TensorDataset(images(20, seed=5), torch.arange(20))
        with pytest.raises(ValueError, match="before the private data are encoded"):
            dpspan.without_public(dpspan.encode(learnt, private), images(3, seed=6))

    def test_what_cannot_be_encoded(self, learnt: PatchFeatures) -> None:
        with pytest.raises(ValueError, match="pairs of an image and a label"):
            dpspan.encode(learnt, TensorDataset(images(20, seed=5)), progress=False)
        with pytest.raises(TypeError, match="The dataset to encode has no length"):
            dpspan.encode(learnt, iter([]))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="is empty"):
            dpspan.encode(learnt, TensorDataset(images(0, seed=5), torch.arange(0)))


def behind(dataset: Dataset[Any], method: Any = None) -> dpspan.PrivacyEngine:
    """A private run of a linear layer on encoded records."""
    engine, model = dpspan.PrivacyEngine(), nn.Linear(30, 2)
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(dataset, batch_size=16, shuffle=True),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        method=method or dpspan.DPSGD(clip=1.0),
    )
    return engine


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (torch.rand(2, 1, 14, 14), r"\(n, 3, height, width\) of at least 5 × 5"),
        (torch.rand(2, 3, 14, 4), r"at least 5 × 5 pixels, like the public ones"),
        (torch.rand(3, 14, 14), r"got \(3, 14, 14\)"),
    ],
)
def test_images_must_be_like_the_public_ones(
    learnt: PatchFeatures, seen: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        learnt(seen)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float64])
def test_pixels_of_any_type(dtype: torch.dtype) -> None:
    public, seen = ((255 * images(n, seed=n)).round().clamp(0, 255) for n in (40, 6))
    layer = PatchFeatures.learn(public.to(dtype), filters=8, size=4, directions=9)
    assert torch.equal(layer(seen.to(dtype)), layer(seen))


@pytest.mark.parametrize(
    ("public", "options", "message"),
    [
        (torch.rand(20, 30), {}, "images of one shape"),
        (torch.rand(1, 3, 14, 14), {}, "at least two images"),
        (torch.rand(20, 1, 14, 14), {"size": (1, 4)}, "patches of more than one number"),
        (torch.rand(20, 3, 6, 6), {"size": 6}, "two images of 7 × 7 pixels"),
        (torch.zeros(20, 3, 14, 14), {}, "All pixels .* are alike"),
        (images(1, seed=0).expand(20, -1, -1, -1), {}, "All images .* are alike"),
        (images(20, seed=0), {"threshold": 99.0}, "lower the threshold"),
        (torch.rand(20, 3, 14, 14), {"filters": 0}, "filters"),
        (torch.rand(20, 3, 14, 14), {"filters": 1, "size": (3, 4)}, "filters of each size"),
        (torch.rand(20, 3, 14, 14), {"size": ()}, "at least one size"),
        (torch.rand(20, 3, 14, 14), {"grid": []}, "at least one grid"),
        (torch.rand(20, 3, 14, 14), {"views": 0}, "views"),
        (torch.rand(20, 3, 14, 14), {"grid": (2, 0)}, "grid"),
        (torch.rand(20, 3, 9, 9), {"size": 6, "grid": (1, 5)}, "two images of 10 × 10 pixels"),
        (torch.rand(20, 3, 12, 12), {"second": 9}, "two images of 13 × 13 pixels"),
        (torch.rand(20, 3, 14, 14), {"second": -1}, "second to be"),
        (torch.rand(20, 3, 14, 14), {"mirror": 1}, "mirror to be True or False"),
        (torch.rand(20, 3, 14, 14), {"rotation": 181.0}, "0 <= rotation <= 180"),
        (torch.rand(20, 3, 14, 14), {"rotation": True}, "rotation to be a number"),
        (torch.rand(20, 3, 14, 14), {"filters": 10**6}, "at most"),
        (torch.rand(20, 3, 14, 14), {"whitening": 1.5}, "0 <= whitening <= 1"),
        (torch.rand(20, 3, 14, 14), {"power": 0.0}, "0 < power <= 1"),
        (torch.rand(20, 3, 14, 14), {"threshold": -1.0}, "0 <= threshold"),
        (torch.rand(20, 3, 14, 14), {"seed": -1}, "seed to be an integer"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(
    public: Tensor, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PatchFeatures.learn(public, **options)  # type: ignore[arg-type]
