"""Buffers and system calls, compiled: the only module with pointers in it.

1. The twin of sock.py: same names, same meaning; that file says what each of them does.
2. An error of a system call is a negative errno in the return value, never an exception: EAGAIN is not news.
3. errno is read at once after the call; no Python code runs in between.

Called by the reactor, the link and the front; see epoll(7), recv(2), send(2), accept4(2).
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memmove
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec


cdef extern from "sys/socket.h" nogil:
    int SOCK_NONBLOCK
    int SOCK_CLOEXEC
    int MSG_NOSIGNAL
    ssize_t c_recv "recv"(int fd, void* data, size_t size, int flags)
    ssize_t c_send "send"(int fd, const void* data, size_t size, int flags)
    int SHUT_WR
    int shutdown(int fd, int how)
    int accept4(int fd, void* address, void* length, int flags)

cdef extern from "sys/epoll.h" nogil:
    int EPOLL_CTL_ADD
    int EPOLL_CTL_DEL
    int EPOLL_CTL_MOD
    int EPOLL_CLOEXEC
    uint32_t EPOLLRDHUP
    uint32_t EPOLLET
    ctypedef union epoll_data_t:
        int fd
    struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int flags)
    int epoll_ctl(int epfd, int op, int fd, epoll_event* event)
    int epoll_wait(int epfd, epoll_event* events, int size, int timeout)

cdef extern from "unistd.h" nogil:
    int close(int fd)

cdef extern from "arpa/inet.h" nogil:
    uint32_t ntohl(uint32_t value)
    uint32_t htonl(uint32_t value)

AGAIN = -EAGAIN
READ = 0x001  # EPOLLIN
WRITE = 0x004  # EPOLLOUT
ENDED = 0x2018  # EPOLLERR, EPOLLHUP, EPOLLRDHUP
DEAD = 0x018  # EPOLLERR, EPOLLHUP

cdef enum:
    EVENTS = 512  # answers of one epoll_wait


cdef class Buffer:
    def __cinit__(self, Py_ssize_t size=4096):
        self.data = <unsigned char*> malloc(size)
        if self.data is NULL:
            raise MemoryError
        self.size = size

    def __dealloc__(self):
        free(self.data)

    def __len__(self):
        return self.end - self.start

    cpdef int reserve(self, Py_ssize_t room) except -1:
        if self.size - self.end >= room:
            return 0
        if self.start > 0:
            self.compact()
            if self.size - self.end >= room:
                return 0
        cdef Py_ssize_t size = self.end + room
        if size < 2 * self.size:
            size = 2 * self.size
        cdef unsigned char* data = <unsigned char*> realloc(self.data, size)
        if data is NULL:
            raise MemoryError
        self.data = data
        self.size = size
        return 0

    cpdef int append(self, Buffer source, Py_ssize_t start, Py_ssize_t end) except -1:
        self.reserve(end - start)
        memcpy(self.data + self.end, source.data + start, end - start)
        self.end += end - start
        return 0

    cpdef int extend(self, bytes source) except -1:
        cdef Py_ssize_t size = PyBytes_GET_SIZE(source)
        self.reserve(size)
        memcpy(self.data + self.end, PyBytes_AS_STRING(source), size)
        self.end += size
        return 0

    cpdef int put_int32(self, Py_ssize_t value) except -1:
        cdef uint32_t big = htonl(<uint32_t> value)
        self.reserve(4)
        memcpy(self.data + self.end, &big, 4)
        self.end += 4
        return 0

    cpdef int put_byte(self, int value) except -1:
        self.reserve(1)
        self.data[self.end] = <unsigned char> value
        self.end += 1
        return 0

    cpdef int compact(self) except -1:
        memmove(self.data, self.data + self.start, self.end - self.start)
        self.end -= self.start
        self.start = 0
        return 0

    cpdef bytes slice(self, Py_ssize_t start, Py_ssize_t end):
        return PyBytes_FromStringAndSize(<char*> self.data + start, end - start)

    cpdef int byte(self, Py_ssize_t at) noexcept:
        return self.data[at]

    cpdef Py_ssize_t int32(self, Py_ssize_t at) noexcept:
        cdef uint32_t big
        memcpy(&big, self.data + at, 4)
        return <int> ntohl(big)

    cpdef Py_ssize_t find_zero(self, Py_ssize_t start, Py_ssize_t end) noexcept:
        if start >= end:
            return -1
        cdef void* found = memchr(self.data + start, 0, end - start)
        return -1 if found is NULL else <unsigned char*> found - self.data

    cpdef bint equals(self, Py_ssize_t start, Py_ssize_t end, bytes other) noexcept:
        return (end - start == PyBytes_GET_SIZE(other)
                and memcmp(self.data + start, PyBytes_AS_STRING(other), end - start) == 0)

    cpdef Py_ssize_t recv(self, int fd, Py_ssize_t room) except? -1000:
        cdef Py_ssize_t count
        self.reserve(room)
        while True:
            count = c_recv(fd, self.data + self.end, room, 0)
            if count >= 0:
                self.end += count
                return count
            if errno != EINTR:
                return -errno

    cpdef Py_ssize_t send(self, int fd, Py_ssize_t start, Py_ssize_t end) noexcept:
        cdef Py_ssize_t count
        while True:
            count = c_send(fd, self.data + start, end - start, MSG_NOSIGNAL)
            if count >= 0:
                return count
            if errno != EINTR:
                return -errno


cdef class Poller:
    def __cinit__(self):
        self.fd = epoll_create1(EPOLL_CLOEXEC)
        if self.fd < 0:
            raise OSError(errno, "epoll_create1")
        self.events = malloc(EVENTS * sizeof(epoll_event))
        self.ready_fds = <int*> malloc(EVENTS * sizeof(int))
        self.ready_events = <int*> malloc(EVENTS * sizeof(int))
        if self.events is NULL or self.ready_fds is NULL or self.ready_events is NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)
        free(self.events)
        free(self.ready_fds)
        free(self.ready_events)

    cdef int control(self, int operation, int fd, int interest, bint once) except -1:
        cdef epoll_event event
        # Edge-triggered: an event is a change, so that the kernel does not look at each socket twice.
        event.events = interest | EPOLLRDHUP | (EPOLLET if once else 0)
        event.data.fd = fd
        if epoll_ctl(self.fd, operation, fd, &event) < 0:
            raise OSError(errno, "epoll_ctl")
        return 0

    cpdef int watch(self, int fd, int interest, bint once=True) except -1:
        return self.control(EPOLL_CTL_ADD, fd, interest, once)

    cpdef int change(self, int fd, int interest, bint once=True) except -1:
        return self.control(EPOLL_CTL_MOD, fd, interest, once)

    cpdef int forget(self, int fd) except -1:
        return self.control(EPOLL_CTL_DEL, fd, 0, True)

    cpdef int wait(self, int timeout_ms) except -1:
        cdef int count, at
        # A worker has one thread: there is nobody to leave the interpreter to, and asking costs 100 ns.
        count = epoll_wait(self.fd, <epoll_event*> self.events, EVENTS, timeout_ms)
        if count < 0:
            if errno != EINTR:
                raise OSError(errno, "epoll_wait")
            count = 0
        for at in range(count):
            self.ready_fds[at] = (<epoll_event*> self.events)[at].data.fd
            self.ready_events[at] = (<epoll_event*> self.events)[at].events
        self.now = clock()
        return count


cpdef int accept(int fd) noexcept:
    cdef int client
    while True:
        client = accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)
        if client >= 0:
            return client
        if errno != EINTR:
            return -errno


cpdef Py_ssize_t send_bytes(int fd, bytes data) noexcept:
    cdef Py_ssize_t count
    while True:
        count = c_send(fd, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), MSG_NOSIGNAL)
        if count >= 0:
            return count
        if errno != EINTR:
            return -errno


cpdef int finish(int fd) noexcept:
    return -errno if shutdown(fd, SHUT_WR) < 0 else 0


cpdef int end(int fd) noexcept:
    return -errno if close(fd) < 0 else 0


cpdef long long clock() noexcept:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <long long> now.tv_sec * 1000000 + now.tv_nsec // 1000
