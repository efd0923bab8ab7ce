"""What a trace says of its ranks beside their spans: the `otherData` that the analysis reads."""

from collections.abc import Mapping, Sequence
from typing import Any


def together(
    *,
    hosts: Mapping[int, str],
    cores: Mapping[int, int],
    usage: Mapping[int, Sequence[Sequence[int]]],
    recorders: Sequence[Mapping[str, Any]],
    prediction_ms: float | None = None,
) -> dict[str, Any]:
    """The entries of all ranks in one; what is not known is left out.

    hosts: by rank, `clocks.host()`. cores: by rank, what its process may use; a host's are its ranks' most.
    usage: by rank, the rows of `Usage`. recorders: `cost.facts` of each rank; the dearest one stands for all.
    """
    made: dict[str, Any] = {"hosts": {str(rank): hosts[rank] for rank in sorted(hosts)}}
    made["cores"] = {
        host: max(cores[rank] for rank in hosts if hosts[rank] == host and rank in cores)
        for host in dict.fromkeys(hosts[rank] for rank in sorted(hosts) if rank in cores)
    }
    if any(usage.values()):
        made["usage"] = {str(rank): [list(row) for row in usage[rank]] for rank in sorted(usage) if usage[rank]}
    if recorders:
        dearest = max(recorders, key=lambda facts: float(facts["overhead_ns_per_step"]))
        made["recorder"] = {**dearest, "dropped": sum(int(facts["dropped"]) for facts in recorders)}
    if prediction_ms is not None:
        made["prediction_ms"] = prediction_ms
    return made
