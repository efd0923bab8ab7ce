"""`python -m syncline.bench.recorder`: the benchmark where typer is not installed."""

from syncline.bench.recorder.run import main

raise SystemExit(main())
