"""A seccomp filter for sandboxed programs: system calls that a test case never needs are refused.

They would let a program keep memory beyond its limits (memfd_create, shmget, larger buffers of sockets), look
into other processes (ptrace), or reach large parts of the kernel (bpf, io_uring, mount). Sockets are those of
AF_UNIX: a namespace hides the network, but not what AF_VSOCK reaches. A refused call fails with EPERM.
See seccomp(2) and, for the instructions, bpf(4).
"""

import platform
import struct

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {
    "x86_64": (
        *(29, 30, 31, 64, 68, 240),  # shmget shmat shmctl semget msgget mq_open
        *(101, 310, 311, 312),  # ptrace process_vm_readv process_vm_writev kcmp
        *(165, 166, 155, 161, 272, 308),  # mount umount2 pivot_root chroot unshare setns
        *(428, 429, 430, 431, 432, 433, 442),  # open_tree, mounts by descriptors
        *(248, 249, 250),  # add_key request_key keyctl
        *(298, 321, 323, 425, 426, 427),  # perf_event_open bpf userfaultfd io_uring_*
        *(319, 447),  # memfd_create memfd_secret
        *(175, 176, 313, 246, 320, 169, 172, 173),  # *_module kexec_load kexec_file_load reboot iopl ioperm
    ),
    "aarch64": (
        *(194, 196, 195, 190, 186, 180),
        *(117, 270, 271, 272),
        *(40, 39, 41, 51, 97, 268),
        *(428, 429, 430, 431, 432, 433, 442),
        *(217, 218, 219),
        *(241, 280, 282, 425, 426, 427),
        *(279, 447),
        *(105, 106, 273, 104, 294, 142),
    ),
}
"""Numbers of the refused calls by machine, in the same order."""
_SOCKETS = {"x86_64": (41, 53, 54), "aarch64": (198, 199, 208)}
"""Numbers of socket, socketpair and setsockopt by machine."""
_BUFFER_OPTIONS = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE."""
_AF_UNIX = 1
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
"""Return values: allow the call, fail with EPERM, kill the process."""
_FIRST_X32 = 0x40000000
"""Calls of the x32 ABI have these numbers on x86_64."""


def seccomp_filter() -> bytes:
    """Return the filter for this machine as a program for `bwrap --seccomp`.

    It is empty on a machine whose call numbers are not known here.
    """
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        return b""
    make, make_pair, set_option = _SOCKETS[machine]
    program: list[tuple[int, int | str, int | str, int]] = [
        (_LOAD, 0, 0, 4),  # the architecture of the call
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # its number
        (_AT_LEAST, "refuse", 0, _FIRST_X32),
        *((_EQUAL, "refuse", 0, number) for number in _REFUSED[machine]),
        (_EQUAL, 1, 0, make),
        (_EQUAL, 0, 2, make_pair),
        (_LOAD, 0, 0, 16),  # its first argument
        (_EQUAL, "allow", "refuse", _AF_UNIX),
        (_EQUAL, 0, "allow", set_option),
        (_LOAD, 0, 0, 32),  # its third argument
        *((_EQUAL, "refuse", 0, option) for option in _BUFFER_OPTIONS),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    ends = {"allow": len(program) - 2, "refuse": len(program) - 1}

    def skipped(place: int, jump: int | str) -> int:
        return jump if isinstance(jump, int) else ends[jump] - place - 1

    return b"".join(
        struct.pack("=HBBI", code, skipped(place, yes), skipped(place, no), value)
        for place, (code, yes, no, value) in enumerate(program)
    )
