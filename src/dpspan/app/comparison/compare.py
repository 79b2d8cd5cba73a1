"""`compare`: every contender with every seed, each run in a folder of its own.

A folder appears when its run is over, whole or not at all: `certificate.json`, `metrics.jsonl`,
`run.json` (settings), `model.safetensors`, and `diagnostics.jsonl` if the method noted something.
Nothing of a run is written or shown before it is over, so an interruption until then costs nothing,
and the next call runs it anew with fresh noise (see `folder` for one that comes later). A finished
run is never repeated: that would be one more release.
"""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from safetensors.torch import save_file

from dpspan.accounting.certificate import certificate, write_certificate
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import warn_of_weaknesses
from dpspan.accounting.releases import beyond, releases_from_json
from dpspan.app.comparison.folder import left_behind, locked, new_folder, take_summary_away
from dpspan.app.comparison.results import Comparison, Result, Row
from dpspan.app.comparison.task import PUBLIC_ONLY, Contender, Task, with_baselines
from dpspan.app.comparison.training import Outcome, metric_name, train
from dpspan.app.run.folder import read_json
from dpspan.support.checks import check_count, expect
from dpspan.support.processes import refuse_several_processes

Job = tuple[Contender, int]


def compare(
    task: Task,
    contenders: Sequence[Contender],
    *,
    out: str | Path,
    seeds: Sequence[int] = (0, 1, 2),
    jobs: int = 1,
    console: Console | None = None,
) -> Comparison:
    """Run what is missing in the folder `out`, and say what came out.

    Every run is a release of its own. Whoever looks at all of them, if only to keep the best, has
    spent `epsilon_together`.

    Public data only and a warm start before DP-SGD are added where there are public labels.

    Args:
        task: data, model, budget: the same for all.
        contenders: DP-SGD must be one of them.
        out: for `comparison.json`, `certificate.json` (all runs together), `metrics.jsonl` and a
            folder per run. Take another folder for other data: what is there counts as done, and
            what a choice made there has spent (`ledger.json`) is part of the whole.
        seeds: of weights and public training; noise is always fresh.
        jobs: runs at a time, in processes of their own with one thread each; the task must then be
            picklable, its model a function of a module.
        console: where the progress bar goes; none without one.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> import dpspan
        >>> x, y = torch.randn(300, 4), torch.arange(300) % 2
        >>> task = dpspan.Task(
        ...     model=lambda: nn.Linear(4, 2),
        ...     private=TensorDataset(x[:200], y[:200]),
        ...     test=TensorDataset(x[200:], y[200:]),
        ...     batch_size=50,
        ...     epochs=2,
        ...     budget=dpspan.Budget(epsilon=3.0, delta=1e-4),
        ... )
        >>> method = dpspan.DPSGD(clip=1.0)
        >>> contenders = [dpspan.Contender(name="DP-SGD", method=method, learning_rate=0.5)]
        >>> comparison = dpspan.compare(task, contenders, out="comparison", seeds=(0,))
        >>> [row.name for row in comparison.rows]
        ['DP-SGD']
    """
    refuse_several_processes()
    expect(len(set(seeds)) == len(seeds) > 0, "at least 1 seed, none of them twice", seeds)
    check_count("jobs", jobs)
    warn_of_weaknesses(task.budget.epsilon, task.budget.delta, task.count)
    everyone, out = with_baselines(task, contenders), Path(out)
    _check_folders(everyone)
    with locked(out):
        _run_missing(task, everyone, seeds, out, jobs, console)
        comparison = _collected(task, everyone, seeds, out)
        (out / "comparison.json").write_text(comparison.to_json() + "\n", encoding="utf-8")
    return comparison


def folder_of(out: Path, name: str, seed: int) -> Path:
    """Where a run is kept."""
    return out / _slug(name) / f"seed-{seed}"


# -- running ------------------------------------------------------------------------------------


def _run_missing(
    task: Task,
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    out: Path,
    jobs: int,
    console: Console | None,
) -> None:
    wanted = [(contender, seed) for contender in contenders for seed in seeds]
    missing = [job for job in wanted if not _is_done(task, job, out)]
    if missing:
        take_summary_away(out)
    with _progress(console) as progress:
        bar = progress.add_task(
            "comparing", total=len(wanted), completed=len(wanted) - len(missing)
        )

        def keep(job: Job, outcome: Outcome) -> None:
            _write(task, job, outcome, out)
            progress.update(bar, advance=1, description=f"{job[0].name}, seed {job[1]}")

        _run_all(task, missing, keep, min(jobs, max(1, len(missing))))


def _run_all(
    task: Task, jobs: Sequence[Job], keep: Callable[[Job, Outcome], None], processes: int
) -> None:
    if processes == 1:
        for job in jobs:
            keep(job, train(task, *job))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        waiting: dict[Future[Outcome], Job] = {pool.submit(train, task, *job): job for job in jobs}
        try:
            for done in as_completed(waiting):
                keep(waiting[done], done.result())
        except BaseException:
            pool.shutdown(cancel_futures=True, wait=False)
            raise


@contextmanager
def _progress(console: Console | None) -> Iterator[Progress]:
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("runs"), TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    where = console or Console(quiet=True)  # a disabled bar may still end its line
    with Progress(*columns, console=where, disable=where.quiet) as progress:
        yield progress


# -- folders ------------------------------------------------------------------------------------


def _settings(task: Task, job: Job) -> dict[str, Any]:
    """What makes two runs the same, as it looks after a way through JSON; public things only."""
    contender, seed = job
    plain: dict[str, Any] = json.loads(
        json.dumps(
            {
                **contender.describe(),
                "seed": seed,
                "epsilon": task.budget.epsilon,
                "delta": task.budget.delta,
                "epochs": task.epochs,
                "batch_size": task.batch_size,
                "records": task.records,
                "accountant": task.accountant,
                "criterion": str(task.criterion),
                "metric": metric_name(task, "accuracy"),
                "about": task.about,
            }
        )
    )
    return plain


def _is_done(task: Task, job: Job, out: Path) -> bool:
    path = folder_of(out, job[0].name, job[1]) / "run.json"
    if not path.exists():
        return False
    there, here = json.loads(path.read_text(encoding="utf-8"))["settings"], _settings(task, job)
    different = [key for key in here if there.get(key) != here[key]]
    if different:
        key = different[0]
        raise ValueError(
            f"{path.parent} holds a run with other settings ({key} is {there.get(key)!r} there, "
            f"{here[key]!r} here). Choose another folder: what was released stays released."
        )
    return True


def _write(task: Task, job: Job, outcome: Outcome, out: Path) -> None:
    """The folder of a run, at once."""
    contender, seed = job
    with new_folder(folder_of(out, contender.name, seed), outcome.certificate) as folder:
        run = {"settings": _settings(task, job), "diverged": outcome.diverged}
        _dump(folder / "run.json", run)
        _dump_lines(folder / "metrics.jsonl", outcome.metrics)
        if outcome.diagnostics:
            _dump_lines(folder / "diagnostics.jsonl", outcome.diagnostics)
        weights = {name: weight.contiguous() for name, weight in outcome.weights.items()}
        save_file(weights, folder / "model.safetensors")


def _dump(path: Path, content: Any) -> None:
    path.write_text(
        json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )


def _dump_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(x, ensure_ascii=False, allow_nan=False) + "\n" for x in lines)
    path.write_text(text, encoding="utf-8")


def _collected(
    task: Task, contenders: Sequence[Contender], seeds: Sequence[int], out: Path
) -> Comparison:
    """All runs from their folders, and all that they released as one record."""
    metric, rows, lines = metric_name(task, "accuracy"), [], []
    together = Ledger(accountant=task.accountant)
    paid_for: set[str] = set()
    if (out / "ledger.json").exists():  # of a choice that was made here, used by a row or not
        chosen = read_json(out / "ledger.json")
        together.load_state_dict(chosen)
        together.budget = None  # of one run, and this is about all
        paid_for.add(_known_as(chosen))
    counted: set[Path] = set()
    for contender in contenders:
        results = []
        for seed in seeds:
            folder = folder_of(out, contender.name, seed)
            metrics = [json.loads(line) for line in _lines(folder / "metrics.jsonl")]
            run, spent = read_json(folder / "run.json"), read_json(folder / "certificate.json")
            _add(together, spent, run["settings"]["paid"], paid_for)
            counted.add(folder)
            lines += [{"run": contender.name, "seed": seed, **line} for line in metrics]
            results.append(
                Result(
                    seed=seed,
                    epsilon=float(spent["epsilon"]),
                    value=metrics[-1][metric],
                    folder=str(folder.relative_to(out)),
                    diverged=run["diverged"],
                )
            )
        method = contender.method
        rows.append(
            Row(
                name=contender.name,
                private=method is not None,
                warm=contender.warm_start is not None,
                method=None if method is None else str(method.describe()["method"]),
                learning_rate=contender.learning_rate,
                results=tuple(results),
            )
        )
    # Runs that an earlier call left here were released too, wanted now or not.
    for path in sorted(out.glob("*/seed-*/certificate.json")):
        if path.parent not in counted:
            about = path.parent / "run.json"  # somebody else's folder has none
            paid = read_json(about)["settings"]["paid"] if about.exists() else None
            _add(together, read_json(path), paid, paid_for)
    for path in left_behind(out):
        _add(together, read_json(path), None, paid_for)
        together.warn(
            f"{path.parent.parent.name}: a run was charged whose model is not here: the process "
            "ended while it was being written"
        )
    whole = certificate(
        together,
        delta=task.budget.delta,
        training={"method": "a comparison", "runs": len(contenders) * len(seeds)},
    )
    write_certificate(out / "certificate.json", whole)
    _dump_lines(out / "metrics.jsonl", lines)
    return Comparison(
        metric=metric,
        epsilon=task.budget.epsilon,
        delta=task.budget.delta,
        epochs=task.epochs,
        batch_size=task.batch_size,
        rows=tuple(rows),
        epsilon_together=float(whole["epsilon"]),
    )


def _known_as(paid: Mapping[str, Any]) -> str:
    """The same for two copies of one record, and for no others: each ledger has its mark."""
    return json.dumps([paid["saved_by"], paid["events"]], sort_keys=True)


def _add(
    together: Ledger, spent: dict[str, Any], paid: Mapping[str, Any] | None, paid_for: set[str]
) -> None:
    """One run's releases; what runs share, one and the same record, counts once."""
    releases = releases_from_json(spent["events"])
    if paid is not None:
        own = beyond(releases_from_json(paid["events"]), releases)
        if own is not None:  # a run on public data pays for nothing, whatever it was given
            releases = own if _known_as(paid) in paid_for else releases
            paid_for.add(_known_as(paid))
    for event, count in releases:
        together.charge(event, count)
    for record in spent["public"]:
        together.declare_public(
            record["name"], record["sha256"], record["count"], detail=record["detail"]
        )
    for warning in spent["warnings"]:
        together.warn(warning)
    for reason in spent["not_private_because"]:
        together.invalidate(reason)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _slug(name: str) -> str:
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")


def _check_folders(contenders: Sequence[Contender]) -> None:
    """Two names that differ in punctuation only would share a folder."""
    slugs = [_slug(contender.name) for contender in contenders]
    wrong = [
        contender.name
        for contender, slug in zip(contenders, slugs, strict=True)
        if not slug or slugs.count(slug) > 1
    ]
    if wrong:
        raise ValueError(
            f"Expected names that differ in letters or digits, as each is the name of a folder, "
            f"got {', '.join(map(repr, wrong))}. Rename yours (a configuration: its file); DP-SGD "
            f"and “{PUBLIC_ONLY}” are added by themselves."
        )
