"""HTTP/1.1 and WebSockets: what is subclassed of uvicorn and websockets."""
