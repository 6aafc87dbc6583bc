"""python -m vitkit: `run` executes the notebooks, `writeup` and `compare` tell what they measured, `rotary` is the
published rotary benchmark, `tune` measures `auto`.

What cannot be done is refused in one line on stderr with exit status 2, before anything is started.
"""

import argparse
import sys
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from types import SimpleNamespace

USAGE = """usage: python -m vitkit COMMAND ...

  run      execute the notebooks, then print what was measured and where it lies
  writeup  Markdown for a pull request from what was measured, in the form of several projects
  compare  what changed between two runs or two machines, and what is within the noise
  rotary   the published rotary benchmark: q and k in two launches or in one
  tune     measures on this device which way of building index tensors is the faster one, for impl="auto"
  parallel times the vision encoder shared out over several processes of this machine, by torchrun

python -m vitkit COMMAND --help tells a command's options."""


class Parser(argparse.ArgumentParser):
    """argparse, with its errors on one line."""

    def error(self, message):
        raise SystemExit(refuse(self.prog, message))


def main(argv: list[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not argv or argv[0] not in COMMANDS:
        named = f"no command {argv[0]!r}" if argv else "a command is missing"
        return refuse("vitkit", f"{named}; allowed: {', '.join(COMMANDS)}")
    try:
        return COMMANDS[argv[0]](argv[1:])
    except KeyboardInterrupt:
        print(f"vitkit {argv[0]}: interrupted", file=sys.stderr)
        return 130


def refuse(command: str, message) -> int:
    """Prints one line to stderr and returns the exit status of a refusal."""
    print(f"{command}: {' '.join(str(message).split())}", file=sys.stderr)
    return 2


def run(argv: list[str]) -> int:
    """Executes notebooks, each with every combination of the values given, into runs/<utc>/.

    A value goes to the notebooks that know its name; a name that none knows and a value of another type are refused
    before anything runs. Exit status: 0 all finished, 1 a notebook failed, 2 refused, 130 interrupted.
    """
    parser = Parser(prog="vitkit run", description=getdoc(run), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="notebook", help="its name, number, or a part of it; none: all")
    parser.add_argument(
        "-p", dest="given", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
        help="a value of a notebook's cell tagged parameters, such as: -p device cpu -p size tiny",
    )  # fmt: skip
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="NAME=V1,V2",
        help="run with each of these values; several sweeps: all combinations",
    )  # fmt: skip
    parser.add_argument(
        "--params", default="", metavar="FILE",
        help="YAML: a mapping of names to values, or a list of mappings, each of which is run; -p and --sweep win",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and write nothing")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="UTC",
        help="run what is missing of the batch in runs/<UTC>, or of the newest one that has not finished",
    )  # fmt: skip
    stop = parser.add_mutually_exclusive_group()
    stop.add_argument("--keep-going", action="store_true", help="after a failure run the others (the default)")
    stop.add_argument("--stop", action="store_true", help="after a failure run no other; --resume goes on")
    parser.add_argument(
        "--scheduler", default="", metavar="ADDRESS",
        help="tcp://host:8786, a Dask scheduler: its workers run the notebooks, and all results come here",
    )  # fmt: skip
    args = parser.parse_intermixed_args(argv)
    try:
        from vitkit.lab import batch, results, runner, states

        root, away, earlier = results.repo_root(), bool(args.scheduler), None
        if args.resume is None:
            jobs = batch.make_jobs(args.names, args.given, args.sweep, args.params, root / "notebooks", away=away)
        elif args.names or args.given or args.sweep or args.params:
            return refuse("vitkit run", "--resume takes notebooks and values from the earlier batch: give none here")
        else:
            earlier = states.load(root / "runs", args.resume)
            jobs = batch.missing_jobs(earlier[1], root / "notebooks", away=away)
        batch.check_outputs(jobs, root)
        if args.dry_run or not jobs:
            print(batch.preview(jobs))
            return 0
        return runner.run(jobs, root, stop=args.stop, scheduler=args.scheduler, earlier=earlier)
    except ValueError as error:
        return refuse("vitkit run", error)
    except ModuleNotFoundError as error:
        return refuse("vitkit run", f"{error.name} is not installed; pip install -r requirements.txt")


def rotary(argv: list[str]) -> int:
    """Rotates q and k in two launches (1c) and in one (2c), and prints mean and median of each."""
    parser = Parser(
        prog="vitkit rotary", formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=rotary.__doc__
    )
    parser.add_argument("--batch-size", type=positive, default=2, help="B")
    parser.add_argument("--seq-len", type=positive, default=16384, help="tokens, S")
    parser.add_argument("--num-heads", type=positive, default=16, help="H, of q and of k")
    parser.add_argument("--head-size", type=even, default=80, help="D")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16", help="of q and k")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<n>")
    parser.add_argument(
        "--warmup-iter", type=count, default=argparse.SUPPRESS,
        help="iterations before the timed ones (default: 10 on a GPU, else 2)",
    )  # fmt: skip
    parser.add_argument(
        "--benchmark-iter", type=positive, default=argparse.SUPPRESS,
        help="timed iterations (default: 1000 on a GPU, else 20)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        from vitkit.lab import rotary_bench
        from vitkit.lab.env import resolve_device

        device = resolve_device(args.device)
        warmup, timed = (10, 1000) if device.type == "cuda" else (2, 20)  # the CPU takes seconds an iteration
        defaults = {"warmup_iter": warmup, "benchmark_iter": timed}
        return rotary_bench.run(SimpleNamespace(**{**defaults, **vars(args), "device": device}))
    except ValueError as error:
        return refuse("vitkit rotary", error)
    except ModuleNotFoundError as error:
        return refuse("vitkit rotary", f"{error.name} is not installed; pip install {error.name}")
    except RuntimeError as error:  # torch's way to say that the memory does not suffice
        if "memory" not in str(error):
            raise
        return refuse("vitkit rotary", f"these sizes do not fit: {str(error).splitlines()[0]}")


def tune(argv: list[str]) -> int:
    """Times both ways of each op over a ladder of batches and stores from how many patches on the second is faster.

    On a GPU the ways are numba and triton, on a CPU numba and torch with the given number of threads. What is stored
    counts for this device, driver and versions; impl="auto" follows it from the next process on.
    """
    parser = Parser(prog="vitkit tune", description=tune.__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<n>")
    parser.add_argument("--threads", type=count, default=0, help="torch's threads on a CPU (default: its own number)")
    args = parser.parse_args(argv)
    try:
        from vitkit.lab import tune as tuner
        from vitkit.lab.cases import set_threads
        from vitkit.lab.env import resolve_device

        set_threads(args.threads)
        tuner.run(resolve_device(args.device))
    except (ValueError, OSError) as error:
        return refuse("vitkit tune", error)
    except ModuleNotFoundError as error:
        return refuse("vitkit tune", f"{error.name} is not installed; pip install -r requirements.txt")
    return 0


def parallel(argv: list[str]) -> int:
    """Times a tower shared out over ranks (vitkit.parallel.encode) on this machine: torchrun with what notebook 6 runs.

    Several machines: torchrun --nnodes ... -m vitkit.lab.parallel_bench, as the README shows.
    """
    from vitkit.lab import parallel_command

    return parallel_command.main(argv, Parser, refuse)


def writeup(argv: list[str]) -> int:
    """Markdown for a pull request, made of data/results: speedups, traffic, accuracy, figures, how to repeat it."""
    parser = Parser(prog="vitkit writeup", description=writeup.__doc__)
    parser.add_argument(
        "--style", default="plain", help="plain, vllm, sglang or transformers: whose headings to follow"
    )
    parser.add_argument("--device", default="", help="a folder of data/results (default: that with the newest rows)")
    parser.add_argument(
        "--run", action="append", default=[], metavar="ID",
        help="a run_id of the rows; may be given several times (default: the newest run of every notebook)",
    )  # fmt: skip
    parser.add_argument("--out", default="", metavar="FILE", help="where to write it (default: standard output)")
    parser.add_argument("--root", default="", help="the folder with data/ and figures/ (default: the repository)")
    parser.add_argument("--base", default="", metavar="URL", help="what links begin with (default: relative to FILE)")
    args = parser.parse_args(argv)
    named = {"device": args.device, "run_ids": args.run, "root": args.root, "out": args.out, "base": args.base}
    return _say("writeup", args.out, lambda module: module.write(args.style, **named))


def compare(argv: list[str]) -> int:
    """What changed between two runs or two machines, with the noise of both (from p20 to p80).

    RUN is the run_id of the rows, or a folder of data/results: that device's newest run of every notebook.
    """
    parser = Parser(prog="vitkit compare", description=compare.__doc__)
    parser.add_argument("first", metavar="RUN")
    parser.add_argument("second", metavar="RUN")
    parser.add_argument("--all", action="store_true", help="also the rows that changed within the noise")
    parser.add_argument("--out", default="", metavar="FILE", help="where to write it (default: standard output)")
    parser.add_argument("--root", default="", help="the folder with data/ (default: the repository)")
    args = parser.parse_args(argv)
    return _say("compare", args.out, lambda m: m.write(args.first, args.second, root=args.root, every=args.all))


def _say(command: str, out: str, make) -> int:
    """Prints what `make` gives for the module vitkit.lab.<command>, or writes it to `out`, whole or not at all."""
    try:
        text = make(import_module(f"vitkit.lab.{command}"))
    except (ValueError, OSError) as error:
        return refuse(f"vitkit {command}", error)
    except ModuleNotFoundError as error:
        return refuse(f"vitkit {command}", f"{error.name} is not installed; pip install -r requirements.txt")
    if not out:
        sys.stdout.write(text)
        return 0
    part = Path(f"{out}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(out)
    except OSError as error:
        if part.is_file():
            part.unlink()
        return refuse(f"vitkit {command}", f"--out {out}: cannot write it ({error.strerror}); another place is allowed")
    print(f"wrote {out}")
    return 0


def count(text: str) -> int:
    return _integer(text, least=0)


def positive(text: str) -> int:
    return _integer(text, least=1)


def even(text: str) -> int:
    value = _integer(text, least=2)
    if value % 2:
        raise argparse.ArgumentTypeError(f"{value} is odd: rotary turns pairs, so an even number is allowed")
    return value


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text!r}: an integer of at least {least} is allowed")
    return value


COMMANDS = {
    "run": run,
    "writeup": writeup,
    "compare": compare,
    "rotary": rotary,
    "tune": tune,
    "parallel": parallel,
}
