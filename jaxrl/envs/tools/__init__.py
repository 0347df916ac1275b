"""Tools that `tool_use` offers to a model: classes, or a user's own functions."""
