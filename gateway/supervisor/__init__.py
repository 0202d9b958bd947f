"""The control plane: one process that starts the workers, watches the servers and answers for all of them."""
