"""The command line: one thin subcommand a workflow rule, plus plan, status, query and check-attention.

Every subcommand imports what it needs when it runs, so that ``qkpipe --help`` and the light ones stay quick.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from qkpipe.errors import BadInput

ANALYSES = (
    "contrasts", "dissociation", "probe", "guard", "claims", "threshold", "regime", "signals", "residual", "isolation",
    "generality", "entry", "loci", "sweep", "capping", "entropy", "law", "contest", "survival", "sensitivity",
    "repairs", "horizon", "remedies", "portability",
)  # fmt: skip
"""Modules of :mod:`qkpipe.analysis` with ``build(paths, study)``; they read what ``qkpipe runs`` wrote."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status (2 for :class:`BadInput`, one line on stderr)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser(argv).parse_args(argv)
    args.given = argv
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return args.run(args) or 0
    except BadInput as error:
        print(f"qkpipe: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qkpipe", description="Low-precision attention collapse, and its guard."
    )
    common = argparse.ArgumentParser(add_help=False)
    for owner, default in ((parser, None), (common, argparse.SUPPRESS)):
        owner.add_argument("--config", metavar="DIR", default=default, help="study folder (workflow/config)")
        owner.add_argument("--scale", default=default, help="a scale of study.yaml (its default scale)")
        owner.add_argument(
            "--root", metavar="DIR", default=default, help="folder of results/ and scratch/ (.)"
        )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int | None], text: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, parents=[common], help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    plan = command("plan", _plan, "runs by target, what is missing, and what it will cost")
    plan.add_argument(
        "--flops", type=float, metavar="N", help="sustained FLOP/s of a device, instead of stated or measured"
    )
    _seeds(plan)
    _seeds(command("status", _status, "runs done, running, unfinished and missing"))
    query = command("query", _query, "ask the study's database in SQL")
    query.add_argument("sql", help='for example "select arm, seed, collapse_step from runs"')
    attention = command("check-attention", _check_attention, "check an attention implementation's gradients")
    if "check-attention" in argv:  # its options are its module's, which no other command loads
        importlib.import_module("qkpipe.analysis.check_attention").add_arguments(attention)

    command("effective-config", _effective_config, "write the study as resolved, with every arm's hash")
    for name, run, text in (
        ("tokenizer", _tokenizer, "train a tokenizer on a corpus' training split"),
        ("data", _data, "fetch, verify, tokenize and shard a corpus"),
    ):
        data = command(name, run, text)
        data.add_argument("--dataset", metavar="CORPUS-TOKENIZER", help="names of study.yaml (the scale's)")
    command("warm-up", _warm_up, "compile the CPU kernels into numba's cache")
    train = command("train", _train, "train one run; killed, it goes on from its checkpoint")
    train.add_argument("--arm", required=True)
    train.add_argument("--seed", required=True, type=int)
    train.add_argument(
        "--second", action="store_true", help="train it once more, as the second device's (portability)"
    )
    train.add_argument("--progress", action="store_true", default=None, help="a bar even off a terminal")
    runs = command("runs", _runs, "one row a run, over requested and completed runs")
    runs.add_argument("--target", action="append", default=[], help="whose runs must be there (repeatable)")
    _seeds(runs)
    analyse = command("analyse", _analyse, "build one analysis")
    analyse.add_argument("name", choices=ANALYSES)
    figure = command("figure", _figure, "draw one figure")
    figure.add_argument("name")
    report = command("report", _report, "write the HTML report")
    report.add_argument("--template", type=Path, default=Path("workflow/report/report.html.j2"))
    command("database", _database, "build study.duckdb")
    mirror = command(
        "mirror", _mirror, "mirror finished runs into MLflow (MLFLOW_TRACKING_URI, else mlflow.db)"
    )
    mirror.add_argument("--watch", action="store_true", help="go on, following runs as they train")
    command("sync", _sync, "compare MLflow with the runs point by point, and write what it lacks")
    bench = command("bench", _bench, "time the operators and a training step against their peers")
    bench.add_argument("--arm", default="fp32", help="whose training step (fp32)")
    bench.add_argument(
        "--quick", action="store_true", help="small sizes: whether it works, not how fast it is"
    )
    bench.add_argument(
        "--device-check", metavar="FILE", type=Path, help="also show this result file's kernels"
    )
    device = command("device", _device, "turn a result file of make device-check into tables")
    device.add_argument(
        "--json", metavar="FILE", type=Path, help="the result file (none: no GPU was measured)"
    )
    command("schema", _schema, "write the JSON schemas of the config files")
    return parser


def _seeds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", metavar="N,N,...", type=_seed_list, help="instead of the declared seeds")


def _seed_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _study(args: argparse.Namespace):
    """The study and its paths, from the global options."""
    from qkpipe.config.load import DEFAULT_CONFIG, load_study
    from qkpipe.paths import StudyPaths

    study = load_study(args.config or DEFAULT_CONFIG, args.scale)
    return study, StudyPaths(study.scale, Path(args.root or "."))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _plan(args: argparse.Namespace) -> None:
    from qkpipe.store.progress import plan

    study, paths = _study(args)
    if args.flops is not None and not args.flops > 0:
        raise BadInput(f"--flops: must be above 0, got {args.flops:g}")
    _print(plan(study, paths, args.seeds, args.flops))


def _status(args: argparse.Namespace) -> None:
    from qkpipe.store.progress import status

    study, paths = _study(args)
    _print(status(study, paths, args.seeds))


def _query(args: argparse.Namespace) -> None:
    from qkpipe.store.database import query

    _, paths = _study(args)
    print(query(paths.database, args.sql).to_pandas().to_string(index=False))


def _check_attention(args: argparse.Namespace) -> int | None:
    from qkpipe.analysis.check_attention import run

    return run(args)


def _effective_config(args: argparse.Namespace) -> None:
    from qkpipe.config.effective import write_effective_config

    study, paths = _study(args)
    write_effective_config(study, paths.effective_config)


def _data(args: argparse.Namespace) -> None:
    from qkpipe.data.shards import prepare

    prepare(*_dataset(args))


def _tokenizer(args: argparse.Namespace) -> None:
    from qkpipe.data.shards import train_tokenizer

    train_tokenizer(*_dataset(args))


def _dataset(args: argparse.Namespace):
    """Study, paths, corpus and tokenizer."""
    study, paths = _study(args)
    return study, paths, *study.dataset(args.dataset)


def _warm_up(args: argparse.Namespace) -> None:
    from qkpipe.train.warm_up import warm_up

    warm_up()


def _train(args: argparse.Namespace) -> None:
    study, paths = _study(args)
    run = study.resolve(args.arm, args.seed)  # every mistake in the config is said before torch is imported
    if args.second:
        paths = paths.second(study.portability.device)
    from qkpipe.train.launch import become_torchrun

    become_torchrun(run, args.given)
    from qkpipe.train.run import train_run

    train_run(run, paths, progress=args.progress)


def _runs(args: argparse.Namespace) -> None:
    from qkpipe.analysis.runs import aggregate

    study, paths = _study(args)
    aggregate(paths, study, [run for target in args.target for run in study.requested(target, args.seeds)])


def _analyse(args: argparse.Namespace) -> None:
    study, paths = _study(args)
    importlib.import_module(f"qkpipe.analysis.{args.name}").build(paths, study)


def _figure(args: argparse.Namespace) -> None:
    from qkpipe.report.figures import draw

    _, paths = _study(args)
    draw(args.name, paths)


def _report(args: argparse.Namespace) -> None:
    from qkpipe.report.html import build

    study, paths = _study(args)
    build(paths, study, args.template)


def _database(args: argparse.Namespace) -> None:
    from qkpipe.store.database import build

    _, paths = _study(args)
    build(paths)


def _mirror(args: argparse.Namespace) -> None:
    from qkpipe.store.mlflow_mirror import mirror

    study, paths = _study(args)
    mirror(paths, study, watch=args.watch)


def _sync(args: argparse.Namespace) -> None:
    from qkpipe.store.mlflow_mirror import mirror

    study, paths = _study(args)
    print(f"{mirror(paths, study, verify=True)} runs written")


def _bench(args: argparse.Namespace) -> int:
    study, paths = _study(args)
    run = study.resolve(args.arm, 0)
    from qkpipe.bench.benchmark import build

    rows = build(run, paths, quick=args.quick, device_check=args.device_check)
    return 0 if all(row["gate"] for row in rows) else 1


def _device(args: argparse.Namespace) -> None:
    from qkpipe.bench.device import build

    _, paths = _study(args)
    build(paths, args.json)


def _schema(args: argparse.Namespace) -> None:
    from qkpipe.config.schema import write_schemas

    _print(str(path) for path in write_schemas())


if __name__ == "__main__":
    sys.exit(main())
