"""Bytes of a TCP connection come in, ASGI calls go out; responses go back the same way.

This is the only folder that touches the insides of uvicorn and of websockets.

uvicorn_server      the listening socket and uvicorn's configuration
http_protocol       HTTP/1.1, with heads bounded in bytes and time
response_framing    a request and its response, for clients of HTTP/1.0 and those that await 100
websocket_protocol  WebSockets, with messages bounded in bytes, frames and time
idle_connections    closes the longest idle connection when there are too many
write_timeout       aborts clients that do not read; `stall_timer` measures it
write_coalescer     joins a WebSocket's writes of one turn of the event loop
connection_limits   connections and frames a second of each tenant and key, by `api.rate_limiter`
transfer_slots      files that are being sent and read, of each tenant
tls_listener        accepts connections with TLS: handshakes bounded in number and time, and counted
tls_certificate     the certificate for new connections, loaded anew when its files change
tls_transport       ends connections with TLS as those without; on `transport_wrapper`, as is
                    write_coalescer
client_certificates the names of a client's certificate, on their way to authentication
refusal_log         tells of refused credentials in the log
key_use_counts      how often each managed key was used
"""
