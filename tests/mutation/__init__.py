"""Plants one-line faults in a copy of the library, to check that tests notice."""
