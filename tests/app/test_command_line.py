"""The command line as a program: what it imports, how it is called, where its output goes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dpspan as package
from dpspan.app.cli import app
from helpers.digits import settings, write_npz

COMMANDS = (
    "account", "advise", "audit", "choose", "compare", "demo", "init", "report", "train"
)  # fmt: skip
HEAVY = ("torch", "numpy", "scipy", "pydantic", "matplotlib", "sklearn", "dp_accounting", "opacus")
OF_TYPER = {"pydantic"}  # which newer versions of typer check the words of a command with


def started(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dpspan", *arguments],
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


def imported_by(*arguments: str) -> tuple[int, str, set[str]]:
    """Exit code, messages, and which of the heavy packages the command has imported."""
    code = (
        "import sys\n"
        "from dpspan.app.cli import main\n"
        f"sys.argv[1:] = {list(arguments)!r}\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        f"    print('IMPORTED', end.code, *[name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    _, number, *names = ran.stdout.splitlines()[-1].split()
    return int(number), ran.stderr, set(names)


class TestAnAnswerWaitsForNothing:
    """Modules are counted, not seconds: those depend on the machine."""

    @pytest.mark.parametrize("flag", ["--help", "-h", "--version"])
    def test_help_and_version(self, flag: str) -> None:
        code, _, imported = imported_by(flag)
        assert (code, imported) == (0, set())

    @pytest.mark.parametrize("command", COMMANDS)
    def test_help_of_a_command(self, command: str) -> None:
        code, _, imported = imported_by(command, "-h")
        assert (code, imported - OF_TYPER) == (0, set())

    @pytest.mark.parametrize(
        "arguments", [("nonsense",), ("train", "--nonsense"), ("train",), ("account",)]
    )
    def test_wrong_words(self, arguments: tuple[str, ...]) -> None:
        code, _, imported = imported_by(*arguments)
        assert (code, imported - OF_TYPER) == (1, set())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("account", "--delta", "2", "--epochs", "1"), "Expected 0 < --delta < 1"),
            (("account", "--delta", "1e-5", "--epochs", "1"), "Expected --records and"),
            (("audit", "nowhere"), "There is nothing at nowhere"),
            (("report", "nowhere"), "There is nothing at nowhere"),
            (("init", "--data", "nowhere", "--classes", "2"), "There is nothing at nowhere"),
        ],
    )
    def test_values_that_cannot_be_meant(self, arguments: tuple[str, ...], message: str) -> None:
        code, said, imported = imported_by(*arguments)
        assert (code, imported - OF_TYPER) == (1, set())
        assert message in said

    @pytest.mark.parametrize("command", ["train", "choose", "advise", "compare"])
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "Cannot read the configuration"),
            ("data: [1, 2", "This is not YAML"),
            ("dat: {}", "Unknown key (did you mean 'data'?)"),
        ],
    )
    def test_configurations(
        self, tmp_path: Path, command: str, text: str | None, message: str
    ) -> None:
        path = tmp_path / "c.yaml"
        if text is not None:
            path.write_text(text)
        more = ("--out", str(tmp_path / "out")) if command == "compare" else ()
        code, said, imported = imported_by(command, str(path), *more)
        assert code == 1
        assert message in said
        assert imported <= {"pydantic", "numpy"}  # which describe a configuration

    def test_the_engine_needs_no_pictures_and_no_peers(self) -> None:
        code = (
            "import sys, dpspan\n"
            "dpspan.PrivacyEngine()\n"
            f"print(*[name for name in {HEAVY!r} if name in sys.modules])\n"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert set(ran.stdout.split()) == {"torch", "numpy", "scipy", "dp_accounting"}, ran.stderr


class TestHowItIsCalled:
    def test_version(self) -> None:
        ran = started("--version")
        assert (ran.returncode, ran.stdout) == (0, f"dpspan {package.__version__}\n")

    @pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
    def test_short_and_long_help_agree(self, command: tuple[str, ...]) -> None:
        short, long = (CliRunner().invoke(app, [*command, flag]) for flag in ("-h", "--help"))
        assert short.exit_code == long.exit_code == 0
        assert short.stdout == long.stdout
        assert "Usage: " in short.stdout

    @pytest.mark.parametrize(
        ("words", "expected"),
        [("dpspan acc", {"account"}), ("dpspan train --res", {"--resume"})],
    )
    def test_shell_completion(self, words: str, expected: set[str]) -> None:
        ran = started(
            _DPSPAN_COMPLETE="complete_bash",
            COMP_WORDS=words,
            COMP_CWORD=str(len(words.split()) - 1),
        )
        assert expected == set(ran.stdout.split())

    def test_completion_can_be_installed(self) -> None:
        assert "--install-completion" in started("--help").stdout
        ran = started(_DPSPAN_COMPLETE="source_bash")
        assert "_DPSPAN_COMPLETE=complete_bash" in ran.stdout


ACCOUNT = ("account", "--sample-rate", "0.1", "--delta", "1e-5", "--accountant", "rdp")


class TestQuiet:
    def test_notes_off_results_on(self, tmp_path: Path) -> None:
        arguments = [*ACCOUNT, "--epsilon", "1", "--epochs", "2", "--json"]
        loud = CliRunner().invoke(app, arguments)
        hushed = CliRunner().invoke(app, [*arguments, "-q"])
        assert loud.stdout == hushed.stdout != ""

    @pytest.mark.parametrize("where", ["before", "after"])
    def test_training(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
        import yaml

        write_npz(tmp_path)
        path = tmp_path / "c.yaml"
        budget = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}
        path.write_text(yaml.safe_dump(settings(tmp_path, budget=budget)))

        def noisy(*_: object, **more: object) -> object:
            import warnings

            from dpspan.app.run import Progress, Result

            warnings.warn("dpspan: rank is reduced.", stacklevel=1)
            step = {"step": 1, "steps": 1, "epoch": 0, "epochs": 1, "epsilon": 1.0, "metrics": None}
            for epoch in (0, 1):
                more["watch"](Progress(plan="DPSGD", **{**step, "epoch": epoch}))
            done = {"status": "finished", "delta": 1e-5, "evaluation": {}, "plan": "DPSGD"}
            return Result(**step, folder=tmp_path, **done)

        monkeypatch.setattr("dpspan.app.run.train", noisy)
        words = ["-q", "train", str(path)] if where == "before" else ["train", str(path), "--quiet"]
        hushed = CliRunner().invoke(app, words)
        assert hushed.stderr.startswith("Done: ε = 1.0000")
        assert hushed.stderr.count("\n") == 1
        loud = CliRunner().invoke(app, ["train", str(path)])  # nothing is left of -q
        assert "Note: rank is reduced." in loud.stderr
        assert "epoch 1/1" in loud.stderr

    def test_errors_stay(self) -> None:
        hushed = CliRunner().invoke(app, ["train", "nowhere.yaml", "-q"])
        assert hushed.exit_code == 1
        assert "Cannot read the configuration" in hushed.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break otherwise there")
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_reader_that_leaves_is_no_error(more: tuple[str, ...]) -> None:
    """`dpspan … | head`: the first lines are read, the pipe is closed, nobody complains."""
    command = [sys.executable, "-m", "dpspan", *ACCOUNT, "--epsilon", "1", *more]
    command += [word for epochs in range(1, 9) for word in ("--epochs", str(epochs))]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        ran = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert ran.stderr == ""
    assert ran.returncode == 1


def test_a_code_page_without_epsilon() -> None:
    """As that of many terminals, and of pipes on Windows."""
    words = (*ACCOUNT, "--epsilon", "1", "--epochs", "2")
    table = started(*words, PYTHONIOENCODING="cp1252")
    assert (table.returncode, table.stderr) == (0, "")
    assert "noise multiplier" in table.stdout
    ran = started("train", "日本.yaml", "--json", PYTHONIOENCODING="cp1252")
    assert ran.stderr.startswith("Error: Cannot read the configuration ??.yaml")
