cimport cython

from gateway.wire.login cimport ClientLogin
from gateway.worker.clients cimport Clients
from gateway.worker.endpoint cimport Client
from gateway.worker.front cimport Front
from gateway.worker.pool cimport Pool
from gateway.worker.sock cimport Buffer

cdef int CLIENT_CONSOLE
cdef int CLIENT_IDLE
cdef int CLIENT_LOGIN
cdef int BACKEND_KEY_DATA
cdef int HEADER_SIZE
cdef int TLS_HANDSHAKE
cdef int _LONGEST_ANSWER
cdef int _LONGEST_ROUTE

@cython.final
cdef class Route:
    cdef public object startup
    cdef public Pool pool
    cdef public tuple shares
    cdef public object reported
    cdef public object parameters
    cdef public bytes welcome
    cdef public str user
    cdef public bytes negotiation
    cdef public bint has_long_keys
    cdef public bint replication
    cdef public bint is_learnt

@cython.final
cdef class Login:
    cdef public Route route
    cdef public ClientLogin exchange
    cdef public bytes proof
    cdef public bint ssl_asked
    cdef public bint gss_asked

@cython.final
cdef class Admission:
    cdef public Front front
    cdef public dict cache
    cdef public dict known
    cdef public object settings
    cdef public object console
    cdef public object method
    cdef public bint is_trust
    cdef public bytes secret
    cdef public Buffer fresh
    cdef public Buffer told
    cdef public dict users
    cdef public object ignored
    cdef public dict routes

    @cython.locals(login=Login, start=Py_ssize_t)
    cpdef Py_ssize_t receive(self, Client client, Buffer buf) except -1
    @cython.locals(route=Route, available=Py_ssize_t, length=Py_ssize_t)
    cpdef int packet(self, Client client, Login login, Buffer buf) except -1
    cdef int _refuse_encryption(self, Client client, Login login, Buffer buf, bint asked_ssl) except -1
    @cython.locals(route=Route)
    cdef int _begin(self, Client client, Login login) except -1
    @cython.locals(length=Py_ssize_t, kind=int, reply=bytes)
    cdef int _answer(self, Client client, Login login, ClientLogin exchange, Buffer buf) except -1
    cpdef bytes random(self, Py_ssize_t size)
    @cython.locals(route=Route)
    cpdef int proven(self, Client client, Login login) except -1
    @cython.locals(login=Login, route=Route, pool=Pool)
    cpdef int enter(self, Client client) except -1
    @cython.locals(login=Login, route=Route, pool=Pool, clients=Clients, told=Buffer, key=bytes)
    cpdef int admit(self, Client client, object parameters, bytes welcome) except -1
