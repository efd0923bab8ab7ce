"""Benchmarks, one room for each: run.py coordinates, rank.py is what ranks do, rows.py and table.py show it."""
