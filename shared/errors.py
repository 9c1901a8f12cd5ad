"""One tree of errors. Whatever comes from outside and is wrong raises one of these; each message says what to do.

`http_status`, `error_type` and `code` decide how the router shows an error to a client (OpenAI error object).
"""

from __future__ import annotations


class PagewireError(Exception):
    """Root of the tree. `param` names the request field at fault; `retry_after_s` is a truthful hint when waiting helps."""

    http_status = 500
    error_type = "internal_error"
    code: str | None = None
    """In the error object; None: the HTTP status stands there."""
    exit_code = 1

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


def reason_of(error: Exception) -> str:
    """For peers and clients. Of an error that is not ours its kind alone: what it says may be a page, or name files and addresses; it is
    in the log of whoever caught it."""
    return error.message if isinstance(error, PagewireError) else type(error).__name__


class InvalidRequestError(PagewireError):
    """The client sent something we cannot serve; sending it again unchanged cannot help."""

    http_status = 400
    error_type = "invalid_request_error"


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served here."""

    http_status = 404
    error_type = "not_found_error"


class ResponseNotFoundError(InvalidRequestError):
    """An earlier response is asked for; none is stored."""

    http_status = 404
    error_type = "not_found_error"


class AuthenticationError(PagewireError):
    """The request came without an API key, or with one that is not accepted here."""

    http_status = 401
    error_type = "invalid_request_error"
    code = "invalid_api_key"


class OverloadedError(PagewireError):
    """A bounded queue is full; the client should come back after `retry_after_s`."""

    http_status = 429
    error_type = "overloaded_error"


class UnavailableError(PagewireError):
    """No worker can serve this now (none registered, or those that were have died)."""

    http_status = 503
    error_type = "service_unavailable_error"


class WorkerFailedError(UnavailableError):
    """The worker serving this request died or reported a failure that another worker might not have."""


class DeadlineExceededError(PagewireError):
    """The request's deadline passed while waiting for a peer."""

    http_status = 504
    error_type = "timeout_error"


class ConfigurationError(PagewireError):
    """A setting, a model or this machine does not allow the service to start. Shown as one line, exit code 2."""

    exit_code = 2


class ModelLoadError(ConfigurationError):
    """The model cannot be found, read or fitted in memory."""


class ProtocolError(PagewireError):
    """A peer sent a message or frame that breaks KVX/1 or the router protocol. Counted, never fatal to the receiver."""


class TransferError(PagewireError):
    """A KV transfer failed and will not be completed."""

    http_status = 502
