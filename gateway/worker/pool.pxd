cimport cython

from gateway.worker.endpoint cimport Client, Server

cdef int CLIENT_WAITING
cdef int SERVER_IDLE
cdef int SERVER_ACTIVE
cdef int SERVER_LOGIN
cdef int SERVER_CANCELED
cdef int MOST_CONNECTING

@cython.final
cdef class Share:
    cdef public long limit
    cdef public long used
    cdef public object error

@cython.final
cdef class Pool:
    cdef public str database
    cdef public str user
    cdef public object settings
    cdef public object node
    cdef public object address
    cdef public object welcome
    cdef public object reported
    cdef public Share share
    cdef public Share reserve
    cdef public tuple shares
    cdef public int mode
    cdef public bint rewrites
    cdef public bint round_robin
    cdef public bint paused
    cdef public bint held
    cdef public bint removed
    cdef public long long check_delay
    cdef public list servers
    cdef public list warm
    cdef public dict standbys
    cdef public long long warm_retry_at
    cdef public Server top
    cdef public object waiting
    cdef public dict newcomers
    cdef public dict entries
    cdef public object credentials
    cdef public int connecting
    cdef public int clients
    cdef public long long retry_at
    cdef public object failure
    cdef public long long xact_count
    cdef public long long query_count
    cdef public long long received
    cdef public long long sent
    cdef public long long xact_time
    cdef public long long query_time
    cdef public long long wait_time
    cdef public long long assignments
    cdef public long long client_parses
    cdef public long long server_parses
    cdef public long long binds
    cdef public long long logins

    @cython.locals(server=Server)
    cpdef Server acquire(self, long long now)
    cpdef int move(self, Server server, int state, long long now) except -1
    cpdef int enqueue(self, Client client, long long now) except -1
    @cython.locals(client=Client)
    cpdef Client next_waiting(self, long long now)
    @cython.locals(share=Share, oldest=Client)
    cpdef bint has_room(self, long long now)
    cpdef bint wants_server(self, long long now)
