"""A port behind a firewall, without root: python examples/learn/wall.py PORT SECONDS

It listens and accepts nobody. When its queue is full, the system drops what arrives, as a firewall does: whoever
connects gets no answer, not even a refusal.
"""

import socket
import sys
import time

port, seconds = int(sys.argv[1]), float(sys.argv[2])
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", port))
server.listen(0)
queue = [socket.socket() for _ in range(4)]
for waiting in queue:
    waiting.setblocking(False)
    waiting.connect_ex(("127.0.0.1", port))
time.sleep(seconds)
