"""A cable that loses and delays packets.

Linux can do both with `tc qdisc ... netem`, but not every kernel has netem. This cable is a thread that copies Ethernet
frames between two TAP interfaces, which most kernels have.
"""

import contextlib
import fcntl
import os
import random
import secrets
import selectors
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_MAX_FRAME_BYTES = 65536


@dataclass(frozen=True)
class Cable:
    """Connects the interfaces `eth0` of two network namespaces.

    Attributes:
        lost: Share of the packets that are lost, in each direction.
        delay_s: Time that each packet takes, in each direction.
    """

    lost: float = 0.0
    delay_s: float = 0.0

    @contextlib.contextmanager
    def between(self, *namespaces: str) -> Iterator[None]:
        """Creates the interfaces and copies packets; skips the test on a machine without TAP interfaces."""
        with contextlib.ExitStack() as stack:
            ends = []
            for namespace in namespaces:
                try:
                    end = _new_interface(namespace)
                except (OSError, subprocess.CalledProcessError):
                    pytest.skip("needs TAP interfaces, /dev/net/tun, for a cable that loses or delays packets")
                stack.callback(os.close, end)
                ends.append(end)
            stop_read, stop_write = os.pipe()
            stack.callback(os.close, stop_read)
            copying = threading.Thread(target=self._copy, args=(ends, stop_read), daemon=True)
            copying.start()
            stack.callback(copying.join)
            stack.callback(os.close, stop_write)  # ends the thread
            yield

    def _copy(self, ends: list[int], stop: int) -> None:
        draw = random.Random(0)
        under_way: deque[tuple[float, int, bytes]] = deque()
        with selectors.DefaultSelector() as selector:
            for number, end in enumerate(ends):
                selector.register(end, selectors.EVENT_READ, ends[1 - number])
            selector.register(stop, selectors.EVENT_READ)
            while True:
                wait_s = max(under_way[0][0] - time.monotonic(), 0) if under_way else None
                for key, _ in selector.select(wait_s):
                    if key.fd == stop:
                        return
                    with contextlib.suppress(OSError):  # the interface is down
                        frame = os.read(key.fd, _MAX_FRAME_BYTES)
                        if draw.random() >= self.lost:
                            under_way.append((time.monotonic() + self.delay_s, key.data, frame))
                while under_way and under_way[0][0] <= time.monotonic():
                    _, to, frame = under_way.popleft()
                    with contextlib.suppress(OSError):
                        os.write(to, frame)


def _new_interface(namespace: str) -> int:
    """Creates a TAP interface, moves it to a namespace, and returns the file of its other side."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        name = f"nest-{secrets.token_hex(4)}"
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
        move = ["ip", "link", "set", name, "netns", namespace, "name", "eth0"]
        subprocess.run(move, check=True, capture_output=True)
    except BaseException:
        os.close(end)
        raise
    return end
