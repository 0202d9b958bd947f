class Ledger:
    pass
