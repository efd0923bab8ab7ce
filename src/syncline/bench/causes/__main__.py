"""`python -m syncline.bench.causes`: the benchmark where typer is not installed."""

from syncline.bench.causes.run import main

raise SystemExit(main())
