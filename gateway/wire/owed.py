"""The kinds of request that a server owes an answer to, and what may be special about one.

One entry of a cycle is a kind with flags, in one byte. Plain numbers, because the relay handles one a message.
Used by cycle, and by all that put requests into it.
"""

OWES_QUERY = 1
OWES_FUNCTION_CALL = 2
OWES_SYNC = 3
OWES_PARSE = 4
OWES_BIND = 5
OWES_DESCRIBE = 6
OWES_EXECUTE = 7
OWES_CLOSE = 8
OWES_COPY_END = 9  # CopyDone or CopyFail: nothing answers it, it marks which Syncs the COPY swallowed
KIND = 0x0F
SKIP = 0x10
FAKE = 0x20
CHANGE = 0x40
MUTE = 0x80  # a request of ours that it stands on has failed, and told so: its own error is for nobody

FORWARD = 0  # the other verdict is SKIP

IDLE = 0x49  # the transaction status of ReadyForQuery: I, T or E
COPY_IN = 1
COPY_OUT = 2
COPY_BOTH = 3

LOST_REQUEST = 1  # skipped behind an error: what the unnamed statement of the server is now is not known
LOST_PARSE = 2  # among them a Parse without a name: the client has no unnamed statement
