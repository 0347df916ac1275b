"""Rows are found and read here: kinds of files, folders with splits, and data sets."""
