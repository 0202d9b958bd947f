cimport cython

from gateway.wire.prepared cimport Statement

cdef int BIND_COMPLETE
cdef int CLOSE_COMPLETE
cdef int COMMAND_COMPLETE
cdef int COPY_BOTH_RESPONSE
cdef int COPY_IN_RESPONSE
cdef int COPY_OUT_RESPONSE
cdef int EMPTY_QUERY_RESPONSE
cdef int ERROR_RESPONSE
cdef int NO_DATA
cdef int NOTIFICATION_RESPONSE
cdef int PARSE_COMPLETE
cdef int PORTAL_SUSPENDED
cdef int READY_FOR_QUERY
cdef int ROW_DESCRIPTION

cdef int OWES_SYNC
cdef int OWES_PARSE
cdef int OWES_BIND
cdef int OWES_DESCRIBE
cdef int OWES_EXECUTE
cdef int OWES_CLOSE
cdef int OWES_COPY_END
cdef int KIND
cdef int LOST_PARSE
cdef int LOST_REQUEST
cdef int MUTE
cdef int SKIP
cdef int FAKE
cdef int CHANGE
cdef int IDLE
cdef int COPY_IN
cdef int COPY_OUT
cdef int COPY_BOTH
cdef int FORWARD

@cython.final
cdef class Cycle:
    cdef public int status
    cdef public int copy
    cdef public bint ignoring
    cdef public bint group_open
    cdef public bint desynced
    cdef public bint failed
    cdef public int special
    cdef public int boundaries
    cdef public int lost
    cdef bytearray ring
    cdef Py_ssize_t head
    cdef Py_ssize_t tail
    cdef Py_ssize_t mask
    cdef public object changes

    cpdef bint is_free(self) noexcept
    cpdef Py_ssize_t owed(self) noexcept
    cpdef bint fake_is_next(self) noexcept
    cpdef bint skip_is_next(self) noexcept
    cpdef bint is_muted(self) noexcept
    @cython.locals(kind=int)
    cpdef int request(self, int entry) except -1
    @cython.locals(entry=int, at=Py_ssize_t, number=Py_ssize_t, found=bint)
    cpdef bint is_unsettled(self, bytes name, Statement statement) except -1
    cpdef int take_fake(self) except -1
    @cython.locals(entry=int, asked=int, verdict=int)
    cpdef int answer(self, int kind) except -1
    cdef int settle(self, bint is_due) except -1
    @cython.locals(entry=int)
    cdef int pop(self) except -1
    @cython.locals(entry=int, ours=bint)
    cdef int fail(self) except -1
    cdef int enter_copy_in(self) except -1
    cdef int drop_markers(self) except -1
    cdef int grow(self) except -1
