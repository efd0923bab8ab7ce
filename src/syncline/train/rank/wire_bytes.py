"""Bytes on the wire, read from the kernel's interface counters of this rank's network namespace."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Counters:
    """Bytes that all interfaces but loopback have sent and received."""

    sent: int
    received: int

    def since(self, earlier: "Counters") -> "Counters":
        """What passed between two readings."""
        return Counters(self.sent - earlier.sent, self.received - earlier.received)


def read_counters(path: Path = Path("/proc/self/net/dev")) -> Counters:
    """The counters now. `/proc/self/net` follows the process into its namespace, unlike `/sys/class/net`."""
    sent = received = 0
    for line in path.read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            columns = numbers.split()
            received += int(columns[0])
            sent += int(columns[8])
    return Counters(sent, received)
