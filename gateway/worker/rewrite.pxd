cimport cython

from gateway.wire.prepared cimport Statement
from gateway.worker.endpoint cimport Client, Server
from gateway.worker.pool cimport Pool
from gateway.worker.sock cimport Buffer

cdef int CHANGE
cdef int FAKE
cdef int BIND
cdef int CLOSE
cdef int DESCRIBE
cdef int FAILED_TRANSACTION
cdef int STATEMENT
cdef int OWES_BIND
cdef int OWES_CLOSE
cdef int OWES_DESCRIBE
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
    @cython.locals(portal_end=Py_ssize_t, name_end=Py_ssize_t, statement=Statement, limit=Py_ssize_t, pool=Pool,
                   rewrites=bint)
    cpdef Py_ssize_t bind(self, Client client, Server server, Buffer buf, Py_ssize_t run, Py_ssize_t pos,
                         Py_ssize_t size, bint whole) except -2
    @cython.locals(statement=Statement, name_end=Py_ssize_t, pool=Pool, owed=int, rewrites=bint)
    cpdef Py_ssize_t describe_or_close(self, Client client, Server server, Buffer buf, Py_ssize_t run, Py_ssize_t pos,
                                      Py_ssize_t size, int kind) except -2
    cdef Statement _current(self, Client client, Server server, bytes name)
    cdef Statement _named(self, Client client, Server server, bytes name)
    cdef int _spill(self, Buffer buf, Py_ssize_t start, Py_ssize_t end) except -1
    cpdef int execute(self, Client client, Server server) except -1
    cpdef int query(self, Client client, Server server, Buffer buf, Py_ssize_t at, Py_ssize_t end) except -1
    cpdef int close(self, Client client, Server server, bytes name) except -1
    @cython.locals(held=dict)
    cpdef bint ensure(self, Server server, Statement statement) except -1
    cpdef int ensure_unnamed(self, Client client, Server server) except -1

cpdef bint may_mention(int first) noexcept
