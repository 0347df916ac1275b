"""Parses config files and flags into typed, validated settings."""
