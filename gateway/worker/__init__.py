"""The data plane: one process per core, clients to servers; compiled where a message passes."""
