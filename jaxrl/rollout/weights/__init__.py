"""A parameter broadcast service: versions in checked chunks, full or as differences.

`errors`, `layout` ← `delta`, `wire` ← `blobs`, `encoding`, `transport` ← `leases` ←
`publisher`, `source` ← `receiver` ← `broadcast` ← `pulls`.
"""
