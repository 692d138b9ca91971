"""uvicorn's configuration, extended by the state that this gateway's protocols share."""

import uvicorn

from gateway.server.idle_connections import IdleConnections

TCP_TIMEOUT_SECONDS = 20  # for so long the client's machine may leave bytes unacknowledged


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration with what all connections share, and the most of them at once.

    `paused_clients` are those of HTTP that do not read at the moment.
    """

    idle_connections: IdleConnections
    paused_clients: IdleConnections
    max_connections: int
