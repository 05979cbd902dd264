"""The numbers of connections that frontends share."""

from __future__ import annotations

import os

from service.ipc.connection_counts import NOT_ACCEPTING, ConnectionCounts, Port


def test_every_process_sees_the_numbers_of_all_frontends() -> None:
    supervisor = ConnectionCounts.create(3)
    frontend = ConnectionCounts(os.dup(supervisor.descriptor))
    assert frontend.on_port(Port.HTTP).tolist() == frontend.on_port(Port.GRPC).tolist() == [NOT_ACCEPTING] * 3
    for place in range(3):
        frontend.on_port(Port.HTTP)[place] = place
        frontend.on_port(Port.GRPC)[place] = 10 + place
    assert supervisor.on_port(Port.HTTP).tolist() == [0, 1, 2]
    supervisor.remove(1)
    assert frontend.on_port(Port.HTTP).tolist() == [0, NOT_ACCEPTING, 2]
    assert frontend.on_port(Port.GRPC).tolist() == [10, NOT_ACCEPTING, 12]
