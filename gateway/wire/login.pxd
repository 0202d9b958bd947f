cimport cython

from gateway.wire cimport scram
from gateway.wire.messages cimport authentication_sasl_continue, authentication_sasl_final

cdef int _START
cdef int _PASSWORD
cdef int _SASL_INITIAL
cdef int _SASL_FIRST
cdef int _SASL_FINAL
cdef int PASSWORD_MESSAGE

@cython.final
cdef class ClientLogin:
    cdef object _method
    cdef object _secret
    cdef object _user
    cdef bytes _mock_key
    cdef bytes _nonce
    cdef bytes _salt
    cdef dict _cache
    cdef dict _known
    cdef int _iterations
    cdef bytes _binding
    cdef scram.Server _exchange
    cdef int _step
    cdef public bint done
    cdef public object client_key
    cdef public object password

    cpdef bytes start(self)
    @cython.locals(step=int)
    cpdef bytes receive(self, int type_, bytes body)
    cdef scram.StoredKeys _stored_keys(self)
    cdef bytes _begin_exchange(self, bytes body)
    cdef bytes _continue_exchange(self, bytes body)
