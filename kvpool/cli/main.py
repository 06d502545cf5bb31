"""Arguments of the command, and where the cache's spec comes from."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvpool.cli import chart, tables
from kvpool.cli.report import Question, report
from kvpool.files import read_object
from kvpool.plan import Plan
from kvpool.presets import preset, preset_names
from kvpool.spec import CacheSpec
from kvpool.status import SpecError
from kvpool.text import parse_bytes, parse_tokens
from kvpool.variants import per_rank, with_dtype

DESCRIPTION = """What the cache of a model costs and how many requests fit.

SOURCE is a model's config.json (or its folder), a stored spec or plan (.json, .toml), or the name
of a preset."""

EXAMPLES = """examples:
  kvpool plan gemma3-27b --budget 64GiB
  kvpool plan path/to/config.json --budget 40GB --rows 32 --lengths 4k,32k --step 4096 --tail-only
  kvpool plan gpt-oss-120b --budget 64GiB --tensor-parallel 4 --compare uniform --chart cache.png
  kvpool presets"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command: 0, or 2 with one line on stderr when what was asked cannot be answered."""
    given = _parser().parse_args(arguments)
    try:
        code = given.run(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read along has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (SpecError, OSError) as error:
        print(f"kvpool: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvpool", description="The cache memory of a model.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    listing = commands.add_parser("presets", help="list the models known by name")
    listing.set_defaults(run=lambda given: print("\n".join(preset_names())) or 0)
    plan = commands.add_parser(
        "plan",
        help="what a model's cache costs, and how many requests fit",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.set_defaults(run=_plan)
    plan.add_argument("source", metavar="SOURCE")
    add = plan.add_argument
    add("--budget", metavar="BYTES", help="for the blocks of one device, e.g. 64GiB")
    add("--rows", type=int, metavar="N", help="live sequences; default what fits at the longest")
    add("--lengths", default="1k,8k,32k,128k", metavar="A,B", help="tokens; default %(default)s")
    add("--step", default="2k", metavar="TOKENS", help="of a prefill step; default %(default)s")
    add("--tail-only", action="store_true", help="steps reserve windows for their last tokens only")
    add("--tensor-parallel", "--tp", type=int, default=1, metavar="N", help="ranks; shows one")
    add("--dtype", help="of attention's entries, e.g. float8_e4m3fn; scales are not added")
    add("--block-size", type=int, metavar="TOKENS", help="default the model's, mostly 16")
    add("--ratio", metavar="A:B", help="the groups' shares of the budget")
    add(
        "--snapshots", type=int, default=0, metavar="N", help="of recurrent state, beside the rows'"
    )
    add("--compare", choices=["uniform"], help="with a cache in which every layer keeps everything")
    add("--json", action="store_true", help="print the figures as JSON, the plan included")
    add("--chart", metavar="PNG", help="draw bytes and requests over length (needs matplotlib)")
    return parser


def _plan(given: argparse.Namespace) -> int:
    spec = _spec(given)
    budget = None if given.budget is None else parse_bytes("--budget", given.budget)
    question = Question(
        name=Path(given.source).name or given.source,
        spec=per_rank(spec, given.tensor_parallel),
        budget_bytes=budget,
        rows=given.rows,
        lengths=tuple(parse_tokens("--lengths", text) for text in given.lengths.split(",")),
        step_tokens=parse_tokens("--step", given.step),
        tail_only=given.tail_only,
        ratio=given.ratio,
        snapshots=given.snapshots,
        ranks=given.tensor_parallel,
        compare=given.compare is not None,
    )
    figures = report(question)
    if given.chart:
        chart.draw(question, given.chart)
    print(json.dumps(figures, indent=1) if given.json else tables.show(question, figures))
    return 0


def _spec(given: argparse.Namespace) -> CacheSpec:
    """The spec that SOURCE means, in the dtype and block size asked for."""
    path = Path(given.source)
    size = given.block_size
    if not path.exists():
        if path.suffix in (".json", ".toml") or os.sep in given.source:
            raise SpecError(f"{given.source}: no such file")
        name = given.source
        if given.dtype == "float8_e4m3fn" and f"{name}-fp8" in preset_names():
            name += "-fp8"  # with the scales of that layout, as its configuration gives it
        return _cast(preset(name, size), given.dtype)
    data = {} if path.is_dir() else read_object(path)
    if "schema_version" not in data:
        return CacheSpec.from_hf_config(path, block_size=size, dtype=given.dtype)
    if size is not None:
        raise SpecError(f"--block-size: {path} is a stored spec, which says its own")
    spec = Plan.from_dict(data).spec if "num_blocks" in data else CacheSpec.from_dict(data)
    return _cast(spec, given.dtype)


def _cast(spec: CacheSpec, dtype: str | None) -> CacheSpec:
    return spec if dtype is None else with_dtype(spec, dtype)
