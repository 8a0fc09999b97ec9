"""Hosts on a network of their own, on this machine: each a network namespace, all on one bridge. It needs root.

What happens to a host's network happens to nobody else's. The test itself is on none of these: it reaches programs there by Unix
sockets, and what they are to reach outside by `Network.forward`.
"""

import ctypes
import itertools
import os
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "kvtest"
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


def why_not():
    """Why there can be no networks here; empty where there can."""
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} of iproute2 not installed"
    name = f"{_PREFIX}{os.getpid()}t"
    made = _ip("netns", "add", name, check=False)
    if made.returncode:
        return f"no network namespaces: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


class Network:
    """Made by `open`.

    Attributes:
        slow: Whether its links have a delay of 2 ms: where the kernel has `netem`.
    """

    HOST = "10.213.0."  # a bridge of its own: what else uses these addresses never sees it

    def __init__(self, hosts):
        self.hosts, self._name, self._forwards = hosts, f"{_PREFIX}{os.getpid()}n{next(_numbers)}", []
        self.slow = False

    @classmethod
    @contextmanager
    def open(cls, hosts):
        """So many hosts, numbered from 0; gone afterwards, with all that was changed."""
        network = cls(hosts)
        try:
            network._make()
            yield network
        finally:
            for forward in network._forwards:
                forward.close()
            for name in (network._hub, *(network.namespace(at) for at in range(hosts))):
                _ip("netns", "del", name, check=False)

    @property
    def _hub(self):
        return f"{self._name}hub"

    def namespace(self, host):
        return f"{self._name}h{host}"

    def address(self, host):
        return f"{self.HOST}{host + 10}"

    def within(self, host):
        """What a command stands behind that is to run there."""
        return ("ip", "netns", "exec", self.namespace(host))

    def _make(self):
        _sweep()
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "addr", "add", f"{self.HOST}1/24", "dev", "bridge")
        for device in ("lo", "bridge"):
            _ip("-n", self._hub, "link", "set", device, "up")
        for host in range(self.hosts):
            name = self.namespace(host)
            _ip("netns", "add", name)
            _ip("-n", self._hub, "link", "add", f"to{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._hub, "link", "set", f"to{host}", "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
        self.slow = all(self._shape(host, "netem", "delay", "2ms", check=False).returncode == 0 for host in range(self.hosts))

    def forward(self, target, *, alter=None):
        """A proxy at the address that is the answer, which all hosts reach.

        `target` is (host, port) outside, or (host's number, port). `alter` is given what comes back from there, a bytearray at a
        time, and may change it.
        """
        listener = _inside(self._hub, lambda: socket.create_server((f"{self.HOST}1", 0)))
        where, port = target
        if isinstance(where, int):
            goal = (self.address(where), port)
            forward = Forward(listener, lambda: _inside(self._hub, lambda: socket.create_connection(goal, timeout=5)), alter)
        else:
            forward = Forward(listener, lambda: socket.create_connection((where, port), timeout=5), alter)
        self._forwards.append(forward)
        return listener.getsockname()

    def cut(self, host):
        """Nothing reaches it any more, and nothing from it: it is not told."""
        _ip("-n", self._hub, "link", "set", f"to{host}", "nomaster")

    def heal(self, host):
        """As if nothing had been."""
        _ip("-n", self._hub, "link", "set", f"to{host}", "master", "bridge")

    @contextmanager
    def parted(self, host):
        self.cut(host)
        try:
            yield
        finally:
            self.heal(host)

    @contextmanager
    def slowed(self, host, rate):
        """What it sends goes so fast, such as `4mbit`."""
        self._shape(host, "tbf", "rate", rate, "burst", "16kb", "latency", "500ms")
        try:
            yield
        finally:
            _run("tc", "-n", self.namespace(host), "qdisc", "del", "dev", "eth0", "root")

    def _shape(self, host, *how, check=True):
        return _run("tc", "-n", self.namespace(host), "qdisc", "replace", "dev", "eth0", "root", *how, check=check)


class Forward:
    """A TCP proxy on threads."""

    def __init__(self, listener, connect, alter):
        self._listener, self._connect, self._alter = listener, connect, alter
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        self._listener.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near):
        with near, suppress(OSError), self._connect() as far:
            far.settimeout(None)
            there = threading.Thread(target=_pump, args=(near, far, None), daemon=True)
            there.start()
            _pump(far, near, self._alter)
            there.join()


def _pump(source, target, alter):
    """Until the source ends; then the target is told."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            data = bytearray(data)
            if alter is not None:
                alter(data)
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _inside(namespace, make):
    """What `make` returns in that namespace; a socket belongs to the one that it was made in."""
    made = []

    def run():
        handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            made.append(make())
        except OSError as error:
            made.append(error)
        finally:
            os.close(handle)

    thread = threading.Thread(target=run)  # a thread of its own: it stays there
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _sweep():
    """Take away what a run left that was killed."""
    for path in Path("/run/netns").glob(f"{_PREFIX}*"):
        pid = "".join(itertools.takewhile(str.isdigit, path.name.removeprefix(_PREFIX)))
        if not Path("/proc", pid).exists():
            _ip("netns", "del", path.name, check=False)


def _ip(*words, check=True):
    return _run("ip", *words, check=check)


def _run(*words, check=True):
    return subprocess.run(words, check=check, capture_output=True, text=True)
