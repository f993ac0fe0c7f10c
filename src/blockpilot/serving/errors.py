"""What went wrong with a call, in the protocol's own form."""

import re
from typing import Any

from blockpilot.core.errors import InputError

_FIELD = re.compile(r"[a-z_]+(?:\[\d+\]|\.[a-z_]+)*")


class ApiError(Exception):
    """An answer with a status of its own; `param` names the field that is to blame."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers: dict[str, str] = {}

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def from_input_error(error: InputError) -> ApiError:
    return from_input_error_text(str(error))


def from_input_error_text(message: str) -> ApiError:
    """Our errors begin with the name of the field where one is to blame."""
    found = _FIELD.match(message)
    param = found[0] if found and "_" in found[0] + "_" and message[found.end() : found.end() + 5] == " must" else None
    return bad_request(message, param)
