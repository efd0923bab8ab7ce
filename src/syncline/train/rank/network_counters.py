"""Bytes sent and received over the network, from the kernel's interface counters of this rank's network namespace."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NetworkBytes:
    """Bytes sent and received on all interfaces except loopback."""

    sent: int
    received: int

    def per_step_since(self, earlier: "NetworkBytes", *, steps: int) -> "NetworkBytes":
        """The mean bytes of one step between two readings."""
        return NetworkBytes(
            round((self.sent - earlier.sent) / steps), round((self.received - earlier.received) / steps)
        )


def read_counters(path: Path = Path("/proc/self/net/dev")) -> NetworkBytes:
    """The counters now. `/proc/self/net` follows the process into its namespace, unlike `/sys/class/net`."""
    sent = received = 0
    for line in path.read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            columns = numbers.split()
            received += int(columns[0])
            sent += int(columns[8])
    return NetworkBytes(sent, received)
