"""Tools that `tool_use` gives to a model: each a class, or one's own function."""
