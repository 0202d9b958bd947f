cimport cython

@cython.final
cdef class Hmac:
    cdef object _inner
    cdef object _outer

    cpdef bytes digest(self, bytes message)

@cython.final
cdef class StoredKeys:
    cdef public int iterations
    cdef public bytes salt
    cdef public bytes stored_key
    cdef public bytes server_key
    cdef public bytes cost
    cdef public Hmac stored_hmac
    cdef public Hmac server_hmac

@cython.final
cdef class Server:
    cdef StoredKeys _stored
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

cdef bytes _xor(bytes left, bytes right)
cdef bytes _encode(bytes data)
cdef bytes _decode(bytes data)
