"""uvicorn's configuration, extended by the state that this gateway's protocols share."""

import uvicorn

from gateway.server.idle_connections import IdleConnections


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration, with two things that all connections of the gateway share.

    These are the table of idle connections, and the most connections that may be open at once.
    """

    idle_connections: IdleConnections
    max_connections: int
