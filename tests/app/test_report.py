"""The report: complete, self-contained, escaped, silent about what is not private; and readable."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting.dp_event import DpEvent, GaussianDpEvent, LaplaceDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from dpspan import DPSGD, GEP, Budget, Ledger, PrivacyEngine, WarmStart
from dpspan.accounting.certificate import certificate, write_certificate
from dpspan.accounting.epsilon import account, pld_epsilon
from dpspan.accounting.events import event_from_json, pure_event, step_event
from dpspan.accounting.ledger import ZERO_OUT
from dpspan.app.comparison import Contender, Task, compare
from dpspan.app.config import ReportSection
from dpspan.app.report import best_guess, detection, render
from dpspan.app.report.reading import Total, read, without_unprivate
from dpspan.app.run import RunFolder
from helpers.blobs import blobs, linear
from helpers.needs import extra, missing

EVIL = "<script>alert('x')</script> & \"co\""
KEYS = st.sampled_from(["a", "unprivate_b", "unprivate_c", "d"])
TREES = st.recursive(
    st.integers(), lambda t: st.lists(t, max_size=3) | st.dictionaries(KEYS, t, max_size=3)
)
PLOTS = ("accuracy", "runs", "training", "gsd", "spectrum", "noise")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real comparison with everything that a report can show."""
    out = tmp_path_factory.mktemp("compared")
    public = blobs(20, 2)
    task = Task(
        model=linear,
        private=TensorDataset(*blobs(200, 0)),
        test=TensorDataset(*blobs(60, 1)),
        batch_size=50,
        epochs=2,
        budget=Budget(epsilon=5.0, delta=1e-5),
        public=public,
        warm_start=WarmStart(data=public, max_epochs=3),
        test_is_public=True,
    )
    gep = GEP(public=public[0], rank=2, clip=1.0, diagnose=1)
    contenders = [
        Contender(name="DP-SGD", method=DPSGD(clip=1.0), learning_rate=0.5),
        Contender(name=EVIL, method=gep, learning_rate=0.5),
    ]
    compare(task, contenders, out=out, seeds=(0, 1))
    rows = [
        {"name": EVIL, "samples": 20, "gsd": 0.2, "captured_energy": 0.9},
        {"name": "noise", "samples": 20, "gsd": 0.9, "captured_energy": 0.1},
    ]
    near = {"stand_in": "some public scans", "rank": 16, "rows": rows}
    (out / "candidates.json").write_text(json.dumps(near))
    asked = {"settings": {"mechanism": "permute-and-flip"}, "candidates": {EVIL: "", "noise": ""}}
    choice = {"chosen": EVIL, "epsilon": 0.1, "note": "Close ones are hard.", "asked": asked}
    (out / "choice.json").write_text(json.dumps(choice))
    return out


@pytest.fixture(scope="module")
def page(compared: Path) -> str:
    return render([compared], compared / "report.html").read_text()


@pytest.fixture
def single(compared: Path, tmp_path: Path) -> Path:
    """One run as `dpspan train` leaves it, with numbers that are not private."""
    folder = tmp_path / "my run"
    shutil.copytree(compared / "dp-sgd" / "seed-0", folder)
    (folder / "run.json").unlink()
    (folder / "config.yaml").write_text(f"model: {EVIL}\n")
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["unprivate_train_loss"] = 0.424242
        line["unprivate_test_accuracy"] = 0.171717
        del line["test_accuracy"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9')
    return folder


class TestPage:
    def test_every_part_is_there(self, page: str) -> None:
        for heading in (
            "What is guaranteed",
            "It does not mean",
            "What was spent on what",
            "Results",
            "Which public data",
            "Declared public",
            "Appendix: details",
            "In training",
            "Settings and versions",
        ):
            assert heading in page
            assert page.index(">What is guaranteed") <= page.index(f">{heading}")
        for name in PLOTS:
            assert f'id="plot-{name}"' in page
        for row in ("public only", "warm start + DP-SGD", "DP-SGD"):
            assert re.search(rf'<th scope="row">{re.escape(row)}( \(best|</th>)', page)
        assert page.count("(best of the private ones)") >= 1  # or more that are level

    def test_every_plot_is_told_in_words(self, compared: Path, page: str) -> None:
        comparison = json.loads((compared / "comparison.json").read_text())
        words = dict(re.findall(r'<p class="hidden" id="words-(\w+)">(.*?)</p>', page))
        assert set(PLOTS) <= set(words)
        assert all(words.values())
        for row in comparison["rows"]:
            assert f"{100 * row['results'][0]['test_accuracy']:.1f} %" in words["runs"]

    def test_what_the_configuration_says_stands_first(self, compared: Path, tmp_path: Path) -> None:
        folder = tmp_path / "copy"
        shutil.copytree(compared, folder)
        said = ReportSection(
            title="Ward 7 <b>", organisation="A hospital", contact="dpo@example.org"
        )
        RunFolder(folder).write_about(said)
        text = render([folder], folder / "report.html").read_text()
        assert "<h1>Ward 7 &lt;b&gt;</h1>" in text
        assert "<dt>Organisation</dt><dd>A hospital</dd>" in text
        assert "<dt>Contact</dt><dd>dpo@example.org</dd>" in text
        assert "<dt>Purpose</dt>" not in text

    def test_nothing_is_loaded_from_anywhere(self, page: str) -> None:
        namespaces = r'xmlns(:xlink)?="http://www\.w3\.org/[^"]*"'
        rest = re.sub(namespaces, "", page)
        assert "http://" not in rest
        assert "https://" not in rest
        assert not re.search(r"<(script|link|img|iframe|object|embed)\b", rest)
        assert not re.search(r"\bsrc=|@import|srcset=", rest)
        assert all(u.startswith("#") for u in re.findall(r"url\(([^)]*)\)", rest))
        assert all(u.startswith("#") for u in re.findall(r'href="([^"]*)"', rest))

    def test_names_are_escaped_everywhere(self, page: str) -> None:
        assert "<script>" not in page
        assert "&lt;script&gt;alert(" in page

    def test_a_name_is_no_formula(self, compared: Path, tmp_path: Path) -> None:
        folder, name = tmp_path / "compared", r"a_$x$ $\foo$"
        shutil.copytree(compared, folder)
        before, after = (json.dumps(each)[1:-1] for each in (EVIL, name))
        for path in folder.rglob("*.json*"):
            path.write_text(path.read_text().replace(before, after))
        assert name in render([folder], tmp_path / "r.html").read_text()

    def test_ids_are_unique(self, page: str) -> None:
        ids = re.findall(r'\bid="([^"]*)"', page)
        assert len(ids) == len(set(ids))
        for target in re.findall(r'(?:href="#|url\(#)([^")]*)', page):
            assert target in ids

    def test_the_numbers_are_those_of_the_files(self, compared: Path, page: str) -> None:
        comparison = json.loads((compared / "comparison.json").read_text())
        for row in comparison["rows"]:
            mean, deviation = row["test_accuracy_mean"], row["test_accuracy_deviation"]
            assert f"{100 * mean:.1f} ± {100 * deviation:.1f}" in page
        assert f"costs up to ε = {comparison['epsilon_together']:.2f}" in page

    def test_what_notes_no_noise_is_named(self, compared: Path, tmp_path: Path) -> None:
        folder = tmp_path / "copy"
        shutil.copytree(compared, folder)
        for path in (folder / "warm-start-dp-sgd").rglob("certificate.json"):
            certificate = json.loads(path.read_text())
            certificate["training"]["method"] = "RGP"  # which has no notes
            path.write_text(json.dumps(certificate))
        text = render([folder], folder / "report.html").read_text()
        assert "There is no bar for warm start + DP-SGD" in text
        assert "There is no bar" not in render([compared], tmp_path / "r.html").read_text()

    def test_several_folders(self, compared: Path, tmp_path: Path) -> None:
        folders = [compared / "dp-sgd", compared / "public-only"]
        text = render(folders, tmp_path / "deep" / "report.html").read_text()
        assert "4 training runs" in text
        spent = [json.loads(p.read_text()) for p in compared.glob("dp-sgd/*/certificate.json")]
        events = [(event_from_json(e["event"]), e["count"]) for c in spent for e in c["events"]]
        assert f"costs up to ε = {pld_epsilon(events, 1e-5):.2f}," in text

    def test_one_run_is_not_told_about_others(self, compared: Path, tmp_path: Path) -> None:
        page = render([compared], tmp_path / "all.html").read_text()
        text = render([compared / "dp-sgd" / "seed-0"], tmp_path / "r.html").read_text()
        for words in ("Means over seeds.", "A dotted line", "Dashed lines", 'id="plot-noise"'):
            assert words in page
            assert words not in text
        assert 'class="legend"' not in text

    def test_public_data_only(self, compared: Path, tmp_path: Path) -> None:
        text = render([compared / "public-only"], tmp_path / "r.html").read_text()
        assert "Nothing: no private record was used." in text


def recorded(folder: Path, *events: tuple[DpEvent, int], **about: Any) -> Path:
    """A folder with the certificate of these events."""
    ledger = Ledger(accountant=about.pop("accountant", "rdp"))
    for event, count in events:
        ledger.charge(event, count)
    training = {"method": about.pop("method", "mine")}
    document = certificate(ledger, **{"delta": 1e-5, "training": training, **about})
    write_certificate(folder / "certificate.json", document)
    return folder


def noted(folder: Path, *events: tuple[DpEvent, int]) -> None:
    """The folder's ledger of these events."""
    ledger = Ledger()
    for event, count in events:
        ledger.charge(event, count)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ledger.json").write_text(json.dumps(ledger.state_dict()))


class TestTotal:
    """Every release once; more where it cannot be known, and never less."""

    STEP, OTHER, CHOICE = step_event(2.0, 0.1), step_event(1.5, 0.1), pure_event(0.5)

    def price(self, *events: tuple[DpEvent, int], delta: float = 1e-5) -> float:
        return account(events, delta, "rdp").epsilon

    def together(self, *folders: Path) -> Total:
        found = read(folders, include_unprivate=False).together
        assert found is not None
        return found

    def test_one_run_is_its_own_total(self, tmp_path: Path) -> None:
        recorded(tmp_path, (self.CHOICE, 1), (self.STEP, 10))
        noted(tmp_path, (self.CHOICE, 1), (self.STEP, 10))
        assert read([tmp_path], include_unprivate=False).together is None

    def test_comparisons_and_runs_below_one_folder(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            for seed in range(2):  # all of them share one choice
                recorded(tmp_path / name / "x" / f"seed-{seed}", (self.CHOICE, 1), (self.STEP, 10))
            recorded(tmp_path / name / "x" / ".seed-2.tmp", (self.STEP, 3))  # was interrupted
            whole = (self.CHOICE, 1), (self.STEP, 23)
            recorded(tmp_path / name, *whole, method="a comparison")
            noted(tmp_path / name, (self.CHOICE, 1))
        recorded(tmp_path / "c", (self.OTHER, 5))
        expected = self.price((self.CHOICE, 2), (self.STEP, 46), (self.OTHER, 5))
        assert self.together(tmp_path).epsilon == pytest.approx(expected, rel=1e-9)
        folders = [tmp_path / name for name in "abc"]
        assert self.together(*folders, folders[0]).epsilon == pytest.approx(expected, rel=1e-9)
        one = json.loads((folders[0] / "certificate.json").read_text())["epsilon"]
        assert self.together(folders[0]).epsilon == one
        text = render([tmp_path], tmp_path / "r.html").read_text()
        assert f"ε = {expected:.3g}</b><span>at most, if all 5 runs are published" in text
        assert "that run together" in text

    def test_what_only_a_ledger_tells_of_counts(self, tmp_path: Path) -> None:
        recorded(tmp_path / "run", (self.STEP, 10))
        noted(tmp_path / "run", (self.CHOICE, 1))  # made later; the certificate does not know
        expected = self.price((self.CHOICE, 1), (self.STEP, 10))
        assert self.together(tmp_path / "run").epsilon == pytest.approx(expected, rel=1e-9)
        text = render([tmp_path / "run"], tmp_path / "r.html").read_text()
        assert f"hold more than the certificate: ε = {expected:.2f} for all of it" in text
        noted(tmp_path / "stopped", (self.OTHER, 3))
        found = self.together(tmp_path)
        expected = self.price((self.CHOICE, 1), (self.STEP, 10), (self.OTHER, 3))
        assert found.epsilon == pytest.approx(expected, rel=1e-9)
        assert found.unfinished == 1

    def test_a_run_that_the_comparison_forgot_counts(self, tmp_path: Path) -> None:
        recorded(tmp_path, (self.STEP, 10), method="a comparison")
        recorded(tmp_path / "x" / "seed-0", (self.OTHER, 30))
        expected = self.price((self.STEP, 10), (self.OTHER, 30))
        assert self.together(tmp_path).epsilon == pytest.approx(expected, rel=1e-9)

    def test_never_less_than_a_part(self, tmp_path: Path) -> None:
        recorded(tmp_path / "a", (self.STEP, 10), delta=1e-9)
        recorded(tmp_path / "b", (self.OTHER, 900), delta=1e-2, accountant="pld")
        found = self.together(tmp_path)
        assert found.delta == 1e-9
        expected = self.price((self.STEP, 10), (self.OTHER, 900), delta=1e-9)
        assert found.epsilon == pytest.approx(expected, rel=1e-9)
        assert "(δ = 1e-09)" in render([tmp_path], tmp_path / "r.html").read_text()

    def test_different_promises_are_not_added_up(self, tmp_path: Path) -> None:
        recorded(tmp_path / "a", (self.STEP, 10))
        recorded(tmp_path / "b", (self.STEP, 10), adjacency="replace one record")
        assert read([tmp_path], include_unprivate=False).together is None
        text = render([tmp_path], tmp_path / "r.html").read_text()
        assert "if all" not in text
        assert "What all runs cost together is not known" in text

    def test_a_record_that_counts_as_zero_is_one_that_was_removed(self, tmp_path: Path) -> None:
        recorded(tmp_path / "a", (self.STEP, 10))
        recorded(tmp_path / "b", (self.OTHER, 30), adjacency=ZERO_OUT.format("record"))
        expected = self.price((self.STEP, 10), (self.OTHER, 30))
        assert self.together(tmp_path).epsilon == pytest.approx(expected, rel=1e-9)

    def test_a_ledger_that_is_none(self, tmp_path: Path) -> None:
        recorded(tmp_path, (self.STEP, 10))
        (tmp_path / "ledger.json").write_text("[]")
        with pytest.raises(ValueError, match=r"Expected the ledger of a run in .*ledger\.json"):
            read([tmp_path], include_unprivate=False)


def test_a_guarantee_that_is_hardly_one(tmp_path: Path) -> None:
    recorded(tmp_path / "a", (step_event(0.2, 0.5), 100), delta=0.05)
    text = render([tmp_path / "a"], tmp_path / "r.html").read_text()
    assert "promises next to nothing" in text
    assert "δ = 0.05 is large" in text
    assert "the chance that the promise does not hold, which should be far smaller" in text
    recorded(tmp_path / "b", (step_event(2.0, 0.1), 10))
    text = render([tmp_path / "b"], tmp_path / "r.html").read_text()
    assert "the chance that the promise does not hold<" in text
    assert "is large" not in text
    assert "next to nothing" not in text


class TestUnprivate:
    def test_an_audit_is_shown_when_asked_for(self, single: Path, tmp_path: Path) -> None:
        (single / "audit.json").write_text('{"unprivate_success_rate": 0.818181}')
        assert "0.818181" not in render([single], tmp_path / "r.html").read_text()
        text = render([single], tmp_path / "r.html", include_unprivate=True).read_text()
        assert "unprivate_success_rate" in text
        assert "0.818181" in text

    def test_left_out(self, single: Path, tmp_path: Path) -> None:
        text = render([single], tmp_path / "r.html").read_text()
        assert "0.424242" not in text
        assert "0.171717" not in text
        assert '<td class="number">17.2</td>' not in text
        assert "unprivate_" not in text
        assert "my run" in text
        assert "model: &lt;script&gt;" in text

    def test_shown_when_asked_for(self, single: Path, tmp_path: Path) -> None:
        text = render([single], tmp_path / "r.html", include_unprivate=True).read_text()
        assert "Not for publication." in text
        assert "0.424242" in text
        assert '<td class="number">17.2</td>' in text

    def test_in_comparisons_too(self, compared: Path, tmp_path: Path) -> None:
        folder = tmp_path / "copy"
        shutil.copytree(compared, folder)
        for path in [*folder.rglob("*.json"), *folder.rglob("metrics.jsonl")]:
            path.write_text(path.read_text().replace('"test_', '"unprivate_test_'))
        text = render([folder], folder / "report.html").read_text()
        assert "No result is shown" in text
        assert text.count("not shown</td>") == 4
        for name in ("accuracy", "runs", "training"):
            assert f"plot-{name}" not in text
        asked = render([folder], folder / "report.html", include_unprivate=True).read_text()
        assert "Not for publication." in asked
        assert asked.count("NOT PRIVATE: measured on test records that nobody declared") == 2
        assert "that were declared public, by models" not in asked

    @settings(deadline=None)
    @given(TREES)
    def test_at_every_depth(self, tree: Any) -> None:
        assert "unprivate_" not in json.dumps(without_unprivate(tree))

    @settings(deadline=None)
    @given(TREES)
    def test_and_nothing_else_is_lost(self, tree: Any) -> None:
        if "unprivate_" not in json.dumps(tree):
            assert without_unprivate(tree) == tree


class TestAlarms:
    def test_a_run_that_is_not_private_says_so_first(self, tmp_path: Path) -> None:
        engine = PrivacyEngine(debug_seed=1)
        model = linear()
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*blobs(200, 0)), batch_size=50),
            noise_multiplier=5.0,
        )
        engine.write_certificate(tmp_path / "run" / "certificate.json", 1e-5)
        text = render([tmp_path / "run"], tmp_path / "r.html").read_text()
        assert "<strong>Not private.</strong> Noise and sampling were drawn from a fixed" in text

    def test_infinite_epsilon(self, single: Path, tmp_path: Path) -> None:
        path = single / "certificate.json"
        certificate = json.loads(path.read_text())
        certificate |= {"epsilon": "infinity", "private": False, "not_private_because": ["no ε"]}
        certificate["events"] = [{"count": 1, "event": {"kind": "NonPrivateDpEvent"}, "text": ""}]
        path.write_text(json.dumps(certificate))
        text = render([single], tmp_path / "r.html").read_text()
        assert "ε = inf" in text
        assert "right at most 100.0&nbsp;% of the time" in text

    @pytest.mark.parametrize(
        ("prepare", "message"),
        [
            (lambda f: None, "is not a folder"),
            (lambda f: f.mkdir(), r"has no certificate\.json .* Is the run finished\?"),
            (lambda f: _write(f, "{"), "is damaged: it is not JSON"),
            (lambda f: _write(f, "{}"), "Expected a certificate of dpspan"),
            (
                lambda f: _write(f, '{"format": "dpspan.certificate", "version": 99}'),
                "Expected a certificate of version 1 .* got 99",
            ),
        ],
    )
    def test_folders_that_are_no_runs(self, tmp_path: Path, prepare: Any, message: str) -> None:
        prepare(tmp_path / "run")
        with pytest.raises(ValueError, match=message):
            render([tmp_path / "run"], tmp_path / "r.html")


def _write(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "certificate.json").write_text(text)


class TestWords:
    @pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 4.0])
    @pytest.mark.parametrize("delta", [0.0, 1e-5, 0.01])
    def test_what_a_guess_and_a_test_can_do(self, epsilon: float, delta: float) -> None:
        # The oracle: every (false, true) alarm rate that (ε, δ) allows, on a grid.
        false = torch.linspace(0, 1, 200_001, dtype=torch.float64)
        true = torch.minimum(
            math.exp(epsilon) * false + delta, 1 - math.exp(-epsilon) * (1 - false - delta)
        ).clamp(max=1)
        accuracy = float(((true + 1 - false) / 2).max())
        assert best_guess(epsilon, delta) == pytest.approx(accuracy, abs=1e-5)
        assert detection(epsilon, delta, 0.01) == pytest.approx(float(true[2000]), abs=1e-9)

    def test_without_a_guarantee(self) -> None:
        assert best_guess(math.inf, 1e-5) == detection(math.inf, 1e-5, 0.01) == 1.0

    def test_events(self, tmp_path: Path) -> None:
        gauss, other = GaussianDpEvent(2.0), LaplaceDpEvent(9.0)
        steps, choice = step_event(2.0, 0.1), pure_event(0.1)
        recorded(tmp_path, (steps, 1200), (gauss, 1), (choice, 1), (other, 2), delta=1e-5)
        page = render([tmp_path], tmp_path / "r.html").read_text()
        noise = "with noise 2 times what one record may add"
        assert f">1,200 training steps, each on a random 0.1 of the records, {noise}</th>" in page
        assert f">One release {noise}</th>" in page
        assert ">One private choice of public data, ε = 0.1</th>" in page
        assert ">2 × LaplaceDpEvent</th>" in page
        assert "in a batch with probability 0.1, by a coin of its own" in page

    def test_reading_keeps_the_order_of_the_comparison(self, compared: Path) -> None:
        groups = list(read([compared], include_unprivate=False).groups)
        assert groups == ["public only", "warm start + DP-SGD", "DP-SGD", EVIL]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = extra("playwright.sync_api")
    found = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    with playwright.sync_playwright() as tool:
        try:
            opened = tool.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error:
            missing("a browser", "install chromium, or run `playwright install chromium`")
        yield opened
        opened.close()


_OVERFLOWS = """() => {
  const bad = [];
  for (const e of document.querySelectorAll('main *')) {
    const box = e.getBoundingClientRect();
    if (!box.width || e.closest('svg, .hidden')) continue;
    if (box.left < -0.5 || box.right > innerWidth + 0.5 || e.scrollWidth > e.clientWidth + 1
        && getComputedStyle(e).display != 'inline') bad.push(e.tagName + ' ' + e.className);
  }
  for (const svg of document.querySelectorAll('figure > svg')) {
    const drawn = svg.getBBox(), all = svg.viewBox.baseVal;
    if (drawn.x < -1 || drawn.y < -1 || drawn.x + drawn.width > all.width + 1
        || drawn.y + drawn.height > all.height + 1) bad.push('svg of ' + svg.parentNode.id);
  }
  return bad;
}"""


class TestInABrowser:
    @pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1200, "light"), (390, "dark")])
    def test_every_plot_is_there_and_nothing_overflows(
        self, browser: Any, compared: Path, page: str, width: int, scheme: str, tmp_path: Path
    ) -> None:
        view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        asked: list[str] = []
        view.on("request", lambda request: asked.append(request.url))
        address = (compared / "report.html").as_uri()
        view.goto(address)
        for name in PLOTS:
            box = view.locator(f"#plot-{name} > svg").bounding_box()
            assert box is not None
            assert box["width"] > 250
            assert box["height"] > 100
            picture = view.locator(f"#plot-{name} > svg").screenshot()
            assert len(set(picture)) > 50  # something is drawn
        view.locator("details").evaluate_all("all => all.forEach(one => one.open = true)")
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        assert view.evaluate(_OVERFLOWS) == []
        assert asked == [address]
        view.screenshot(path=tmp_path / "page.png", full_page=True)
        assert (tmp_path / "page.png").stat().st_size > 20_000
        view.close()

    def test_on_paper(self, browser: Any, compared: Path, page: str, tmp_path: Path) -> None:
        """A page of A4 has no room to scroll and nothing to click: settings stay in their files."""
        view = browser.new_page(viewport={"width": 680, "height": 1000})
        view.goto((compared / "report.html").as_uri())
        view.emulate_media(media="print")
        assert not view.locator("details pre").first.is_visible()
        assert view.evaluate("document.documentElement.scrollWidth") <= 680
        assert view.evaluate(_OVERFLOWS) == []
        left, right = (view.locator(f"#plot-{n}").bounding_box() for n in ("accuracy", "runs"))
        assert left["y"] == right["y"]  # side by side
        view.pdf(path=tmp_path / "page.pdf", format="A4")
        printed = (tmp_path / "page.pdf").read_bytes()
        assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 4
        view.close()

    @pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1400, "light"), (768, "dark")])
    def test_it_can_be_read_by_everybody(
        self, browser: Any, compared: Path, page: str, width: int, scheme: str
    ) -> None:
        axe = extra("axe_playwright_python.sync_playwright").Axe()
        view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        view.goto((compared / "report.html").as_uri())
        found = axe.run(view).response
        assert [each["id"] for each in found["violations"]] == []
        assert len(found["passes"]) > 10  # it has looked
        view.close()
