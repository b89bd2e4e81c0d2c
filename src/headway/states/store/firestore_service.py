"""Connect to the Firestore API and translate its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from headway.errors import HeadwayError, MissingExtra, StorageError, Unavailable
from headway.telemetry import redact

if TYPE_CHECKING:
    from google.cloud.firestore_v1.services.firestore import FirestoreClient

#: Timeout of one call, in seconds.
CALL_SECONDS = 8.0
# gRPC's reconnect backoff must stay shorter than ours.
_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 4_000),  # time limit of one connection attempt
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]


def connect(emulator: str | None) -> tuple[FirestoreClient, Any]:
    """Return an API client and its channel. The caller closes the channel."""
    try:
        import grpc  # type: ignore[import-untyped]  # grpc ships no type information
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.firestore_v1.services.firestore import FirestoreClient
        from google.cloud.firestore_v1.services.firestore.transports import FirestoreGrpcTransport
    except ImportError as error:
        raise MissingExtra("firestore", "A firestore:// store") from error
    if emulator:
        channel = grpc.insecure_channel(emulator, options=_CHANNEL)
    else:
        try:
            channel = FirestoreGrpcTransport.create_channel(options=_CHANNEL)
        except GoogleAuthError as error:
            raise Unavailable(
                f"No credentials for Firestore were found: {redact(str(error))}",
                hint="Set GOOGLE_APPLICATION_CREDENTIALS to the file of the service account, or run: gcloud auth login",
            ) from error
    return FirestoreClient(transport=FirestoreGrpcTransport(channel=channel)), channel


def metadata(database: str) -> tuple[tuple[str, str]]:
    """Return the request header that selects the database."""
    return (("google-cloud-resource-prefix", database),)


@contextmanager
def translating() -> Iterator[None]:
    """Translate gRPC and Google API errors into Headway errors."""
    import grpc
    from google.api_core import exceptions

    try:
        try:
            yield
        except grpc.RpcError as error:  # raised by the Listen stream, which is read without the client
            known: Exception = exceptions.from_grpc_error(error)  # type: ignore[no-untyped-call]  # untyped
            raise known from error
    except HeadwayError:
        raise
    except (exceptions.PermissionDenied, exceptions.Unauthenticated) as error:
        raise Unavailable(
            f"Firestore denied access: {redact(error.message)}",
            hint="The service account needs roles/datastore.user in that project.",
        ) from error
    except (
        exceptions.ServerError, exceptions.RetryError, exceptions.TooManyRequests,
        exceptions.Cancelled,  # by the service: the call may have been executed, as with a lost reply
    ) as error:  # fmt: skip
        _away(error)
    except exceptions.GoogleAPICallError as error:
        raise StorageError(f"Firestore rejected the request: {redact(str(error))}") from error


def _away(error: Exception) -> NoReturn:
    raise Unavailable(
        f"Firestore cannot be reached: {redact(str(error))}", hint="Check the network and the name of the project."
    ) from error
