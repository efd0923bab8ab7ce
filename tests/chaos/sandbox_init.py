"""First process of a sandbox: loopback up, private /dev/shm and temporary folder, then waits for its input to end.

    unshare --mount --net --pid --fork --kill-child --mount-proc python sandbox_init.py FOLDER

It reaps orphans, as every first process of a process namespace must. Its end is the end of everything in the sandbox.
"""

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import sys

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _mount_tmpfs(path: str) -> None:
    if ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", path.encode(), b"tmpfs", 0, None) != 0:
        sys.exit(f"cannot mount on {path}: {os.strerror(ctypes.get_errno())}")


def _reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    _loopback_up()
    for place in ("/dev/shm", sys.argv[1]):
        _mount_tmpfs(place)
    signal.signal(signal.SIGCHLD, _reap)
    print("ready", flush=True)
    while select.select([0], [], [])[0] and os.read(0, 100):
        pass
