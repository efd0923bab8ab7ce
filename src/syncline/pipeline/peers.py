"""`PipelinePeers`: names the lost rank in the error of a pipeline's failed communication, on every rank."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from syncline._compat.groups import default_store
from syncline.engine.health.peer_errors import is_communication_error
from syncline.engine.health.peers import Peers
from syncline.errors import PeerError


class PipelinePeers(Peers):
    """The peers of a pipeline: all ranks of the job."""

    def __init__(self, *, timeout: float) -> None:
        """`timeout`: seconds after which a silent peer is an error."""
        super().__init__(
            default_store(),
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            timeout=timeout,
            # Under torchrun the agent serves the store, not rank 0.
            holder=None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
            prefix="syncline/pipeline",
        )
        self.start()

    @contextmanager
    def communicating(self, what: str) -> Iterator[None]:
        """Communication of this rank; if a peer is lost, the error names it on every rank."""
        self.doing = what
        try:
            yield
        except PeerError:
            raise
        except RuntimeError as error:
            if not is_communication_error(error):
                self.leave(error)
                raise
            raise self.explain(what, error) from error
