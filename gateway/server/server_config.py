"""uvicorn's configuration, extended by the state that this gateway's protocols share."""

import uvicorn

from gateway.server.idle_connections import IdleConnections


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration with the idle connections, and the most connections at once."""

    idle_connections: IdleConnections
    max_connections: int
