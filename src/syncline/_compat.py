"""Private, untyped or version-dependent torch API, all of it, so that a torch release is one file to read."""

from torch.distributed import FileStore as FileStore  # type: ignore[attr-defined]
from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]
from torch.distributed import PrefixStore as PrefixStore  # type: ignore[attr-defined]
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]
from torch.distributed import rendezvous as rendezvous  # type: ignore[attr-defined]

__all__ = ["FileStore", "GradBucket", "PrefixStore", "Store", "TCPStore", "rendezvous"]
