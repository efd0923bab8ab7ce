"""`python -m syncline.bench.integrations`: the benchmark where typer is not installed."""

from syncline.bench.integrations.run import main

raise SystemExit(main())
