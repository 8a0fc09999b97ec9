"""Object stores: the contract, its backends, and the few things built directly on it."""
