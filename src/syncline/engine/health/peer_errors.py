"""Errors that name the lost rank: turns a failed communication of the engine into a `PeerError`."""

import hashlib
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from syncline._compat.groups import default_store
from syncline.engine.health.heartbeat import MISUSE
from syncline.engine.health.peers import Peers
from syncline.engine.protocols import WatchedEngine
from syncline.errors import PeerError, UsageError

_COMMUNICATION = re.compile(r"gloo|nccl|timed? ?out|connection|peer|socket|broken pipe|aborted", re.I)


def is_communication_error(error: BaseException) -> bool:
    """Whether an error says that a communication failed, so that a lost peer may be the cause."""
    # Some errors of Gloo are plain RuntimeErrors.
    return isinstance(error, dist.DistError | RuntimeError) and bool(_COMMUNICATION.search(f"{type(error)} {error}"))


class PeerMonitor(Peers):
    """The peers of an engine: finds out which rank caused a failure of its communication."""

    def __init__(self, engine: WatchedEngine) -> None:
        groups = engine.groups
        members = hashlib.sha256(",".join(map(str, groups.ranks)).encode()).hexdigest()[:12]
        super().__init__(
            default_store(),
            rank=groups.rank,
            world=groups.world,
            timeout=groups.timeout,
            global_ranks=groups.ranks,
            # Under torchrun the agent serves the store, not rank 0.
            holder=None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
            prefix=f"syncline/peers/{members}",
        )
        self._engine = weakref.ref(engine)  # a heartbeat does not keep the engine
        self.start()

    @property
    def _step(self) -> str:
        engine = self._engine()
        return "after the end" if engine is None else f"step {engine.step}"

    def alarm(self) -> BaseException | None:
        """The error that another rank has reported, if any."""
        return None if self.alarm_text() is None else self._explain(self._step)

    def refuse(self, error: UsageError) -> BaseException:
        """End all ranks with this error of the user. Returns what to raise here: another rank may have been first."""
        self.raise_alarm(str(error), kind=MISUSE)
        return error if self.alarm_text() is None else self._explain(self._step)

    def error_for(self, unit: str, error: BaseException) -> BaseException:
        """The error to raise for one in a worker: a `PeerError` if a peer was lost, anything else unchanged."""
        return self._error_for(f": the exchange of unit '{unit}'" if unit else "", error)

    @contextmanager
    def communicating(self, what: str) -> Iterator[None]:
        """A communication of the training thread; if a peer is lost, the error names it."""
        try:
            yield
        except RuntimeError as error:
            found = self._error_for(f": {what}", error)
            engine = self._engine()
            if engine is not None:
                engine.fail(found)
            if found is error:
                raise
            raise found from error

    def _error_for(self, what: str, error: BaseException) -> BaseException:
        if isinstance(error, PeerError):
            return error
        if is_communication_error(error):
            return self._explain(f"{self._step}{what}", error)
        self.leave(error)
        return error

    def _explain(self, what: str, cause: BaseException | None = None) -> BaseException:
        found = self.diagnosis(cause)
        return UsageError(found.text) if found.kind == MISUSE else self.explain(what, cause)
