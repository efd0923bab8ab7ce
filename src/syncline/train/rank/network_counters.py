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


class StepTraffic:
    """The mean bytes of training steps: what passes while it is not paused."""

    def __init__(self) -> None:
        self._since: NetworkBytes | None = None
        self._begun = False
        self._sent = self._received = self._steps = 0

    def begin(self) -> None:
        """Count from now on."""
        self._begun, self._since = True, read_counters()

    def step(self) -> None:
        """A step has been issued; it ends before the next pause."""
        self._steps += self._since is not None

    def pause(self) -> None:
        """What comes now is no training: checkpoints, evaluation, reshapes. Nothing of a step is in flight."""
        if self._since is not None:
            now = read_counters()
            self._sent += now.sent - self._since.sent
            self._received += now.received - self._since.received
            self._since = None

    def resume(self) -> None:
        """Training goes on."""
        if self._begun and self._since is None:
            self._since = read_counters()

    def mean(self) -> NetworkBytes | None:
        """Bytes per step; None if no step was counted."""
        if not self._steps:
            return None
        return NetworkBytes(round(self._sent / self._steps), round(self._received / self._steps))


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
