"""The address that clients call."""

import socket

from blockpilot.core.errors import InputError


def bind(host: str, port: int) -> socket.socket:
    """An address that nobody else has; clients are heard when the model is there."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no address of this machine"
        raise InputError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from error
    return found
