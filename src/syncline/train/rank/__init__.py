"""One rank of a run: it joins its peers, builds the workload, trains and reports."""
