from gateway.worker.admission cimport Admission
from gateway.worker.clients cimport Clients
from gateway.worker.endpoint cimport Client, Endpoint, Server
from gateway.worker.link cimport Link
from gateway.worker.pool cimport Pool
from gateway.worker.reactor cimport Reactor
from gateway.worker.sock cimport Buffer

cdef int CANCEL
cdef int CLIENT_CONSOLE
cdef int CLIENT_LOGIN
cdef int CONTROL
cdef int LISTENER
cdef int WRITE

cdef class Front:
    cdef public Reactor reactor
    cdef public Link link
    cdef public Clients clients
    cdef public Admission admission
    cdef public object channel
    cdef public object failing
    cdef public object pools
    cdef public object servers
    cdef public object canceler
    cdef public object settings
    cdef public list listeners
    cdef public int index
    cdef public int workers
    cdef public bint draining
    cdef public bint demand_due
    cdef public long long drained_at
    cdef public long long demanded_at

    cpdef int other_ready(self, Endpoint endpoint, int events) except -1
    cpdef Py_ssize_t client_bytes(self, Client client, Buffer buf) except -1
    cpdef int client_gone(self, Client client, int code) except -1
    cpdef int client_left(self, Client client, bint at_once) except -1
    cpdef int grow(self, Pool pool) except -1
    cpdef int demand(self) except -1
    cpdef bint adapt(self, Client client, Server server) except -1
