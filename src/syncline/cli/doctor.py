"""`syncline doctor`: checks of this machine (cores, GPUs, backends, emulated nodes, ports), with fixes."""

import importlib.util
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from syncline.cli.app import new_app
from syncline.cli.output import print_json

app = new_app()

_TORCHRUN_PORT = 29500
_LISTENING = "0A"
_SYMBOLS = {"ok": "[green]ok[/]", "missing": "[yellow]missing[/]", "info": "[dim]info[/]"}


@dataclass(frozen=True)
class Finding:
    """One line of the table. `state` is ok, missing or info; `fix` says what to do when something is missing."""

    name: str
    state: str
    found: str
    fix: str = ""


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Show what this machine can do (cores, GPUs, backends, emulated nodes, link shaping, ports), and what it lacks."""
    findings = [*_machine(), *_torch(), *_cluster(), *_ports(), *_extras()]
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("what", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.name, _SYMBOLS[finding.state], finding.found, finding.fix)
    Console().print(table)


def _machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    few = "more ranks than cores share them: compare strategies, not absolute times" if cores < 4 else ""
    return [
        Finding("cores", "ok", f"{cores}", few),
        Finding("memory", "ok", f"{memory:.0f} GiB"),
        Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}"),
    ]


def _check(name: str, found: object, *, missing: str, fix: str) -> Finding:
    """A finding that is ok if something was found."""
    return Finding(name, "ok", str(found)) if found else Finding(name, "missing", missing, fix)


def _torch() -> list[Finding]:
    import torch
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    findings = [
        Finding("torch", "ok", torch.__version__),
        Finding("backends", "ok", ", ".join(backends)),
        _check("GPU", ", ".join(gpus), missing="none that torch can use", fix="training runs on the CPU with Gloo"),
    ]
    if gpus:
        daemon = "nvidia-cuda-mps-control"
        fix = "ranks take turns on a shared GPU"
        findings.append(_check("CUDA MPS", shutil.which(daemon), missing=f"no {daemon}", fix=fix))
    return findings


def _cluster() -> list[Finding]:
    from syncline.cluster.capabilities import capabilities

    able = capabilities()
    how = {"root": "as root", "userns": "through a user namespace"}.get(able.how)
    shaping, netem = able.can_shape and "tbf (--bandwidth)", able.netem and "netem"
    return [
        _check("emulated nodes", how, missing="not possible", fix=f"{able.why}; compare runs local ranks"),
        _check("link shaping", shaping, missing="no tbf in this kernel", fix="load sch_tbf, or leave --bandwidth out"),
        _check("latency and loss", netem, missing="no netem in this kernel", fix="load sch_netem, or leave them out"),
    ]


def _ports() -> list[Finding]:
    listening = sorted(_listening())
    exposed = sorted({port for port, local in listening if not local})
    shown = ", ".join(map(str, exposed[:12])) + (" ..." if len(exposed) > 12 else "")
    free = "" if any(port == _TORCHRUN_PORT for port, _ in listening) else "free"
    return [
        Finding("listening beyond loopback", "info", shown or "none", "Syncline's own ranks open no such port"),
        _check("torchrun's port 29500", free, missing="in use", fix="name another: torchrun --master-port PORT"),
    ]


def _listening() -> set[tuple[int, bool]]:
    """Pairs (port, whether it listens on loopback only) for every TCP socket of this network namespace."""
    found = set()
    for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == _LISTENING:
                address, port = local.rsplit(":", 1)
                loopback = address.endswith("7F") if len(address) == 8 else address == "0" * 24 + "01000000"
                found.add((int(port, 16), loopback))
    return found


def _extras() -> list[Finding]:
    from syncline.train.data.fashion_mnist import DEBIAN

    needed = {"rich": "tables", "jinja2": "report.html", "pyroute2": "emulated nodes"}
    findings = [
        _check(name, importlib.util.find_spec(name) and what, missing=what, fix=f"pip install {name}")
        for name, what in needed.items()
    ]
    data, fix = DEBIAN.exists() and DEBIAN, "apt install dataset-fashion-mnist, or root=DIR"
    return [*findings, _check("Fashion-MNIST", data, missing="not installed", fix=fix)]
