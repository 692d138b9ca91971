"""The door: HTTP, WebSocket and NATS ingress; the only room that meets strangers."""
