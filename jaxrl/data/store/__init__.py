"""Experience that outlives its writer: groups in a database, each used so often."""
