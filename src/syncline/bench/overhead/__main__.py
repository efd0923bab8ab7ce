"""`python -m syncline.bench.overhead`: the benchmark where typer is not installed."""

from syncline.bench.overhead.run import main

raise SystemExit(main())
