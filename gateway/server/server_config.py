"""uvicorn's configuration with what the protocols of this gateway share."""

import uvicorn

from gateway.server.idle_connections import IdleConnections


class ServerConfig(uvicorn.Config):
    """uvicorn's, with what our protocols share: who waits, and how many may be connected."""

    idle_connections: IdleConnections
    max_connections: int
