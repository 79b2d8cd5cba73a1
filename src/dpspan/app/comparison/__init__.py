"""The same budget through several methods and seeds, beside the baselines that cost nothing.

Every run has a folder of its own. A finished one is never repeated: that would be one more release.
One that was interrupted goes on.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from dpspan.accounting.certificate import certificate, write_certificate
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget, warn_of_weaknesses
from dpspan.accounting.releases import beyond, releases_from_json, releases_to_json
from dpspan.app.comparison.results import Comparison, Result, Row, ending, verdicts
from dpspan.app.comparison.search import Search
from dpspan.app.comparison.tuning import RowSearch, note, trainings
from dpspan.app.run.folder import RunFolder, read_json, read_lines
from dpspan.app.run.jobs import Executor, workers
from dpspan.app.run.resumable import Run
from dpspan.app.run.task import PUBLIC_ONLY, Contender, Task, settings_of, with_baselines
from dpspan.support import files
from dpspan.support.checks import check_count, expect
from dpspan.support.processes import refuse_several_processes

__all__ = ["Comparison", "Contender", "Search", "Task", "compare", "verdicts"]

_LINES = 10  # of metrics, about, in a run
_SUMMARY = ("certificate.json", "comparison.json", "comparison.png", "metrics.jsonl")


def compare(
    task: Task,
    contenders: Sequence[Contender],
    *,
    out: str | Path,
    seeds: Sequence[int] = (0, 1, 2),
    jobs: int = 1,
    search: Search | None = None,
    console: Console | None = None,
    executor: Executor | None = None,
) -> Comparison:
    """Run what is missing in the folder `out`, and say what came out.

    Every run is a release of its own. Whoever looks at all of them, if only to keep the best, has
    spent `epsilon_together`. Public data only and a warm start before DP-SGD are added where there
    are public labels.

    Args:
        task: data, model, budget: the same for all.
        contenders: DP-SGD must be one of them.
        out: for `comparison.json`, `certificate.json` (all runs together), `metrics.jsonl` and a
            folder per run. Take another folder for other data: what is there counts as done, and
            what a choice made there has spent (`ledger.json`) is part of the whole. Runs that were
            interrupted go on.
        seeds: of weights and public training; noise is always fresh.
        jobs: runs at a time, in processes of their own with one thread each; the task must then be
            picklable, its model a function of a module.
        search: how to find every contender's learning rate first, around its own. It trains on
            private records and is judged by others of them, which ε does not count: certificates
            say so. All tries are kept.
        console: where the progress bar goes; none without one.
        executor: where they run, if not in processes on this machine: `OnRay()` of
            `dpspan.app.run.on_ray`.
    """
    refuse_several_processes()
    expect(len(set(seeds)) == len(seeds) > 0, "at least 1 seed, none of them twice", seeds)
    check_count("jobs", jobs)
    budget = task.budget
    if not isinstance(budget, Budget):
        raise ValueError("Expected a task with a Budget: what is compared has one price.")
    warn_of_weaknesses(budget.epsilon, budget.delta, task.count, unit=task.protects)
    everyone, out = with_baselines(task, contenders), Path(out).absolute()
    _check_folders(everyone)
    with locked(out):
        where: dict[str, Any] = {"jobs": jobs, "console": console}
        where |= {"executor": executor, "shared": out}
        searched = {} if search is None else _search(task, everyone, out, search, **where)
        everyone = tuple(searched[c.name].found if c.name in searched else c for c in everyone)
        runs = [
            (task, each, seed, RunFolder(folder_of(out, each.name, seed)))
            for each, seed in itertools.product(everyone, seeds)
        ]
        missing = [job for job in runs if not _is_done(*job)]
        if missing:
            remove_summary(out)
        counts: dict[str, Any] = {"total": len(runs), "done": len(runs) - len(missing)}
        where["jobs"] = min(jobs, max(1, len(missing)))
        with workers(title="comparing", **counts, **where) as run_all:
            run_all(train, missing)
        comparison = _collected(task, budget, everyone, seeds, out, searched)
        RunFolder(out).write_json(out / "comparison.json", comparison.to_dict())
    return comparison


def _search(
    task: Task,
    contenders: Sequence[Contender],
    out: Path,
    search: Search,
    **where: Any,
) -> dict[str, RowSearch]:
    """Make the tries that are missing, of one contender as many as of another."""
    expect(search.tries >= 3, "a search of at least 3 tries", search.tries)
    rows = {
        each.name: RowSearch(search=search, task=task, contender=each, row=out / _slug(each.name))
        for each in contenders
        if each.method is not None
    }
    total = len(rows) * (search.tries + search.finalists * search.seeds)
    counts: dict[str, Any] = {"total": total, "done": min(total, trainings(out))}
    with workers(title="searching learning rates", **counts, **where) as run_all:
        while missing := [job for row in rows.values() for job in row.wanted]:
            remove_summary(out)
            run_all(RowSearch.make, missing)
    return rows


def train(task: Task, contender: Contender, seed: int, folder: RunFolder) -> None:
    """One run; one that was interrupted goes on."""
    about: dict[str, Any] = {"task": task, "contender": contender, "seed": seed}
    row = folder.path.parent
    notes = [note(count)] if (count := trainings(row.parent, row.name)) else []
    run = Run(**about, folder=folder, settings=settings_of(**about), lines=_LINES, notes=notes)
    with files.locked(folder.path):  # of its own: it may outlive the process that asked for it
        folder.keep_columns(task.preparation.columns)
        if contender.method is None:
            run.train_on_public()
        else:
            run.start()
            run.go()


def folder_of(out: Path, name: str, seed: int) -> Path:
    return out / _slug(name) / f"seed-{seed}"


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """One process at a time; ValueError, and nothing touched, in the folder of a run."""
    with files.locked(out):
        if RunFolder(out).is_run:
            held = f"{out} holds a run, whose certificate would be replaced"
            raise ValueError(f"{held}. Choose another folder for the comparison.")
        # 0.1 wrote a run into a hidden folder, the certificate first: what was paid for stays.
        for path in out.glob("*/.seed-*/*"):
            if path.name != "certificate.json":
                path.unlink()
        yield


def remove_summary(out: Path) -> None:
    """More is about to be released than the summary of an earlier call tells."""
    for name in _SUMMARY:
        (out / name).unlink(missing_ok=True)


def _is_done(task: Task, contender: Contender, seed: int, folder: RunFolder) -> bool:
    """ValueError if something else was released there."""
    facts = folder.facts
    if facts is None:
        return False
    here = settings_of(task, contender, seed)
    if not folder.finished:
        folder.refuse_lost_ledger()  # or steps that were taken would be forgotten
    if folder.finished or _record(folder)["events"]:
        folder.refuse_other_settings(here, facts["settings"])
    elif facts["settings"] != here:  # nothing was released, so nothing is lost
        with files.locked(folder.path):
            for path in folder.path.glob("[!.]*"):
                path.unlink()
    return folder.finished


def _collected(
    task: Task,
    budget: Budget,
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    out: Path,
    searched: Mapping[str, RowSearch],
) -> Comparison:
    """All runs from their folders, and all that they released as one record."""
    metric, rows, lines = task.metric("accuracy"), [], []
    for contender in contenders:
        results, method = [], contender.method
        for seed in seeds:
            run = RunFolder(folder_of(out, contender.name, seed))
            metrics, facts = read_lines(run.metrics), read_json(run.run)
            lines += [{"run": contender.name, "seed": seed, **line} for line in metrics]
            result = Result(
                seed=seed,
                epsilon=float(read_json(run.certificate)["epsilon"]),
                value=metrics[-1][metric],
                folder=str(run.path.relative_to(out)),
                status=ending(facts),
                diverged=facts["diverged"],
            )
            results.append(result)
        row = Row(
            name=contender.name,
            private=method is not None,
            warm=contender.warm_start is not None,
            method=None if method is None else str(method.describe()["method"]),
            learning_rate=contender.learning_rate,
            results=tuple(results),
            own_model=contender.model is not None,
            tries=searched[contender.name].tries if contender.name in searched else (),
        )
        rows.append(row)
    about = {"kind": "comparison", "method": "a comparison", "runs": len(contenders) * len(seeds)}
    together, searched_by = _together(task.accountant, out), trainings(out)
    if searched_by:
        together.warn(note(searched_by))
        about["search_runs"] = searched_by
    whole = certificate(together, delta=budget.delta, training=about)
    write_certificate(out / "certificate.json", whole)
    (out / "metrics.jsonl").unlink(missing_ok=True)
    RunFolder(out).append(out / "metrics.jsonl", lines)
    return Comparison(
        metric=metric,
        epsilon=budget.epsilon,
        delta=budget.delta,
        epochs=task.epochs,
        batch_size=task.batch_size,
        rows=tuple(rows),
        epsilon_together=float(whole["epsilon"]),
        search_runs=searched_by,
    )


def _together(accountant: str, out: Path) -> Ledger:
    """All that was released in the folder, wanted now or not."""
    together, paid_for = Ledger(accountant=accountant), set[str]()
    if (out / "ledger.json").exists():  # of a choice that was made here, used by a row or not
        chosen = read_json(out / "ledger.json")
        together.load_state_dict(chosen)
        together.budget = None  # of one run, and this is about all
        paid_for.add(_known_as(chosen))
    for path in sorted((*out.glob("*/seed-*"), *out.glob("*/.seed-*"))):
        run = RunFolder(path)
        lost = path.name.startswith(".") or not run.finished
        if lost and not path.name.startswith("."):
            run.refuse_lost_ledger()
            with files.locked(path):  # or a worker that outlived its call will release more
                pass
        facts, record = run.facts or {"settings": {}}, _record(run)
        _add(together, record, facts["settings"].get("paid"), paid_for)
        if lost and record["events"]:
            together.warn(
                f"{path.parent.name}: a run was charged whose model is not here: the process "
                "ended while it was being written"
            )
    return together


def _record(run: RunFolder) -> Mapping[str, Any]:
    """What a run has released: its ledger, or the certificate, which was all that 0.1 left."""
    state: dict[str, Any] = read_json(run.ledger, Ledger().state_dict())
    if run.ledger.exists() or not run.certificate.exists():
        return state
    document = read_json(run.certificate)
    public = [{**record, "digest": record["sha256"]} for record in document["public"]]
    return {**document, "public": public, "invalid": document["not_private_because"]}


def _known_as(paid: Mapping[str, Any]) -> str:
    """The same for two copies of one record, and for no others: each ledger has its mark."""
    return json.dumps([paid["saved_by"], paid["events"]], sort_keys=True)


def _add(
    together: Ledger, spent: Mapping[str, Any], paid: Mapping[str, Any] | None, paid_for: set[str]
) -> None:
    """One run's releases; what runs share, one and the same record, counts once."""
    releases = releases_from_json(spent["events"])
    if paid is not None:
        own = beyond(releases_from_json(paid["events"]), releases)
        if own is not None:  # a run on public data pays for nothing, whatever it was given
            releases = own if _known_as(paid) in paid_for else releases
            paid_for.add(_known_as(paid))
    notes = {key: spent[key] for key in ("unit", "warnings", "invalid", "public") if key in spent}
    steps = sum(count for _, count in releases)
    counted = {"events": releases_to_json(releases), "steps": steps}
    together.load_state_dict({**Ledger().state_dict(), **notes, **counted})


def _slug(name: str) -> str:
    return re.sub(r"[\W_]+", "-", name.lower()).strip("-")


def _check_folders(contenders: Sequence[Contender]) -> None:
    """Two names that differ in punctuation only would share a folder."""
    names = [contender.name for contender in contenders]
    slugs = [_slug(name) for name in names]
    wrong = [name for name in names if not _slug(name) or slugs.count(_slug(name)) > 1]
    if wrong:
        raise ValueError(
            f"Expected names that differ in letters or digits, as each is the name of a folder, "
            f"got {', '.join(map(repr, wrong))}. Rename yours (a configuration: its file); DP-SGD "
            f"and “{PUBLIC_ONLY}” are added by themselves."
        )
