"""`python -m syncline.bench.codecs`: the benchmark where typer is not installed."""

from syncline.bench.codecs.run import main

raise SystemExit(main())
