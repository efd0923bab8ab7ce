"""The engine's eye on its peers: what to say when an exchange fails, and when to stop waiting for one."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from syncline._compat import default_store
from syncline.engine.health.peers import Peers
from syncline.errors import PeerError

if TYPE_CHECKING:
    from syncline.engine.sync import Sync

_COMMUNICATION = re.compile(r"gloo|nccl|timed? ?out|connection|peer|socket|broken pipe|aborted", re.I)


class Watched:
    """Names the rank that is to blame, if one is."""

    def __init__(self, sync: "Sync") -> None:
        groups = sync.groups
        members = hashlib.sha256(",".join(map(str, groups.ranks)).encode()).hexdigest()[:12]
        self._sync, self.timeout = sync, groups.timeout
        self._peers = Peers(
            default_store(),
            rank=groups.rank,
            world=groups.world,
            timeout=groups.timeout,
            names=groups.ranks,
            # Under torchrun the agent serves the store, not rank 0.
            holder=None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
            prefix=f"syncline/peers/{members}",
        )
        self._peers.start()

    @property
    def doing(self) -> str:
        """What this rank is doing, as its peers will read it."""
        return self._peers.doing

    @doing.setter
    def doing(self, text: str) -> None:
        self._peers.doing = text

    def raised(self) -> PeerError | None:
        """The error that another rank has found, if any."""
        text = self._peers.raised()
        return None if text is None else self._peers.explain(f"step {self._sync.step}")

    def explain(self, unit: str, error: BaseException) -> BaseException:
        """The error to raise for one that a worker met: a peer's loss by its name, anything else as it is."""
        return self._explain(f": the exchange of unit '{unit}'" if unit else "", error)

    def _explain(self, what: str, error: BaseException) -> BaseException:
        if isinstance(error, PeerError):
            return error
        # Gloo's errors are plain RuntimeErrors, some of them.
        if isinstance(error, dist.DistError | RuntimeError) and _COMMUNICATION.search(f"{type(error)} {error}"):
            return self._peers.explain(f"step {self._sync.step}{what}", error)
        self._peers.farewell(error)
        return error

    @contextmanager
    def communicating(self, what: str) -> Iterator[None]:
        """A communication of the training thread: its failure gets a name, too."""
        try:
            yield
        except RuntimeError as error:
            explained = self._explain(f": {what}", error)
            if self._sync.executor is not None:
                self._sync.executor.fail(explained)
            if explained is error:
                raise
            raise explained from error

    def farewell(self, reason: BaseException) -> None:
        """Tell the others why this rank leaves."""
        self._peers.farewell(reason)

    def close(self, reason: BaseException | None = None) -> None:
        """Say farewell, and why if it is for an error."""
        self._peers.farewell(reason)
        self._peers.close()
