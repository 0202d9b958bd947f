cpdef bytes message(int type_, bytes body)
cpdef bytes authentication_sasl_continue(bytes data)
cpdef bytes authentication_sasl_final(bytes data)
