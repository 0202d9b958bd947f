cimport cython


@cython.final
cdef class Buffer:
    cdef unsigned char* data
    cdef public Py_ssize_t start
    cdef public Py_ssize_t end
    cdef readonly Py_ssize_t size
    cpdef int reserve(self, Py_ssize_t room) except -1
    cpdef int append(self, Buffer source, Py_ssize_t start, Py_ssize_t end) except -1
    cpdef int extend(self, bytes source) except -1
    cpdef int put_int32(self, Py_ssize_t value) except -1
    cpdef int put_byte(self, int value) except -1
    cpdef int compact(self) except -1
    cpdef bytes slice(self, Py_ssize_t start, Py_ssize_t end)
    cpdef int byte(self, Py_ssize_t at) noexcept
    cpdef Py_ssize_t int32(self, Py_ssize_t at) noexcept
    cpdef Py_ssize_t find_zero(self, Py_ssize_t start, Py_ssize_t end) noexcept
    cpdef bint equals(self, Py_ssize_t start, Py_ssize_t end, bytes other) noexcept
    cpdef Py_ssize_t recv(self, int fd, Py_ssize_t room) except? -1000
    cpdef Py_ssize_t send(self, int fd, Py_ssize_t start, Py_ssize_t end) noexcept

@cython.final
cdef class Poller:
    cdef int fd
    cdef void* events
    cdef int* ready_fds
    cdef int* ready_events
    cdef readonly long long now
    cdef int control(self, int operation, int fd, int interest, bint once) except -1
    cpdef int watch(self, int fd, int interest, bint once=*) except -1
    cpdef int change(self, int fd, int interest, bint once=*) except -1
    cpdef int forget(self, int fd) except -1
    cpdef int wait(self, int timeout_ms) except -1

cpdef int accept(int fd) noexcept
cpdef Py_ssize_t send_bytes(int fd, bytes data) noexcept
cpdef int finish(int fd) noexcept
cpdef int end(int fd) noexcept
cpdef long long clock() noexcept
