"""Exchanges: how the requests of codecs are carried between ranks; see docs/exchange.md."""

from syncline.exchange import patterns as patterns
from syncline.exchange.build import Exchange, available, build, check, legal, resolved
from syncline.exchange.definition import EXCHANGES, exchange
from syncline.exchange.emulate import emulate, lockstep
from syncline.exchange.link import Handle, Link, connect
from syncline.exchange.moves import AllGather, AllReduce, Move, Position

__all__ = [
    "EXCHANGES",
    "AllGather",
    "AllReduce",
    "Exchange",
    "Handle",
    "Link",
    "Move",
    "Position",
    "available",
    "build",
    "check",
    "connect",
    "emulate",
    "exchange",
    "legal",
    "lockstep",
    "resolved",
]
