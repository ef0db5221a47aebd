"""`zerotrain inspect | merge | export`: checkpoints from the command line, without a job and without its ranks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from pydantic import TypeAdapter

from zerotrain.checkpoint import inspection
from zerotrain.checkpoint.export import DTYPES, FORMATS, export
from zerotrain.checkpoint.merge import merge
from zerotrain.checkpoint.reader import Checkpoint, open_source
from zerotrain.checkpoint.source import Source
from zerotrain.config.values import Size
from zerotrain.errors import CheckpointError

_SOURCE = """\
PATH is a folder of checkpoints (--tag chooses one), one checkpoint, or what others write: a Hugging Face folder, a
.safetensors or .bin file, a DeepSpeed ZeRO folder, a torch.distributed.checkpoint folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `zerotrain`; its exit status: 0, 1 where something is wrong with a checkpoint, 2 for wrong usage."""
    args = _parser().parse_args(arguments)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CheckpointError, OSError) as error:
        print(f"zerotrain: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zerotrain", description="Look at checkpoints, put them together, convert them."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    inspect = commands.add_parser(
        "inspect",
        help="what a checkpoint holds, and whether it is intact",
        description="Say what a checkpoint holds. Of a folder of checkpoints without --tag: which there are.",
        epilog=_SOURCE,
    )
    inspect.add_argument("path", metavar="PATH", type=Path, help="what to look at, see below")
    inspect.add_argument("--tag", help="the checkpoint in the folder PATH")
    inspect.add_argument(
        "--verify", action="store_true", help="read everything, name what is damaged, and exit with 1 if anything is"
    )
    inspect.add_argument("--tensors", action="store_true", help="list every tensor: dtype, shape, name, file")
    inspect.set_defaults(run=_inspect)

    merging = commands.add_parser(
        "merge",
        help="make one checkpoint of the folders that nodes wrote",
        description="Put the folders TAG.node-0000x-of-0000y, which nodes write that do not share a file system, together "
        "into the checkpoint OUT/TAG. Every checksum is checked on the way.",
    )
    merging.add_argument(
        "directories", metavar="DIR", type=Path, nargs="+", help="such a folder, or one that holds them; one or more"
    )
    merging.add_argument(
        "--output", metavar="OUT", type=Path, required=True, help="folder of checkpoints to write into"
    )
    merging.add_argument("--tag", help="the checkpoint to merge; default: the one that DIR/latest names")
    merging.set_defaults(run=_merge)

    exporting = commands.add_parser(
        "export",
        help="write the weights for other tools",
        description="Write a checkpoint's weights for other tools: hf, a Hugging Face folder that from_pretrained opens; "
        "torch, a state dict in pytorch_model.bin; dcp, a torch.distributed.checkpoint folder. Takes little memory.",
        epilog=f"{_SOURCE} Without --tag the latest is taken.",
    )
    exporting.add_argument("path", metavar="PATH", type=Path, help="what to export, see below")
    exporting.add_argument("--to", choices=FORMATS, required=True, help="the format to write")
    exporting.add_argument(
        "--output", metavar="OUT", type=Path, required=True, help="folder to make; must not exist, or be empty"
    )
    exporting.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        help="dtype of floating point values, rounded from the fp32 master weights where there are any; default: as stored",
    )
    exporting.add_argument("--tag", help="the checkpoint in the folder PATH")
    exporting.add_argument(
        "--max-shard-size", metavar="SIZE", type=_size, default=5_000_000_000, help="of each file of hf; default: 5GB"
    )
    exporting.set_defaults(run=_export)
    return parser


def _size(text: str) -> int:
    try:
        return TypeAdapter[int](Size).validate_python(int(text) if text.isdecimal() else text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 5GB, 500MB, or a number of bytes") from None


def _inspect(args: argparse.Namespace) -> int:
    if args.tag is None and inspection.tags_of(args.path):
        found = 0
        for line, problems in inspection.listing(args.path, args.verify):
            print("\n".join([line, *(f"  {problem}" for problem in problems)]))
            found += len(problems)
        return int(args.verify and found > 0)
    problems = list(inspection.damage(inspection.checkpoint_folders(args.path, args.tag))) if args.verify else []
    print("".join(f"damaged: {problem}\n" for problem in problems), end="")
    if problems:
        return 1
    with closing(open_source(args.path, args.tag)) as source:
        print("\n".join(inspection.describe(source)))
        if args.tensors:
            print("\n".join(inspection.tensor_lines(source)))
        return _verified(source) if args.verify else 0


def _verified(source: Source) -> int:
    if isinstance(source, Checkpoint):
        print("verified: every checksum is the one written")
        return 0
    problems = list(inspection.unreadable(source))
    print("".join(f"damaged: {problem}\n" for problem in problems), end="")
    if not problems:
        print("verified: every tensor can be read; this format has no checksums")
    return int(bool(problems))


def _merge(args: argparse.Namespace) -> int:
    print(merge(args.directories, args.output, args.tag))
    return 0


def _export(args: argparse.Namespace) -> int:
    dtype = None if args.dtype is None else DTYPES[args.dtype]
    print(export(args.path, args.output, args.to, dtype=dtype, tag=args.tag, max_shard_size=args.max_shard_size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
