cdef int BIND
cdef int CLOSE
cdef int COPY_DATA
cdef int COPY_DONE
cdef int COPY_FAIL
cdef int DESCRIBE
cdef int EXECUTE
cdef int FLUSH
cdef int FUNCTION_CALL
cdef int PARSE
cdef int QUERY
cdef int SYNC
cdef int TERMINATE

cpdef bint is_small(int kind) noexcept
cpdef bint is_known(int kind) noexcept
cpdef bint needs_no_server(int kind, Py_ssize_t size) noexcept
