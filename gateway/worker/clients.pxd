cimport cython

from gateway.worker.admission cimport Login, Route
from gateway.worker.endpoint cimport Client, Endpoint, Server
from gateway.worker.front cimport Front
from gateway.worker.pool cimport Pool, Share
from gateway.worker.reactor cimport Reactor
from gateway.worker.sock cimport accept, send_bytes

cdef int CLIENT_CONSOLE
cdef int CLIENT_GONE
cdef int CLIENT_LEAVING
cdef int CLIENT_WAITING
cdef int AGAIN
cdef int READ
cdef int WRITE
cdef int _ACCEPTS
cdef int _STORM
cdef int _SPARE_LOGINS
cdef long _NUMBERS

cdef class Clients:
    cdef public Front front
    cdef public Reactor reactor
    cdef public object settings
    cdef public dict by_id
    cdef public dict logins
    cdef public dict parked
    cdef public long base
    cdef public long last_number
    cdef public long hard_limit
    cdef public long long accepted_in
    cdef public int storm
    cdef public list deaf
    cdef public bint log_connections
    cdef public bint log_disconnections

    @cython.locals(client=Client, fd=int, reactor=Reactor)
    cpdef int accept(self, Endpoint listener) except -1
    cpdef long number(self) except -1
    @cython.locals(share=Share, pool=Pool)
    cpdef bint count_in(self, Client client, Route route) except -1
    @cython.locals(sent=Py_ssize_t)
    cpdef int reply(self, Client client, bytes data) except -1
    cpdef int dismiss(self, Client client, object last) except -1
    cpdef int gone(self, Client client, int code) except -1
    cpdef int left(self, Client client, bint patient) except -1
    cpdef int forget(self, Client client) except -1
    @cython.locals(state=int, server=Server, pool=Pool, share=Share)
    cpdef int leave(self, Client client, bint patient) except -1
