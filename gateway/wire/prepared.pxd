cimport cython

@cython.final
cdef class Statement:
    cdef object __weakref__
    cdef readonly bytes body
    cdef readonly bytes name
    cdef readonly bytes meaning
