cimport cython

@cython.final
cdef class Server:
    cdef object _stored
    cdef bytes _nonce
    cdef bint _plus
    cdef bytes _binding
    cdef bytes _bare
    cdef bytes _header
    cdef bytes _first
    cdef public bytes client_key

    cpdef bytes first(self, bytes message)
    cpdef bytes final(self, bytes message)
    cdef _check_binding(self, bytes flag)

cdef bytes _hmac(bytes key, bytes message)
cdef bytes _xor(bytes left, bytes right)
cdef bytes _encode(bytes data)
cdef bytes _decode(bytes data)
