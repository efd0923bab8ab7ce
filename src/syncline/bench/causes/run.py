"""`bench causes`: training loops with injected causes of slowness, and whether the first verdict names each cause.

Each case starts ranks that train one loop with the cause and without it, and record both. The verdict on the first
recording is right if it has the cause's kind and names the late ranks; its recoverable time is compared with the
difference between both recordings' usual steps. Nothing is repeated.
"""

import argparse
import json
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from syncline.bench.causes.cases import CAUSES, LOOPS, Case, cases
from syncline.bench.causes.rank import run_rank
from syncline.bench.causes.rows import by_loop, markdown, matrix, row, summary
from syncline.bench.output import environment, write_between, write_json
from syncline.bench.ranks import Progress, places
from syncline.bench.training import Options
from syncline.cluster.capabilities import capabilities
from syncline.cluster.nodes import Cluster
from syncline.cluster.ranks import Place, run_ranks, warm_up
from syncline.errors import RankFailure, UsageError
from syncline.report.figures import text_table
from syncline.trace.analysis.analyze import analyze
from syncline.trace.record.cpu_time import available_cores
from syncline.train.session.machine import busy_share

Rows = list[dict[str, Any]]


def measure(
    chosen: Sequence[Case], *, keep: Path | None = None, progress: Progress = print,
    save: Callable[[Rows], None] = lambda rows: None,
) -> Rows:  # fmt: skip
    """Run the cases one after the other, and judge each; `keep` is a folder for the traces.

    `save` gets the rows so far after each case: a run of many minutes may be interrupted.
    """
    rows: Rows = []
    warm_up()
    with tempfile.TemporaryDirectory(prefix="syncline-") as temporary:
        for case in chosen:
            folder = (keep or Path(temporary)) / f"{case.device}-{case.number}"
            record(case, folder)
            rows.append(judge(folder))
            progress(_line(rows[-1]))
            save(rows)
            if keep is None:
                shutil.rmtree(folder)
    return rows


def record(case: Case, folder: Path) -> None:
    """Run a case; its traces are in the folders `with` and `without`, and the case itself is in `case.json`."""
    if case.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda' is not available here: use --device cpu")
    if folder.exists():
        raise UsageError(f"{folder} exists: give --keep another folder, or judge this one with --judge")
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(case.nodes)) if case.nodes else None

        def switch(_: int, way: str) -> None:
            assert cluster is not None
            cluster.set_bandwidth(case.bandwidth if way == "with" else None)
            (folder / f"{way}.done").touch()

        payload = (case, str(folder / "rendezvous"), str(folder))
        fired = run_ranks(run_rank, _places(case, cluster, stack), payload, logs=folder, on_message=switch)
    late = [counts["with"] for rank, counts in enumerate(fired) if not case.late or rank in case.late]
    if case.where and (not min(late) or any(counts["without"] for counts in fired)):
        raise AssertionError(f"the cause did not act as it should in case {case.number}: {fired}")
    write_json(asdict(case), folder / "case.json")


def judge(folder: Path) -> dict[str, Any]:
    """The row of a recorded case."""
    values = json.loads((folder / "case.json").read_text())
    known = {field.name: values[field.name] for field in fields(Case) if field.name in values}
    case = Case(**known | {"late": tuple(values["late"])})
    return row(case, analyze(folder / "with"), analyze(folder / "without"))


def result_of(rows: Sequence[dict[str, Any]], *, command: str, busy: float) -> dict[str, Any]:
    """The result as it is committed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "environment": environment(device)
        | {"python": platform.python_version(), "platform": platform.platform(), "cores": available_cores()}
        | {"busy_before": round(busy, 3)},
        "command": command,
        "summary": summary(rows),
        "rows": list(rows),
    }


def run(runs: int, *, seed: int, device: str, progress: Progress) -> dict[str, Any]:
    """The whole benchmark: draw cases, run them, and judge each."""
    busy = busy_share(1.0)
    command = f"python -m syncline.bench.causes --device {device} --runs {runs} --seed {seed}"
    return result_of(
        measure(_possible(cases(runs, seed=seed, device=device)), progress=progress), command=command, busy=busy
    )


def console_table(result: dict[str, Any]) -> str:
    """Both tables for a terminal."""
    return "\n\n".join(text_table(*table(result["rows"])) for table in (matrix, by_loop))


def write_page(page: Path, result: dict[str, Any]) -> None:
    """Put the tables between the marks of a page."""
    write_between(page, "causes", markdown(result))


def _places(case: Case, cluster: Cluster | None, stack: ExitStack) -> list[Place]:
    """Ranks on the emulated nodes, as many on each; without nodes, all on this machine."""
    if cluster is None:
        return places(Options(device=case.device, ways=(), ranks=case.ranks), stack)
    found = []
    for rank in range(case.ranks):
        node = cluster.nodes[rank * case.nodes // case.ranks]
        # As torchrun and `syncline cluster` name the node of a process.
        numbers = dict.fromkeys(("GROUP_RANK", "NODE_RANK", "SYNCLINE_NODE"), str(node.index))
        variables = {"GLOO_SOCKET_IFNAME": node.interface, **numbers}
        local = rank % max(1, case.ranks // case.nodes)
        found.append(Place(rank, case.ranks, local, node=node.index, netns=node.netns, environment=variables))
    return found


def _line(one: dict[str, Any]) -> str:
    """A case in a line of progress."""
    steps, verdict = one["step_ms"], f"{one['verdict']['kind']}, {'right' if one['right'] else 'WRONG'}"
    where = f" in {one['where']}" if one["where"] else ""
    return (
        f"{one['number']:3d} {one['cause']}{where}, {one['loop']}, {one['ranks']} ranks: {verdict};"
        f" recoverable {one['recoverable_ms']:.1f} ms, cost {one['cost_ms']:.1f} ms"
        f" ({steps['with']:.1f} - {steps['without']:.1f}){'' if one['close'] else ' NOT CLOSE'}"
        f"{'' if one['right'] else '. ' + one['verdict']['sentence']}"
    )


def _possible(chosen: list[Case]) -> list[Case]:
    """The same cases, if this machine can emulate their nodes."""
    if any(case.nodes for case in chosen):
        able = capabilities()
        if not (able.can_namespaces and able.can_shape):
            raise UsageError(f"slow links and nodes cannot be emulated: {able.why}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m syncline.bench.causes`."""
    parser = argparse.ArgumentParser(prog="python -m syncline.bench.causes", description=__doc__)
    parser.add_argument("--runs", type=int, default=24, help="cases to draw, before --cause and --loop choose of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cause", action="append", choices=list(CAUSES), help="only this cause; may be repeated")
    parser.add_argument("--loop", action="append", choices=LOOPS, help="only this loop; may be repeated")
    parser.add_argument("--keep", type=Path, help="a folder for the traces")
    parser.add_argument("--judge", type=Path, nargs="+", default=[], help="folders of --keep: judge them again as well")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--page", type=Path, help="a page to write the tables into")
    given = parser.parse_args(arguments)
    progress = partial(print, file=sys.stderr, flush=True)
    words = sys.argv[1:] if arguments is None else list(arguments)
    command = shlex.join(["python", "-m", "syncline.bench.causes", *words])
    judged: Rows = []

    def save(rows: Rows) -> None:
        if given.out is not None:
            write_json(result_of([*judged, *rows], command=command, busy=busy), given.out)

    try:
        busy = busy_share(1.0)
        for file in (file for kept in given.judge for file in sorted(kept.glob("*/case.json"))):
            judged.append(judge(file.parent))
            progress(_line(judged[-1]))
        drawn = cases(given.runs, seed=given.seed, device=given.device)
        drawn = [c for c in drawn if c.cause in (given.cause or CAUSES) and c.loop in (given.loop or LOOPS)]
        rows = measure(_possible(drawn), keep=given.keep, progress=progress, save=save) if drawn else []
    except UsageError as error:
        parser.error(str(error))
    except RankFailure as failure:
        print(failure.traceback, failure, sep="\n", file=sys.stderr)
        return 1
    save(rows)
    result = result_of([*judged, *rows], command=command, busy=busy)
    print(console_table(result))
    if given.page is not None:
        write_page(given.page, result)
    return 0
