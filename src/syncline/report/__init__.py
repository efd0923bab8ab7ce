"""What a comparison found: the results file, its statistics, verdicts, console tables and the HTML page."""
