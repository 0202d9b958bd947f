cimport cython

from gateway.wire.cycle cimport Cycle
from gateway.wire.kinds cimport is_known, is_small, needs_no_server
from gateway.wire.prepared cimport Statement
from gateway.worker.endpoint cimport Client, Endpoint, Server
from gateway.worker.front cimport Front
from gateway.worker.inboxes cimport Inboxes
from gateway.worker.pool cimport Pool
from gateway.worker.reactor cimport Reactor
from gateway.worker.rewrite cimport Rewriter
from gateway.worker.sock cimport Buffer

cdef int AGAIN
cdef int READ
cdef int WRITE
cdef int STREAM
cdef int SMALL
cdef int LONGEST_ANSWER
cdef int LONGEST_ERROR
cdef int BIND
cdef int CLOSE
cdef int COPY_DATA
cdef int COPY_DONE
cdef int COPY_FAIL
cdef int COMMAND_COMPLETE
cdef int DATA_ROW
cdef int DESCRIBE
cdef int ERROR_RESPONSE
cdef int EXECUTE
cdef int FLUSH
cdef int FUNCTION_CALL
cdef int IDLE
cdef int NOTICE_RESPONSE
cdef int PARAMETER_STATUS
cdef int PARSE
cdef int QUERY
cdef int READY_FOR_QUERY
cdef int SYNC
cdef int TERMINATE
cdef int OWES_COPY_END
cdef int OWES_DESCRIBE
cdef int OWES_EXECUTE
cdef int OWES_FUNCTION_CALL
cdef int OWES_PARSE
cdef int OWES_QUERY
cdef int OWES_SYNC
cdef int SKIP
cdef int LOST_PARSE
cdef int CLIENT_ACTIVE
cdef int CLIENT_GONE
cdef int CLIENT_IDLE
cdef int CLIENT_WAITING
cdef int SERVER_ACTIVE
cdef int SERVER_IDLE
cdef int POOL_SESSION
cdef int POOL_STATEMENT
cdef int PASS_ON
cdef int PUT_OUT
cdef int STALL

@cython.final
cdef class Link:
    cdef public Reactor reactor
    cdef public Front front
    cdef public Buffer scratch
    cdef public Buffer assembly
    cdef public Rewriter rewriter
    cdef public Inboxes inboxes
    cdef public Py_ssize_t high_water
    cdef public Py_ssize_t max_packet
    cdef public Py_ssize_t chunk

    @cython.locals(buf=Buffer, count=Py_ssize_t, pool=Pool)
    cpdef int client_readable(self, Client client) except -1
    @cython.locals(buf=Buffer, count=Py_ssize_t)
    cpdef int server_readable(self, Server server) except -1
    cpdef int resume(self, Client client) except -1
    @cython.locals(data="unsigned char*", pos=Py_ssize_t, end=Py_ssize_t, run=Py_ssize_t, size=Py_ssize_t,
                   length=Py_ssize_t, first=Py_ssize_t, status=int,
                   kind=int, whole=bint, server=Server, cycle=Cycle, pool=Pool, verdict=int, faulty=bint, at_once=bint)
    cpdef int from_client(self, Client client, Buffer buf) except -1
    @cython.locals(pool=Pool, server=Server)
    cpdef Server acquire(self, Client client)
    @cython.locals(pool=Pool)
    cpdef bint join(self, Client client, Server server) except -1
    @cython.locals(data="unsigned char*", pos=Py_ssize_t, end=Py_ssize_t, run=Py_ssize_t, size=Py_ssize_t,
                   kind=int, whole=bint, is_needed=bint, client=Client, cycle=Cycle, verdict=int, pool=Pool)
    cpdef int from_server(self, Server server, Buffer buf) except -1
    @cython.locals(pool=Pool, now="long long")
    cdef int ready(self, Client client, Cycle cycle) except -1
    @cython.locals(pool=Pool, waiting=Client)
    cpdef int part(self, Client client, Server server) except -1
    @cython.locals(waiting=Client)
    cpdef int hand_on(self, Server server, Pool pool) except -1
    cpdef int put_fakes(self, Cycle cycle) except -1
    @cython.locals(count=Py_ssize_t)
    cpdef int to_server(self, Server server, Buffer buf, Py_ssize_t start, Py_ssize_t end) except -1
    @cython.locals(count=Py_ssize_t, pool=Pool)
    cpdef int to_client(self, Client client, Buffer buf, Py_ssize_t start, Py_ssize_t end) except -1
    @cython.locals(out=Buffer, count=Py_ssize_t)
    cpdef int writable(self, Endpoint endpoint) except -1
    cdef int spill(self, Buffer buf, Py_ssize_t start, Py_ssize_t end) except -1
