"""Describes in words what NATS refuses, a connection or a subject, and what to do about it."""

import re
import socket
import ssl

import nats.errors

from streams.broker.authentication import Identity, UnusableFile
from streams.connection_files import ConnectionFiles
from streams.errors import NotPermitted
from streams.server_urls import redact

_START = "start the server, or name another with --nats"
_NO_TLS_FIRST = (
    "the server does not begin with TLS: set `handshake_first: true` in its `tls` block, or leave "
    "out the TLS settings here"
)
_CLIENT_CERTIFICATE = "give the certificate that the server wants, with --nats-cert and --nats-key"
# What OpenSSL calls it -> what to do
_TLS_REMEDIES = {
    "CERTIFICATE_VERIFY_FAILED": "name the CA that signed the server's certificate with --nats-ca, "
    "and the server as its certificate does with --nats",
    "WRONG_VERSION_NUMBER": _NO_TLS_FIRST,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": _CLIENT_CERTIFICATE,
    "TLSV1_ALERT_UNKNOWN_CA": _CLIENT_CERTIFICATE,
    "SSLV3_ALERT_BAD_CERTIFICATE": _CLIENT_CERTIFICATE,
}
_PUBLISH_VIOLATION = re.compile(r'permissions violation for publish to "(.*)"', re.IGNORECASE)
_IDENTITY_REFUSALS = ("authorization violation", "authentication expired", "authentication revoked")


def describe(error: BaseException) -> str:
    """Say in a few words why there is no connection, or why a server closed it."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError | nats.errors.TimeoutError):
        return "no answer"
    if isinstance(error, socket.gaierror):
        return "the host name cannot be resolved"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"TLS failed: {error.reason.lower().replace('_', ' ')}"
    return redact(str(error) or type(error).__name__).removeprefix("nats: ").strip("'")


def remedy(error: BaseException, files: ConnectionFiles) -> str:
    """Say what an operator is to do about a connection that fails with `error`."""
    reason = describe(error).lower()
    if isinstance(error, UnusableFile):
        return "it is read again at each try"
    if isinstance(error, ssl.SSLError):
        return _TLS_REMEDIES.get(error.reason or "", f"{_NO_TLS_FIRST}, or check the certificates")
    if any(refusal in reason for refusal in _IDENTITY_REFUSALS):
        return _replace_identity(files)
    if "maximum account active connections" in reason:
        return "the account was disabled, or has as many connections as it may: enable it again"
    if isinstance(error, OSError | nats.errors.Error) and not files.encrypts:
        return f"{_START}; one that wants TLS also needs its CA, with --nats-ca"
    return _START


def forbidden_subject(error: BaseException) -> str | None:
    """Return the subject, in lower case, to which a server does not let this user publish.

    None if the error is another one.
    """
    found = _PUBLISH_VIOLATION.search(str(error))
    return found[1].lower() if found else None


def not_permitted(subject: str, identity: Identity | None) -> NotPermitted:
    """Return the error for a user that may not publish to a subject."""
    if identity is None or identity.user_class is None:
        user = f"the user {identity.name!r}" if identity and identity.name else "this user"
    else:
        user = f"the user {identity.name!r} of the class {identity.user_class}"
    return NotPermitted(
        subject,
        user,
        "use the credentials of a class that may (docs/accounts.md), and of this process: its --id "
        "and its models, with --nats-creds; after an update, restart the servers with the "
        "configurations that `millstream broker init` makes",
    )


def _replace_identity(files: ConnectionFiles) -> str:
    if files.identity is None:
        return "give the credentials that the server wants, with --nats-creds"
    return (
        f"the server does not know the user of {files.identity}, or no longer: have new "
        "credentials written (`millstream broker user`), and check that they are for this server "
        "and, if they expire, that this machine's clock is right"
    )
