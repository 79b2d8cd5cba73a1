"""Run one experiment, or render docs/results.md from the stored results of all.

    python -m experiments NAME --data FOLDER [--device cuda --tf32 --jobs 4]
    python -m experiments --missing
    python -m experiments --render

An experiment is experiments/NAME.yaml; every finished run is a line of
experiments/results/NAME.jsonl, and what is there is not repeated. Learning rates are searched on
training samples that are held out, with another seed; the search is not paid for in ε.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dpspan.app.section import ConfigError
from experiments import dimension, image_regimes, missing, pate_table, regimes, spectra, tables
from experiments.catalogue import load, names
from experiments.distances import ChoosingExperiment, measure
from experiments.runner import Place, Results, current_commit
from experiments.sweep import sweep

FOLDER = Path(__file__).parent


def run(options: argparse.Namespace, results: Results, place: Place) -> None:
    """Make the runs of one experiment that are missing."""
    name, experiment = options.name, load(options.name)
    if isinstance(experiment, tables.TablesExperiment):
        tables.run(experiment, results, place, options.peer)
    elif isinstance(experiment, dimension.DimensionExperiment):
        dimension.run(experiment, results, place)
    elif isinstance(experiment, spectra.SpectraExperiment):
        spectra.run(experiment, results, place)
    elif isinstance(experiment, regimes.RegimesExperiment):
        regimes.run(experiment, results, place)
    elif isinstance(experiment, pate_table.PateExperiment):
        pate_table.run(experiment, results, place)
    elif isinstance(experiment, image_regimes.ImageRegimesExperiment):
        chosen = options.rows, options.seeds, options.targets
        image_regimes.run(name, experiment, results, place, *chosen)
    else:
        if isinstance(experiment, ChoosingExperiment):
            measure(name, experiment, results, place, options.seeds)
        chosen = options.rows, options.seeds, options.targets
        sweep(name, experiment, results, place, *chosen, searching=not options.no_search)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", choices=names(), metavar="NAME", help=", ".join(names()))
    parser.add_argument("--data", type=Path, help="folder with the data files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tf32", action="store_true", help="faster products on a GPU")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 where autocast allows it")
    parser.add_argument("--physical", type=int, help="most samples in memory at once")
    parser.add_argument("--checkpoints", type=Path, help="folder: runs that are cut short go on")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs: faster, on a GPU")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--rows", nargs="+", help="only rows that begin so")
    parser.add_argument("--targets", nargs="+", type=float, help="only these ε, or σ")
    parser.add_argument("--seeds", type=int, help="instead of the experiment's")
    parser.add_argument("--no-search", action="store_true", help="take the best rates so far")
    parser.add_argument("--peer", help="of tables: a Python that has diffprivlib")
    parser.add_argument("--commit", help="for the record, where there is no repository")
    parser.add_argument("--results", type=Path, default=FOLDER / "results")
    parser.add_argument("--missing", action="store_true", help="say what is not run yet")
    parser.add_argument("--render", action="store_true", help="write docs/results.md")
    options = parser.parse_args()
    if options.missing:
        print(missing.table(options.results, options.name))
        return
    if options.name is None and not options.render:
        parser.error("give an experiment's NAME, --missing or --render")
    if options.name is not None:
        if options.data is None:
            parser.error("--data is the folder with the data files")
        place = Place(
            data=options.data,
            device=options.device,
            tf32=options.tf32,
            bf16=options.bf16,
            physical=options.physical,
            graphs=options.graphs,
            checkpoints=options.checkpoints,
            jobs=options.jobs,
            commit=options.commit or current_commit(),
        )
        if not place.commit:
            parser.error("--commit: results are kept with the commit that made them")
        results = Results(options.results / f"{options.name}.jsonl")
        try:
            run(options, results, place)
        except ConfigError as error:
            sys.exit(str(error))
    if options.render:
        from experiments.pages import render

        print(render(options.results, FOLDER.parent / "docs"))


if __name__ == "__main__":
    main()
