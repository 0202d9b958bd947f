cimport cython

from gateway.wire.cycle cimport Cycle
from gateway.wire.prepared cimport Statement
from gateway.worker.sock cimport Buffer

cdef int RECORD_SIZE

cdef class Endpoint:
    cdef public int fd
    cdef public int kind
    cdef public int state
    cdef public int interest
    cdef public Py_ssize_t passing
    cdef public Buffer inbox
    cdef public Buffer out

@cython.final
cdef class Client(Endpoint):
    cdef public object pool
    cdef public Server server
    cdef public tuple shares
    cdef public object parameters
    cdef public dict statements
    cdef public Buffer unnamed
    cdef public object login
    cdef public bytes deallocation
    cdef public bytes key
    cdef public long long unnamed_serial
    cdef public long long connected_at
    cdef public long long waiting_since
    cdef public long long query_since
    cdef public long long transaction_since
    cdef public long long idle_since
    cdef public int id
    cdef public bint replication
    cdef public bint skip_to_sync
    cdef public int discarding
    cdef public int status
    cdef public int losses
    cdef public bytes doom
    cdef public bint notified
    cdef public bint stalled

@cython.final
cdef class Server(Endpoint):
    cdef object __weakref__
    cdef public object pool
    cdef public Client client
    cdef public Server below
    cdef public Cycle cycle
    cdef public object parameters
    cdef public dict statements
    cdef public list recent
    cdef public Statement latest
    cdef public long long generation
    cdef public object login
    cdef public object node
    cdef public object address
    cdef public Buffer record
    cdef public int answered
    cdef public bint is_cut
    cdef public bint told
    cdef public object adapting
    cdef public bytes refusal
    cdef public bytes last_words
    cdef public object farewell
    cdef public list foreign
    cdef public bytes key
    cdef public long long unnamed_serial
    cdef public long long connected_at
    cdef public long long state_since
    cdef public long long deadline
    cdef public int pid
    cdef public int id
    cdef public int cancels
    cdef public bint cancel_due
    cdef public bint retiring
    cdef public bint discarding
    cdef public bint broken
    cdef public bint warm
    cdef public bint reserve

    @cython.locals(size=Py_ssize_t)
    cpdef int note(self, Buffer buf, Py_ssize_t start, Py_ssize_t end) except -1
    cpdef int forget(self) except -1
