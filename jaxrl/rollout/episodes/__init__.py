"""Episodes are recorded token by token and turned into training rows."""
