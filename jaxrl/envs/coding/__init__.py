"""The code environment: programs that a model writes are judged by hidden tests."""
