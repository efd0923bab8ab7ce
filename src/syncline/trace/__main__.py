"""`python -m syncline.trace run script.py`: run a script, and record its training without a change to it."""

import argparse
import os
import sys
from pathlib import Path

from syncline.trace.record import at_startup
from syncline.trace.record.session import EVERY, FOLDER, PATH


def main() -> None:
    """Replace this process by Python with the script, with the variables that start a recording."""
    parser = argparse.ArgumentParser(
        prog="python -m syncline.trace",
        usage="%(prog)s run [--out PATH] [--every N] SCRIPT [ARGUMENT ...], or -m MODULE in place of SCRIPT",
    )
    parser.add_argument("verb", choices=["run"], help="run a script and record its training")
    parser.add_argument("--out", default=FOLDER, metavar="PATH", help="the trace file or a folder: %(default)s")
    parser.add_argument("--every", type=int, metavar="N", help="record every n-th step; default: as few as cost little")
    own, command = _split(sys.argv[1:])
    given = parser.parse_args(own)
    if given.every is not None and given.every < 1:
        parser.error(f"--every {given.every}: it must be 1 (all steps) or more")
    if not command:
        parser.error("name the script to run")
    folder = str(Path(at_startup.__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    os.environ[PATH] = given.out
    if given.every is not None:
        os.environ[EVERY] = str(given.every)
    asked = sys.orig_argv
    flags = asked[1 : asked.index("-m")] if "-m" in asked else []  # such as the -u of torchrun
    os.execv(sys.executable, [sys.executable, *flags, *command])  # noqa: S606 - the user's own command


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and from the script (or `-m`) on those of Python."""
    at = 1
    while at < len(arguments) and arguments[at].startswith("--"):
        at += 1 if "=" in arguments[at] or arguments[at] == "--help" else 2
    return arguments[:at], arguments[at:]


if __name__ == "__main__":
    main()
