"""Endpoints of the coordinator, and the CURVE keys that connections from other machines need."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import zmq

from tltlab.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """The coordinator's key pair (Z85), and every worker's public key by the worker's number."""

    public: bytes
    secret: bytes = field(repr=False)
    workers: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    """One worker's key pair (Z85), and the coordinator's public key."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes


def make_keys(num_workers: int) -> tuple[ServerKeys, tuple[ClientKeys, ...]]:
    """Return new keys for a coordinator and each of its workers; a worker's key authenticates that worker only."""
    public, secret = zmq.curve_keypair()
    pairs = [zmq.curve_keypair() for _ in range(num_workers)]
    clients = tuple(ClientKeys(public=key, secret=hidden, server=public) for key, hidden in pairs)
    return ServerKeys(public=public, secret=secret, workers=tuple(key for key, _ in pairs)), clients


def check_endpoint(endpoint: str, keys: ServerKeys | ClientKeys | None) -> None:
    """Raise ConfigError unless only this machine can reach `endpoint`, or there are keys.

    >>> check_endpoint("tcp://127.0.0.1:5555", None)
    >>> check_endpoint("tcp://*:5555", make_keys(1)[0])
    """
    address = urlsplit(endpoint)
    if address.scheme not in ("ipc", "tcp") or not address.netloc + address.path:
        raise ConfigError(f"the coordinator cannot be at {endpoint}: give ipc://PATH or tcp://HOST:PORT")
    if keys is None and address.scheme == "tcp" and not _is_loopback(address.netloc):
        raise ConfigError(
            f"other machines can reach the coordinator at {endpoint}: give ipc:// or tcp://127.0.0.1, or CURVE keys"
        )


def _is_loopback(netloc: str) -> bool:
    host = netloc.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
