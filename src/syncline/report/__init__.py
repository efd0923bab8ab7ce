"""The report: verdicts, console tables, and every HTML page (report, traces, benchmarks, sweeps)."""
