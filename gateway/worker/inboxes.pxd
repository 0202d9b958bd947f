cimport cython

from gateway.worker.endpoint cimport Client, Endpoint
from gateway.worker.sock cimport Buffer

cdef int SPARE_SIZE
cdef int SPARES

@cython.final
cdef class Inboxes:
    cdef public list spares

    @cython.locals(inbox=Buffer)
    cpdef int keep(self, Endpoint endpoint, Buffer buf, Py_ssize_t pos) except -1
    @cython.locals(rest=Buffer)
    cpdef int put_back(self, Client client, Buffer sent) except -1
