"""`python -m syncline.bench.pipeline`: the benchmark where typer is not installed."""

from syncline.bench.pipeline.run import main

raise SystemExit(main())
