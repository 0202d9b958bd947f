cimport cython

from gateway.worker.endpoint cimport Client, Endpoint, Server
from gateway.worker.front cimport Front
from gateway.worker.link cimport Link
from gateway.worker.sock cimport Poller, end

cdef int CLIENT
cdef int LISTENER
cdef int SERVER
cdef int ENDED
cdef int DEAD
cdef int READ
cdef int WRITE

@cython.final
cdef class Reactor:
    cdef public long long now
    cdef public bint running
    cdef public long long turns
    cdef public list endpoints
    cdef public Link link
    cdef public Front front
    cdef Poller poller
    cdef list closed
    cdef public list soon
    cdef public list again
    cdef long long sweep_at

    @cython.locals(poller=Poller, clients=bint, others=bint, count=int, at=int, endpoint=Endpoint, events=int, wait=int)
    cpdef int turn(self, int longest) except -1
    cdef int serve(self, Endpoint endpoint, int events) except -1
    cpdef int add(self, Endpoint endpoint, int interest) except -1
    cpdef int want(self, Endpoint endpoint, int interest) except -1
    cpdef int remove(self, Endpoint endpoint) except -1
