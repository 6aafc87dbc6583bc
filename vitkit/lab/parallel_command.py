"""`python -m vitkit parallel`: a thin shortcut over torchrun for one machine. Imports nothing before its arguments."""

import argparse

SIZES, TOWERS = ("auto", "tiny", "cpu", "gpu"), ("both", "qwen2_5_vl", "qwen2_vl")


def main(argv, parser_class, refuse) -> int:
    """The exit status: of torchrun, or of a refusal (2) before anything has started."""
    parser = parser_class(
        prog="vitkit parallel",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Times a tower shared out over ranks of this machine, by torchrun; several machines: see README.",
    )
    parser.add_argument("--nproc", type=_at_least(1), required=True, metavar="N", help="ranks; on GPUs one a GPU")
    parser.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda"], help="cpu: gloo; cuda: NCCL or RCCL"
    )
    parser.add_argument("--size", default="auto", choices=SIZES, help="how much to measure")
    parser.add_argument("--tower", default="both", choices=TOWERS, help="which tower, with random weights")
    parser.add_argument("--threads", type=_at_least(0), default=0, help="of torch, a rank; 0 divides the cores")
    parser.add_argument("--out", default="", help="a file that rows and counts are appended to, as JSON lines")
    args = parser.parse_args(argv)
    try:
        from . import parallel_launch

        return parallel_launch.run(**vars(args))
    except ValueError as error:
        return refuse("vitkit parallel", error)
    except ModuleNotFoundError as error:
        return refuse("vitkit parallel", f"{error.name} is not installed; pip install -r requirements.txt")


def _at_least(least):
    def parse(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: an integer of at least {least} is allowed")
        return int(text)

    return parse
