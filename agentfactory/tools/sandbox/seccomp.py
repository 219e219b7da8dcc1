"""The system call filter of a sandbox, the BPF program for `bwrap --seccomp`: an allowlist; all other calls return
ENOSYS. Creating a process or socket returns EPERM, which makes the memory limit of a single process effective; the
filter for multi-process programs allows processes, and sockets of the families Unix, IPv4 and IPv6."""

import errno
import platform
import struct
from itertools import groupby

# the kernel's own tables, reduced to the needs of one Python process: files in its workspace, memory, threads, signals,
# time and pipes


def _table(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in (entry.split("=") for entry in text.split())}


SPECIAL = frozenset({"clone", "clone3", "fork", "vfork", "socket", "socketpair", "connect"})
"""Calls in the tables for which `program` has a rule; the others are allowed."""

# asm/unistd_64.h
X86_64 = _table("""
read=0 write=1 readv=19 writev=20 pread64=17 pwrite64=18 preadv=295 pwritev=296 preadv2=327 pwritev2=328 lseek=8
close=3 close_range=436 dup=32 dup2=33 dup3=292 fcntl=72 ioctl=16 open=2 openat=257 openat2=437 creat=85
access=21 faccessat=269 faccessat2=439 stat=4 fstat=5 lstat=6 newfstatat=262 statx=332 statfs=137 fstatfs=138
readlink=89 readlinkat=267 getdents=78 getdents64=217 getcwd=79 chdir=80 fchdir=81 mkdir=83 mkdirat=258 rmdir=84
unlink=87 unlinkat=263 rename=82 renameat=264 renameat2=316 link=86 linkat=265 symlink=88 symlinkat=266 chmod=90
fchmod=91 fchmodat=268 chown=92 fchown=93 lchown=94 fchownat=260 umask=95 utime=132 utimes=235 utimensat=280
futimesat=261 truncate=76 ftruncate=77 fallocate=285 fsync=74 fdatasync=75 sync_file_range=277 fadvise64=221
readahead=187 sendfile=40 copy_file_range=326 splice=275 tee=276 flock=73 mmap=9 munmap=11 mremap=25 mprotect=10
madvise=28 msync=26 mincore=27 brk=12 membarrier=324 pipe=22 pipe2=293 poll=7 ppoll=271 select=23 pselect6=270
epoll_create=213 epoll_create1=291 epoll_ctl=233 epoll_wait=232 epoll_pwait=281 epoll_pwait2=441 eventfd=284
eventfd2=290 timerfd_create=283 timerfd_settime=286 timerfd_gettime=287 signalfd=282 signalfd4=289 recvfrom=45
sendto=44 recvmsg=47 sendmsg=46 recvmmsg=299 sendmmsg=307 getsockopt=55 setsockopt=54 getsockname=51
getpeername=52 shutdown=48 futex=202 set_robust_list=273 get_robust_list=274 set_tid_address=218 rseq=334
gettid=186 tgkill=234 tkill=200 kill=62 execve=59 exit=60 exit_group=231 wait4=61 waitid=247 rt_sigaction=13
rt_sigprocmask=14 rt_sigreturn=15 rt_sigpending=127 rt_sigsuspend=130 rt_sigtimedwait=128 rt_sigqueueinfo=129
rt_tgsigqueueinfo=297 sigaltstack=131 restart_syscall=219 pause=34 alarm=37 getitimer=36 setitimer=38
timer_create=222 timer_settime=223 timer_gettime=224 timer_getoverrun=225 timer_delete=226 nanosleep=35
clock_nanosleep=230 clock_gettime=228 clock_getres=229 gettimeofday=96 time=201 times=100 getpid=39 getppid=110
getuid=102 geteuid=107 getgid=104 getegid=108 getresuid=118 getresgid=120 getgroups=115 getpgid=121 getpgrp=111
getsid=124 setsid=112 setpgid=109 getrlimit=97 setrlimit=160 prlimit64=302 getrusage=98 getpriority=140
sched_yield=24 sched_getaffinity=204 sched_setaffinity=203 sched_getparam=143 sched_getscheduler=145
sched_get_priority_max=146 sched_get_priority_min=147 getcpu=309 prctl=157 arch_prctl=158 uname=63 sysinfo=99
getrandom=318 capget=125 clone=56 socketpair=53 socket=41 fork=57 vfork=58 clone3=435 connect=42
""")

# asm-generic/unistd.h
AARCH64 = _table("""
read=63 write=64 readv=65 writev=66 pread64=67 pwrite64=68 preadv=69 pwritev=70 preadv2=286 pwritev2=287
lseek=62 close=57 close_range=436 dup=23 dup3=24 fcntl=25 ioctl=29 openat=56 openat2=437 faccessat=48
faccessat2=439 fstat=80 newfstatat=79 statx=291 statfs=43 fstatfs=44 readlinkat=78 getdents64=61 getcwd=17
chdir=49 fchdir=50 mkdirat=34 unlinkat=35 renameat=38 renameat2=276 linkat=37 symlinkat=36 fchmod=52 fchmodat=53
fchown=55 fchownat=54 umask=166 utimensat=88 truncate=45 ftruncate=46 fallocate=47 fsync=82 fdatasync=83
sync_file_range=84 fadvise64=223 readahead=213 sendfile=71 copy_file_range=285 splice=76 tee=77 flock=32
mmap=222 munmap=215 mremap=216 mprotect=226 madvise=233 msync=227 mincore=232 brk=214 membarrier=283 pipe2=59
ppoll=73 pselect6=72 epoll_create1=20 epoll_ctl=21 epoll_pwait=22 epoll_pwait2=441 eventfd2=19 timerfd_create=85
timerfd_settime=86 timerfd_gettime=87 signalfd4=74 recvfrom=207 sendto=206 recvmsg=212 sendmsg=211 recvmmsg=243
sendmmsg=269 getsockopt=209 setsockopt=208 getsockname=204 getpeername=205 shutdown=210 futex=98
set_robust_list=99 get_robust_list=100 set_tid_address=96 rseq=293 gettid=178 tgkill=131 tkill=130 kill=129
execve=221 exit=93 exit_group=94 wait4=260 waitid=95 rt_sigaction=134 rt_sigprocmask=135 rt_sigreturn=139
rt_sigpending=136 rt_sigsuspend=133 rt_sigtimedwait=137 rt_sigqueueinfo=138 rt_tgsigqueueinfo=240
sigaltstack=132 restart_syscall=128 getitimer=102 setitimer=103 timer_create=107 timer_settime=110
timer_gettime=108 timer_getoverrun=109 timer_delete=111 nanosleep=101 clock_nanosleep=115 clock_gettime=113
clock_getres=114 gettimeofday=169 times=153 getpid=172 getppid=173 getuid=174 geteuid=175 getgid=176 getegid=177
getresuid=148 getresgid=150 getgroups=158 getpgid=155 getsid=156 setsid=157 setpgid=154 getrlimit=163
setrlimit=164 prlimit64=261 getrusage=165 getpriority=141 sched_yield=124 sched_getaffinity=123
sched_setaffinity=122 sched_getparam=121 sched_getscheduler=120 sched_get_priority_max=125
sched_get_priority_min=126 getcpu=168 prctl=167 uname=160 sysinfo=179 getrandom=278 capget=90 clone=220
socketpair=199 socket=198 clone3=435 connect=203
""")

# further calls for programs that start processes: a server and a client on loopback, file changes that package managers
# and editors watch or label, named pipes, priorities
PROCESSES_X86_64 = _table("""
bind=49 listen=50 accept=43 accept4=288 inotify_init=253 inotify_init1=294 inotify_add_watch=254 inotify_rm_watch=255
setxattr=188 lsetxattr=189 fsetxattr=190 getxattr=191 lgetxattr=192 fgetxattr=193 listxattr=194 llistxattr=195
flistxattr=196 removexattr=197 lremovexattr=198 fremovexattr=199 mknod=133 mknodat=259 pidfd_open=434
pidfd_send_signal=424 setpriority=141 ioprio_set=251 ioprio_get=252 setuid=105 setgid=106 setreuid=113 setregid=114
setresuid=117 setresgid=119 setgroups=116 setfsuid=122 setfsgid=123 sync=162 syncfs=306 vmsplice=278
get_mempolicy=239 sched_setscheduler=144 sched_setattr=314 sched_getattr=315 mlock=149 munlock=150 mlock2=325
execveat=322 fchmodat2=452 futex_waitv=449 capset=126
""")
PROCESSES_AARCH64 = _table("""
bind=200 listen=201 accept=202 accept4=242 inotify_init1=26 inotify_add_watch=27 inotify_rm_watch=28
setxattr=5 lsetxattr=6 fsetxattr=7 getxattr=8 lgetxattr=9 fgetxattr=10 listxattr=11 llistxattr=12
flistxattr=13 removexattr=14 lremovexattr=15 fremovexattr=16 mknodat=33 pidfd_open=434
pidfd_send_signal=424 setpriority=140 ioprio_set=30 ioprio_get=31 setuid=146 setgid=144 setreuid=145 setregid=143
setresuid=147 setresgid=149 setgroups=159 setfsuid=151 setfsgid=152 sync=81 syncfs=267 vmsplice=75
get_mempolicy=236 sched_setscheduler=119 sched_setattr=274 sched_getattr=275 mlock=228 munlock=229 mlock2=284
execveat=281 fchmodat2=452 futex_waitv=449 capset=91
""")

MACHINES = {"x86_64": (0xC000003E, X86_64, PROCESSES_X86_64), "aarch64": (0xC00000B7, AARCH64, PROCESSES_AARCH64)}
"""`platform.machine()` -> the kernel's AUDIT_ARCH, the system calls, and further ones for multi-process programs."""

_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
# linux/bpf_common.h: load a word at an absolute offset, jumps by comparison with a constant, return a constant
_LOAD, _EQUAL, _GREATER_EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
# struct seccomp_data; the lower half of the first argument, since both machines are little-endian
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16
_CLONE_THREAD, _CLONE_NAMESPACES = 0x00010000, 0x7E020080
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10


def program(machine: str = platform.machine(), processes: bool = False) -> bytes:
    """Return the filter, of struct sock_filter; `processes` allows new ones and sockets. Raises KeyError."""
    arch, numbers, further = MACHINES[machine]
    allowed = {name: number for name, number in numbers.items() if name not in SPECIAL}
    if processes:
        free = ("fork", "vfork", "connect")
        allowed |= further | {name: numbers[name] for name in free if name in numbers}
    code = [_step(_LOAD, _MACHINE), _step(_EQUAL, arch, then=1), _step(_RETURN, _KILL_PROCESS), _step(_LOAD, _NUMBER)]
    # consecutive numbers differ from their places by the same
    for _, pairs in groupby(enumerate(sorted(allowed.values())), lambda pair: pair[1] - pair[0]):
        consecutive = [number for _, number in pairs]
        first, last = consecutive[0], consecutive[-1]
        code += [_step(_GREATER_EQUAL, first, otherwise=2), _step(_GREATER, last, then=1), _step(_RETURN, _ALLOW)]
    for name in ("fork", "vfork", "connect"):
        if name in numbers and not processes:
            code += [_step(_EQUAL, numbers[name], otherwise=1), _refuse(errno.EPERM)]
    # threads share the process's memory, and so its RLIMIT_AS; a process in new namespaces would be root in them
    code += [
        _step(_EQUAL, numbers["clone"], otherwise=5),
        _step(_LOAD, _ARGUMENT),
        _step(_ANY_BIT, _CLONE_NAMESPACES, then=2),
        _step(_ANY_BIT, 0xFFFFFFFF if processes else _CLONE_THREAD, otherwise=1),
        _step(_RETURN, _ALLOW),
        _refuse(errno.EPERM),
    ]
    # asyncio wakes its loop through a socket pair
    families = (_AF_UNIX, _AF_INET, _AF_INET6) if processes else ()
    code += _of_families(numbers["socket"], families) + _of_families(numbers["socketpair"], families or (_AF_UNIX,))
    # also clone3: its flags are in memory that a filter cannot read, and libraries fall back to clone
    code.append(_refuse(errno.ENOSYS))
    return b"".join(code)


def _of_families(number: int, families: tuple[int, ...]) -> list[bytes]:
    """Return instructions that let the call `number` create sockets of these families only."""
    tests = [_step(_EQUAL, family, then=len(families) - place) for place, family in enumerate(families)]
    allow = [_step(_RETURN, _ALLOW)] if families else []
    # the tests jump over the refusal
    body = [_step(_LOAD, _ARGUMENT), *tests, _refuse(errno.EPERM), *allow]
    return [_step(_EQUAL, number, otherwise=len(body)), *body]


def _step(operation: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Return one instruction; `then` and `otherwise` are the numbers of instructions that a comparison skips."""
    return struct.pack("=HBBI", operation, then, otherwise, value)


def _refuse(number: int) -> bytes:
    return _step(_RETURN, _ERRNO | number)
