"""Network namespaces, virtual cables, a switch and traffic shaping, by the commands `ip` and `tc`.

    node 0 ── eth0 ═══ p0 ┐
    node 1 ── eth0 ═══ p1 ┼ br0      every box a network namespace: `<id>-n0`, `<id>-n1`, ..., `<id>-sw`
    node 2 ── eth0 ═══ p2 ┘

Both ends of a cable are shaped by token buckets: eth0 limits what a node sends, p0 what it receives.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
from dataclasses import dataclass

from ..errors import ThinwireError

FRAME = 1514  # bytes of a full Ethernet frame as the qdisc counts it: 1500 + 14 of header
PAYLOAD = 1448  # TCP payload of a full frame
LATE = 15e-6  # typical delay of a timer in seconds
HEADERS = 330  # room that Linux leaves for headers in an aggregated packet, with some margin


class LabError(ThinwireError):
    """The emulated cluster cannot do what was requested; the message says what would work."""


def parse_rate(text: str | None) -> int | None:
    """Bits per second of `"100mbit"`, `"2.5gbit"`, `"500kbit"`; None, an unshaped link, for `"none"` or None."""
    if text is None or text.strip().lower() == "none":
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg])bit\s*", text, re.IGNORECASE)
    if not match:
        raise LabError(
            f"rate {text!r} is not understood: write a number and kbit, mbit or gbit, "
            f"like '100mbit', '2.5gbit' or '500kbit', or 'none' for a link that is not shaped"
        )
    bits = float(match[1]) * {"k": 10**3, "m": 10**6, "g": 10**9}[match[2].lower()]
    if not 64_000 <= bits <= 100_000_000_000:
        raise LabError(f"rate {text!r} cannot be emulated: choose one from '64kbit' to '100gbit', or 'none'")
    return round(bits)


def format_rate(bits: float | None) -> str:
    """The inverse of `parse_rate`: `"2.5gbit"`."""
    if bits is None:
        return "none"
    for unit, size in (("gbit", 1e9), ("mbit", 1e6)):
        if bits >= size:
            return f"{bits / size:.4g}{unit}"
    return f"{bits / 1e3:.4g}kbit"


SETTINGS = {
    "ipv6/conf/default/disable_ipv6": 1,
    "bridge/bridge-nf-call-iptables": 0,
    "ipv4/tcp_congestion_control": "reno",
}
"""Settings of all namespaces, independent of the host: no IPv6 traffic except on loopback; no firewall in the switch; a
congestion control that every kernel has and every namespace may use. With bbr, a training core also serves a timer for
every packet or two: 5 ms for 0.7 MB at 100 Mbit/s."""


@dataclass(frozen=True)
class Shape:
    """Parameters of `tc tbf` for one end of a cable; sizes in bytes.

    The large bucket (`burst`, 2 ms at the rate) compensates for late timers: 20 MB pass at 0.96 of 1 Gbit/s with it, at
    0.90 with 32 KB. Alone it would pass 256 KB at six times the rate, so on the sending side of a node a second, small
    bucket (`bucket`, 0.18 ms at the rate) spreads bursts. It fills at `peak`, which exceeds the rate by the losses of late
    timers. With a smaller bucket, timers are too frequent for a busy CPU: with 0.12 ms, 1 Gbit/s both ways at once reached
    0.66 to 0.85 of the rate instead of 0.96. It holds at least six frames, plus a margin for the kernel's rounding: with two,
    100 Mbit/s both ways reached 0.86 to 0.90 instead of 0.95, and packets cost CPU time of training; with eight, 64 KB pass
    at 1.14 of the rate, because the first packet does not wait. It never holds more than `burst`, which is at least two
    frames: one that the kernel needs to send at all, another to refill meanwhile. So bursts exceed 2 ms only below 12 Mbit/s.

    The qdisc would split packets larger than the small bucket: `gso` limits the packets that the sender builds to its size.

    The port of the switch has only the large bucket: traffic of one node arrives spread out already, and simultaneous traffic
    of several nodes to one is limited to the rate.
    """

    rate: int
    burst: int
    peak: int | None
    bucket: int
    limit: int
    gso: int

    @classmethod
    def of(cls, rate: int, port: bool) -> Shape:
        """The shape of a port of the switch, or of a node."""
        per_second = rate / 8
        burst = max(int(per_second * 0.002), 2 * FRAME)
        bucket = burst if port else min(max(int(per_second * 0.00018), int(6.2 * FRAME)), burst)
        frames = int(0.98 * bucket / FRAME)
        return cls(
            rate=rate,
            burst=burst,
            # The kernel requires a peak above the rate, in whole bytes.
            peak=None if port else int(rate * (1 + max(LATE * per_second / bucket, 0.01))),
            bucket=bucket,
            # The queue of a switch port: 50 ms, but at least a few slow-start windows.
            limit=max(int(per_second * 0.05), 64 * FRAME),
            gso=min(max(min(frames * PAYLOAD + HEADERS, bucket), 2 * FRAME), 65536),
        )

    def tbf(self) -> str:
        peak = f" peakrate {self.peak}bit mtu {self.bucket}" if self.peak else ""
        return f"tbf rate {self.rate}bit burst {self.burst}{peak} limit {self.limit}"


@dataclass(frozen=True)
class Counters:
    """Interface counters of a node. An aggregated segment (GSO) counts as one packet."""

    bytes_sent: int = 0
    packets_sent: int = 0
    bytes_received: int = 0
    packets_received: int = 0

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.bytes_sent - earlier.bytes_sent,
            self.packets_sent - earlier.packets_sent,
            self.bytes_received - earlier.bytes_received,
            self.packets_received - earlier.packets_received,
        )


def command(arguments: list[str], batch: str | None = None) -> str:
    """Run a system command and return its output; `batch` is its standard input."""
    try:
        # A new session: Ctrl-C in the terminal must not interrupt a batch half-way.
        done = subprocess.run(
            arguments, input=batch or "", capture_output=True, text=True, timeout=60, start_new_session=True
        )
    except FileNotFoundError:
        raise LabError(
            f"the command {arguments[0]!r} is missing: install iproute2 (ip, tc) and util-linux (unshare, nsenter)"
        ) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise LabError(f"`{' '.join(arguments)}` failed: {said}")
    return done.stdout


class Owner:
    """A process that holds a user, a network and a mount namespace, in which an ordinary user may create a network.

    It reads from a pipe held by this process: when this process ends, in whatever way, the owner ends too, and the kernel
    removes its namespaces. `prefix` makes a command run inside.
    """

    # `ip netns` keeps its names in /run/netns, which an ordinary user cannot write, so a tmpfs is mounted over it. If the
    # directory does not exist, it is mounted over all of /run.
    _SCRIPT = (
        "run=$(readlink -f /var/run); over=$run; [ -d $run/netns ] && over=$run/netns; "
        "mount -t tmpfs -o mode=755 thinwire $over && mkdir -p $run/netns && echo ready && exec cat"
    )

    def __init__(self, environment: dict[str, str]) -> None:
        arguments = ["unshare", "--user", "--net", "--mount", "--map-root-user", "sh", "-c", self._SCRIPT]
        try:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except FileNotFoundError:
            raise LabError("the command 'unshare' is missing: install util-linux") from None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        try:
            answered, _, _ = select.select([self.process.stdout], [], [], 20)
            line = self.process.stdout.readline() if answered else ""
            if line.strip() != "ready":
                if not answered:
                    self.process.kill()
                said = " ".join(self.process.stderr.read().split()) if answered else "no answer in 20 s"
                raise LabError(f"`unshare --user --net --mount` failed: {said}")
        except BaseException:
            self.close()
            raise
        pid = str(self.process.pid)
        self.prefix = ["nsenter", "--target", pid, "--user", "--mount", "--net", "--preserve-credentials", "--"]

    def close(self) -> None:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait()


class Network:
    """The namespaces of a cluster. Their names start with its id, by which leftovers are found."""

    def __init__(self, identity: str, nodes: int, prefix: list[str]) -> None:
        self.nodes = [f"{identity}-n{node}" for node in range(nodes)]
        self.switch = f"{identity}-sw"
        self.prefix = prefix
        self._rates: dict[int, int | None] = {}

    @staticmethod
    def address(node: int) -> str:
        return f"10.87.{node // 250}.{node % 250 + 1}"

    def hosts(self) -> str:
        """The content of /etc/hosts on every node."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for node in range(len(self.nodes)):
            # torch looks up its peers by IPv4-mapped IPv6 addresses.
            lines += [f"{self.address(node)} node{node}", f"::ffff:{self.address(node)} node{node}-mapped"]
        return "\n".join(lines) + "\n"

    def inside(self, node: int) -> list[str]:
        """The prefix that makes a command run on a node."""
        return [*self.prefix, "ip", "netns", "exec", self.nodes[node]]

    def create(self) -> None:
        self._ip("\n".join(f"netns add {name}" for name in (*self.nodes, self.switch)))
        # Settings that the kernel lacks or forbids are skipped.
        settings = "; ".join(f"{{ echo {value} > /proc/sys/net/{name}; }} 2>&-" for name, value in SETTINGS.items())
        for name in (*self.nodes, self.switch):
            command([*self.prefix, "ip", "netns", "exec", name, "sh", "-c", f"{settings}; true"])
        # No snooping either: counters should see only the job's packets.
        lines = ["link add br0 type bridge mcast_snooping 0", "link set br0 up"]
        for node, name in enumerate(self.nodes):
            lines += [
                f"link add p{node} type veth peer name eth0 netns {name}",
                f"link set p{node} master br0 up",
            ]
        self._ip("\n".join(lines), self.switch)
        for node, name in enumerate(self.nodes):
            self._ip(f"link set lo up\nlink set eth0 up\naddr add {self.address(node)}/16 dev eth0", name)

    def remove(self) -> None:
        """Delete all namespaces that exist; the kernel removes the cables with them."""
        remove_namespaces([*self.nodes, self.switch], self.prefix)

    def shape(self, rates: dict[int, int | None]) -> None:
        """Set the rate of some nodes' cables, both directions.

        Lowering a rate drops queued packets, which TCP retransmits; a packet larger than the new bucket would otherwise
        block the queue forever.
        """
        ports = []
        for node, rate in rates.items():
            ports += self._bucket(f"p{node}", rate, self.switch, self._rates.get(node))
            self._tc(self._bucket("eth0", rate, self.nodes[node], self._rates.get(node)), self.nodes[node])
        self._tc(ports, self.switch)
        self._rates |= rates

    def _bucket(self, device: str, rate: int | None, namespace: str, before: int | None) -> list[str]:
        """Limit the packet size of a device to its bucket; returns the lines for tc."""
        shape = Shape.of(rate, port=namespace == self.switch) if rate else None
        size = shape.gso if shape else 65536
        # iproute2 before 5.19 has no gro_max_size; the bucket then splits large packets itself.
        with contextlib.suppress(LabError):
            self._ip(f"link set {device} gso_max_size {size} gro_max_size {size}", namespace)
        lines = []
        if before and not (rate and rate >= before):
            lines.append(f"qdisc del dev {device} root")
        if shape:
            lines.append(f"qdisc replace dev {device} root {shape.tbf()}")
        return lines

    def cable(self, node: int, plugged: bool) -> None:
        self._ip(f"link set p{node} {'up' if plugged else 'down'}", self.switch)

    def counters(self) -> list[Counters]:
        """Read at the switch with one command: what a port received, its node has sent, and vice versa."""
        text = command([*self.prefix, "ip", "-n", self.switch, "-s", "-j", "link", "show"])
        ports = {link["ifname"]: link["stats64"] for link in json.loads(text)}
        found = []
        for node in range(len(self.nodes)):
            stats = ports[f"p{node}"]
            sent, received = stats["rx"], stats["tx"]
            found.append(Counters(sent["bytes"], sent["packets"], received["bytes"], received["packets"]))
        return found

    def _ip(self, lines: str, namespace: str | None = None) -> None:
        where = ["-n", namespace] if namespace else []
        command([*self.prefix, "ip", *where, "-batch", "-"], lines + "\n")

    def _tc(self, lines: list[str], namespace: str) -> None:
        if lines:
            command([*self.prefix, "tc", "-n", namespace, "-batch", "-"], "\n".join(lines) + "\n")


def list_namespaces(prefix: list[str] | None = None) -> list[str]:
    """The names of all network namespaces."""
    text = command([*(prefix or []), "ip", "netns", "list"])
    return [line.split()[0] for line in text.splitlines() if line.strip()]


def remove_namespaces(names: list[str], prefix: list[str] | None = None) -> None:
    there = set(list_namespaces(prefix)).intersection(names)
    if there:
        command([*(prefix or []), "ip", "-batch", "-"], "".join(f"netns del {name}\n" for name in sorted(there)))
