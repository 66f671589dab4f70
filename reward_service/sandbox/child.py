"""The inside of the sandbox: a script that programs.py runs and never imports.

It needs Linux and only the standard library. It reads a JSON job from stdin, creates new namespaces
and a root file system, and runs one program as an unprivileged process. Every step is required: if
one fails, the program is not run, and {"refused": reason} is written to the status descriptor.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
NOBODY = 65534
ROOT = "/proc"  # where the new root is mounted: exists everywhere, hidden in this namespace only
LIBC = ctypes.CDLL(None, use_errno=True)
# architecture -> (audit number, number of pivot_root, forbidden system calls).
# Forbidden are sockets, tracing, mounts, namespaces, kernel keys, bpf, io_uring, perf, userfaultfd.
ARCHITECTURES = {
    "x86_64": (
        0xC000003E,
        155,
        (
            41,
            53,
            101,
            165,
            166,
            272,
            308,
            248,
            249,
            250,
            321,
            425,
            426,
            427,
            298,
            323,
            310,
            311,
            428,
            429,
            430,
            442,
            161,
            155,
        ),
    ),
    "aarch64": (
        0xC00000B7,
        41,
        (
            198,
            199,
            117,
            40,
            39,
            97,
            268,
            217,
            218,
            219,
            280,
            425,
            426,
            427,
            241,
            282,
            270,
            271,
            428,
            429,
            430,
            442,
            51,
            41,
        ),
    ),
}


def check(result, what):
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source, target, kind, flags, data=None):
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    check(LIBC.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def enter_namespaces():
    """Enters new mount, process, network, IPC and host-name namespaces.

    Without root privileges this also needs a new user namespace.
    """
    spaces = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
    if os.geteuid() == 0:
        check(LIBC.unshare(spaces), "unshare")
    else:
        uid, gid = os.geteuid(), os.getegid()
        check(LIBC.unshare(NEWUSER | spaces), "unshare (user namespace)")
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {uid} 1"),
            ("gid_map", f"{NOBODY} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    mount(None, "/", None, REC | PRIVATE)


def build_root(job):
    """Builds the new root: system libraries and Python (read-only) and a small writable /box.

    Nothing else of the host is visible in it.
    """
    limit, visible = (
        job["limits"],
        [p for p in ("/usr", "/lib", "/lib64", "/bin", job["prefix"]) if os.path.exists(p)],
    )
    mount("tmpfs", ROOT, "tmpfs", NOSUID | NODEV, "size=4m,mode=755")
    for path in visible:
        if os.path.islink(path):
            os.symlink(os.readlink(path), ROOT + path)
            continue
        os.makedirs(ROOT + path, 0o755, exist_ok=True)
        mount(path, ROOT + path, None, BIND)
        mount(
            None, ROOT + path, None, BIND | REMOUNT | RDONLY | NOSUID | NODEV | locked_flags(path)
        )
    os.mkdir(ROOT + "/dev", 0o755)
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        open(ROOT + device, "w").close()
        mount(device, ROOT + device, None, BIND)
    box = ROOT + "/box"
    os.mkdir(box, 0o777)
    size = limit["disk_mib"]
    mount("tmpfs", box, "tmpfs", NOSUID | NODEV, f"size={size}m,nr_inodes=4096,mode=777")
    os.symlink("/box", ROOT + "/tmp")
    for name, text in (("main.py", job["program"]), (".stdin", job["stdin"])):
        with open(f"{box}/{name}", "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    mount(None, ROOT, None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)
    os.chdir(ROOT)
    check(LIBC.syscall(ARCHITECTURES[platform.machine()][1], b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", 2), "umount of the old root")
    os.chdir("/box")


def locked_flags(path):
    """The mount flags of `path` that a user namespace may not remove when it mounts again."""
    noexec, noatime, nodiratime = 8, 1024, 2048  # the same numbers in statvfs and mount
    return os.statvfs(path).f_flag & (noexec | noatime | nodiratime)


def give_up_privileges():
    """As root: becomes the user nobody. Then forbids every later gain of privileges."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    check(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")


def set_limits(limit):
    mib = 2**20
    for name, value in (
        ("AS", limit["memory_mib"] * mib),
        ("FSIZE", limit["disk_mib"] * mib),
        ("CORE", 0),
        ("NPROC", limit["processes"]),
        ("NOFILE", 64),
        ("CPU", max(1, int(limit["cpu_s"] + 0.999))),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def forbid_calls():
    """Installs a seccomp filter.

    The forbidden calls, calls of other ABIs and new namespaces fail with EPERM. clone3 fails with
    ENOSYS, so that libc falls back to clone, whose flags the filter can check.
    """
    audit, _, calls = ARCHITECTURES[platform.machine()]
    step, clone = (
        (lambda code, jt, jf, k: struct.pack("HBBI", code, jt, jf, k)),
        56 if audit == 0xC000003E else 220,
    )
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    deny, allow, missing = 0x50000 | 1, 0x7FFF0000, 0x50000 | 38
    tests = [
        step(load, 0, 0, 4),
        step(equal, 1, 0, audit),
        step(answer, 0, 0, deny),
        step(load, 0, 0, 0),
        step(at_least, 0, 1, 0x40000000),
        step(answer, 0, 0, deny),
        step(equal, 0, 1, 435),
        step(answer, 0, 0, missing),
    ]
    for call in sorted(set(calls)):
        tests += [step(equal, 0, 1, call), step(answer, 0, 0, deny)]
    spaces = NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | 0x2000000
    tests += [
        step(equal, 0, 3, clone),
        step(load, 0, 0, 16),
        step(any_bit, 0, 1, spaces),
        step(answer, 0, 0, deny),
        step(answer, 0, 0, allow),
    ]
    buffer = ctypes.create_string_buffer(b"".join(tests))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(tests), ctypes.addressof(buffer))
    )
    check(LIBC.prctl(22, 2, program, 0, 0), "seccomp")


def supervise(job, status):
    """Runs as process 1 of the namespace: starts the program and reports how it ended.

    When this process ends, the kernel kills every other process of the namespace.
    """
    give_up_privileges()
    if job["root"]:
        # No user ids are mapped, so the program stays nobody. The new user namespace makes the
        # process limit count the processes of this program alone.
        check(LIBC.unshare(NEWUSER), "unshare (user namespace)")
    # The program must not be able to trace or read this process.
    check(LIBC.prctl(4, 0, 0, 0, 0), "not dumpable")
    check(LIBC.prctl(1, signal.SIGKILL, 0, 0, 0), "parent-death signal")
    error_read, error_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open("/box/.stdin", os.O_RDONLY), 0)
            os.unlink("/box/.stdin")
            set_limits(job["limits"])
            forbid_calls()
            os.close(status)
            os.set_inheritable(error_write, False)
            environment = {
                "PATH": "/usr/bin:/bin",
                "HOME": "/box",
                "TMPDIR": "/box",
                "LANG": "C.UTF-8",
                "PYTHONIOENCODING": "utf-8:replace",
                "OMP_NUM_THREADS": "1",
            }
            os.execve(job["python"], ["python", "-B", "-s", "-P", "/box/main.py"], environment)
        except BaseException as error:
            os.write(error_write, f"{type(error).__name__}: {error}".encode()[:500])
            os._exit(99)
    os.close(error_write)
    refused = os.read(error_read, 1000)
    if refused:
        raise OSError(refused.decode(errors="replace"))
    while True:
        pid, code, usage = os.wait4(-1, 0)
        if pid == child:
            break
    report = {"exit": os.waitstatus_to_exitcode(code), "cpu_s": usage.ru_utime + usage.ru_stime}
    os.write(status, json.dumps(report).encode())


def main():
    """Runs the job of stdin; argv[1] is the status descriptor. Exits with 0 if it was run."""
    status = int(sys.argv[1])
    try:
        check(LIBC.prctl(1, signal.SIGKILL, 0, 0, 0), "parent-death signal")
        job = json.loads(sys.stdin.buffer.read().decode("utf-8", "surrogatepass"))
        job["root"] = os.geteuid() == 0
        if platform.machine() not in ARCHITECTURES:
            raise OSError(f"no system-call filter for {platform.machine()}")
        enter_namespaces()
        child = os.fork()
        if child:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
        build_root(job)
        supervise(job, status)
        os._exit(0)
    except BaseException as error:
        os.write(status, json.dumps({"refused": f"{type(error).__name__}: {error}"[:500]}).encode())
        os._exit(1)


if __name__ == "__main__":
    main()
