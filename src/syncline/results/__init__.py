"""The results file `results.json`: its schema, reading and writing."""
