"""What will not be learnt is said before the first step, on the console and the certificate."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpspan.app.cli.app import four_digits
from dpspan.app.config import parse_config
from dpspan.app.run import prospects, train
from dpspan.app.run.resumable import Progress
from dpspan.engine.engine import PrivacyEngine

HEADER = "a,b,colour,ill\n"


def run(folder: Path, **sections: Any) -> Any:
    rows = (f"{row},{row * 1000},{'rb'[row % 2]},{row % 2}\n" for row in range(100))
    (folder / "a.csv").write_text(HEADER + "".join(rows))
    source = {"format": "csv", "path": str(folder / "a.csv"), "label": "ill"}
    source |= {"inputs": ["a", "b"], "mean": [50, 5e4], "std": [30, 3e4]}
    whole: dict[str, Any] = {
        "data": {"classes": 2, "private": source},
        "model": {"name": "logistic"},
        "method": {"name": "dpsgd", "clip": 1.0},
        "budget": {"noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"},
        "training": {
            "epochs": 1,
            "batch_size": 20,
            "optimizer": {"name": "sgd", "learning_rate": 0.1},
        },
        "output": {"folder": str(folder / "run")},
    }
    private = {**source, **sections.pop("private", {})}
    whole["data"] = {**whole["data"], "private": private, **sections.pop("data", {})}
    for name, changes in sections.items():
        whole[name] = {**whole[name], **changes}
    seen: list[Progress] = []
    train(parse_config(json.dumps(whole)), watch=seen.append)
    return json.loads((folder / "run" / "certificate.json").read_text())["warnings"]


def test_a_run_without_doubts(tmp_path: Path) -> None:
    assert not [each for each in run(tmp_path) if "learnt" in each or "q = 1" in each]


AS_IT_IS = {"mean": 0.0, "std": 1.0}
BOUNDS = {name: {"kind": "numeric", "low": 0, "high": 1e5} for name in ("a", "b")}


@pytest.mark.parametrize(
    ("sections", "doubt"),
    [
        ({"private": AS_IT_IS}, "columns of numbers enter as they are"),
        ({"training": {"batch_size": 100}}, "every step uses all of them (q = 1)"),
        ({"training": {"batch_size": 4000}}, "every step uses all of them (q = 1)"),
        ({"budget": {"noise_multiplier": 500.0}}, "all noise together is longer than"),
        ({"model": {"name": "mlp", "hidden": [4000]}}, "all noise together is longer than"),
    ],
)
def test_doubts(tmp_path: Path, sections: dict[str, Any], doubt: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(doubt)):
        written = run(tmp_path, **sections)
    assert any(doubt in each for each in written)


@pytest.mark.parametrize(
    "sections",
    [
        {"private": AS_IT_IS | {"scale": 1e5}},
        {"private": AS_IT_IS | {"inputs": ["colour"], "categories": {"colour": ["r", "b"]}}},
        {"private": AS_IT_IS | {"inputs": []}, "data": {"preprocessing": BOUNDS}},
        {"method": {"name": "rgp", "rank": 1}, "model": {"name": "mlp", "hidden": [4000]}},
    ],
)
def test_no_doubt_where_there_is_no_reason(tmp_path: Path, sections: dict[str, Any]) -> None:
    assert not [each for each in run(tmp_path, **sections) if "learnt" in each]


@pytest.mark.parametrize(
    ("epsilon", "text"), [(0.0, "0.0000"), (1e-5, "1e-05"), (0.01234567, "0.01235"), (3, "3.0000")]
)
def test_no_price_looks_like_none(epsilon: float, text: str) -> None:
    assert four_digits(epsilon) == text


class TestRehearsed:
    """Public records in the place of the private ones, with the run's own noise."""

    def plan(self, folder: Path, scale: float, **sections: Any) -> Any:
        draw = np.random.default_rng(0)
        for name, count in (("private", 2000), ("public", 400)):
            x = draw.normal(size=(count, 5))
            y = (x[:, 0] + 0.8 > 0).astype(int)  # 79 % are of one class
            np.savez(folder / f"{name}.npz", x=x, y=y)
        part = {"format": "npz", "scale": scale}
        whole: dict[str, Any] = {
            "data": {
                "classes": 2,
                "private": {**part, "path": str(folder / "private.npz")},
                "public": {"optin": {**part, "path": str(folder / "public.npz")}},
            },
            "model": {"name": "logistic"},
            "method": {"name": "dpsgd", "clip": 1.0},
            "budget": {"noise_multiplier": 1.0, "delta": 1e-4, "accountant": "rdp"},
            "training": {
                "epochs": 3,
                "batch_size": 200,
                "optimizer": {"name": "sgd", "learning_rate": 1.0},
            },
            "output": {"folder": str(folder / "run")},
        }
        return parse_config(json.dumps(whole | sections))

    def test_what_learns_nothing_there_is_doubted(self, tmp_path: Path) -> None:
        config = self.plan(tmp_path, scale=1e4)  # inputs of nothing but zeros, nearly
        with pytest.warns(
            UserWarning, match="rehearsed on 300 records of “optin”, with this run's"
        ):
            train(config)
        written = json.loads((tmp_path / "run" / "certificate.json").read_text())
        assert any("the commonest class" in each for each in written["warnings"])

    def test_what_learns_is_not(self, tmp_path: Path) -> None:
        train(self.plan(tmp_path, scale=1.0))

    @pytest.mark.parametrize("method", ["adagrad", "gep"])
    def test_methods_of_every_kind(self, tmp_path: Path, method: str) -> None:
        settings = {"name": method, "clip": 1.0} | (
            {"public": "optin", "rank": 5, "public_samples": 50} if method == "gep" else {}
        )
        with pytest.warns(UserWarning, match="the commonest class"):
            train(self.plan(tmp_path, scale=1e4, method=settings))

    def test_it_leaves_the_run_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Same weights to begin with, nothing more on the ledger, and no private record read."""
        seen: list[Any] = []
        monkeypatch.setattr(prospects, "rehearse", lambda *about: seen.append(about) or 1.0)
        train(self.plan(tmp_path, scale=1.0))
        (task, _, _, noise, rate), *more = seen
        assert not more
        assert len(task.private) == 300
        assert task.unit is None
        assert rate == pytest.approx(0.1)
        assert noise == pytest.approx(1.0 * 30 / 200)  # of as much noise in the mean gradient
        events = json.loads((tmp_path / "run" / "ledger.json").read_text())["events"]
        assert [each["count"] for each in events] == [30]

    def test_its_noise_is_that_of_its_smaller_batches(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen, make_private = list[float](), PrivacyEngine.make_private

        def spy(engine: PrivacyEngine, **settings: Any) -> Any:
            seen.append(settings["noise_multiplier"])
            return make_private(engine, **settings)

        monkeypatch.setattr(PrivacyEngine, "make_private", spy)
        train(self.plan(tmp_path, scale=1.0))
        assert seen == pytest.approx([1.0 * 30 / 200, 1.0])  # the rehearsal, and the run

    def test_batches_of_all_records(self, tmp_path: Path) -> None:
        optimizer = {"name": "sgd", "learning_rate": 1.0}
        training = {"epochs": 3, "batch_size": 4000, "optimizer": optimizer}
        with pytest.warns(UserWarning, match="every step uses all of them"):
            train(self.plan(tmp_path, scale=1.0, training=training))

    def test_too_few_say_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prospects, "rehearse", lambda *_: pytest.fail("was rehearsed"))
        config = self.plan(tmp_path, scale=1.0)
        arrays = np.load(tmp_path / "public.npz")
        np.savez(tmp_path / "public.npz", x=arrays["x"][:60], y=arrays["y"][:60])
        train(config)
