"""Errors that name the lost rank: turns a failed communication of the engine into a `PeerError`."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from syncline._compat import default_store
from syncline.engine.health.peers import Peers
from syncline.engine.protocols import WatchedEngine
from syncline.errors import PeerError

_COMMUNICATION = re.compile(r"gloo|nccl|timed? ?out|connection|peer|socket|broken pipe|aborted", re.I)


class PeerMonitor:
    """Watches the peers of an engine and finds out which rank caused a failure."""

    def __init__(self, engine: WatchedEngine) -> None:
        groups = engine.groups
        members = hashlib.sha256(",".join(map(str, groups.ranks)).encode()).hexdigest()[:12]
        self._engine, self.timeout = engine, groups.timeout
        self._peers = Peers(
            default_store(),
            rank=groups.rank,
            world=groups.world,
            timeout=groups.timeout,
            global_ranks=groups.ranks,
            # Under torchrun the agent serves the store, not rank 0.
            holder=None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
            prefix=f"syncline/peers/{members}",
        )
        self._peers.start()

    @property
    def doing(self) -> str:
        """What this rank is doing, for the error messages of its peers."""
        return self._peers.doing

    @doing.setter
    def doing(self, text: str) -> None:
        self._peers.doing = text

    def alarm(self) -> PeerError | None:
        """The error that another rank has reported, if any."""
        return None if self._peers.alarm_text() is None else self._peers.explain(f"step {self._engine.step}")

    def error_for(self, unit: str, error: BaseException) -> BaseException:
        """The error to raise for one in a worker: a `PeerError` if a peer was lost, anything else unchanged."""
        return self._error_for(f": the exchange of unit '{unit}'" if unit else "", error)

    def _error_for(self, what: str, error: BaseException) -> BaseException:
        if isinstance(error, PeerError):
            return error
        # Some errors of Gloo are plain RuntimeErrors.
        if isinstance(error, dist.DistError | RuntimeError) and _COMMUNICATION.search(f"{type(error)} {error}"):
            return self._peers.explain(f"step {self._engine.step}{what}", error)
        self._peers.leave(error)
        return error

    @contextmanager
    def communicating(self, what: str) -> Iterator[None]:
        """A communication of the training thread; if a peer is lost, the error names it."""
        try:
            yield
        except RuntimeError as error:
            found = self._error_for(f": {what}", error)
            self._engine.fail(found)
            if found is error:
                raise
            raise found from error

    def leave(self, reason: BaseException) -> None:
        """Tell the other ranks why this one leaves."""
        self._peers.leave(reason)

    def close(self, reason: BaseException | None = None) -> None:
        """Leave, with the reason if there is an error, and stop watching."""
        self._peers.leave(reason)
        self._peers.close()
