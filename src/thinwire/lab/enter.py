"""Starts a rank of a job: `python -I -S enter.py PARENT CORES HOST HOSTS DIRECTORY COMMAND...`

A stand-alone program that uses only the standard library. It runs after the namespaces have been entered, because entering
a user namespace changes credentials, which makes the kernel drop the parent death signal.
"""

import ctypes
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1
CLONE_NEWUTS = 0x04000000
MS_BIND = 4096
SCRATCH = b"/var/run/netns"


def name_host(libc: ctypes.CDLL, host: str, hosts: str) -> None:
    """Set the host name of the node, and an /etc/hosts with all nodes.

    Without it, every lookup of a node's address fails and torch warns about it. `ip netns exec` has created a mount namespace
    for this process; the file goes on a tmpfs over the directory of namespace names, which is not needed inside.
    """
    if libc.unshare(CLONE_NEWUTS) == 0:
        socket.sethostname(host)
    if libc.mount(b"thinwire", SCRATCH, b"tmpfs", 0, b"mode=755") == 0:
        path = SCRATCH + b"/hosts"
        with open(path, "w") as file:
            file.write(hosts)
        libc.mount(path, b"/etc/hosts", None, MS_BIND, None)


def main() -> None:
    parent, cores, host, hosts, directory, *command = sys.argv[1:]
    libc = ctypes.CDLL(None)
    # Ranks die with their parent, which may have died before this line.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(1)
    if host:
        name_host(libc, host, hosts)
    if cores != "any":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    # Python ignores these signals, and exec would pass that on.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.chdir(directory)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"thinwire lab: cannot start {command[0]!r}: {error}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
