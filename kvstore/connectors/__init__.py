"""Where engines meet kvtier. Each module lives inside its engine's environment and sees only the client and the values."""
