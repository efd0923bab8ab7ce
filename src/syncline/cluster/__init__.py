"""Emulated nodes on one Linux machine: network namespaces, shaped links, and commands run inside them."""

from syncline.cluster.nodes import Cluster, Node, enter
from syncline.cluster.privileges import ensure_privileges

__all__ = ["Cluster", "Node", "ensure_privileges", "enter"]
