"""The command line as `python -m syncline`."""

from syncline.cli.main import main

if __name__ == "__main__":
    main()
