cimport cython

from gateway.wire.prepared cimport Statement
from gateway.worker.endpoint cimport Client, Server
from gateway.worker.sock cimport Buffer

cdef int CHANGE
cdef int FAKE
cdef int OWES_CLOSE
cdef int OWES_EXECUTE
cdef int OWES_PARSE
cdef int OWES_QUERY
cdef int OWES_SYNC
cdef int SKIP

@cython.final
cdef class Rewriter:
    cdef public Buffer assembly
    cdef public Py_ssize_t capacity
    cdef public object known
    cdef public long long serial
    cdef public long long generation

    @cython.locals(name_end=Py_ssize_t)
    cpdef int parse(self, Client client, Server server, Buffer buf, Py_ssize_t at, Py_ssize_t end) except -1
    cpdef int close_foreign(self, Server server) except -1
    cpdef int execute(self, Client client, Server server) except -1
    cpdef int query(self, Client client, Server server, Buffer buf, Py_ssize_t at, Py_ssize_t end) except -1
    cpdef int close(self, Client client, Server server, bytes name) except -1
    @cython.locals(held=dict)
    cpdef bint ensure(self, Server server, Statement statement) except -1
    cpdef int ensure_unnamed(self, Client client, Server server) except -1

cpdef bint may_mention(int first) noexcept
