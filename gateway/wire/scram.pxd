# No C types: compiled as it is, because every login passes through it.
