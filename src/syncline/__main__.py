"""Entry point of `syncline` and `python -m syncline`; if typer or rich is missing, it says which extra to install."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from syncline.cli.main import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "jinja2", "pyroute2"):
            raise
        sys.exit(_missing(error.name))
    run()


def _missing(package: str) -> int:
    print(f"syncline: the command line needs {package}: pip install 'syncline[cli]'", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
