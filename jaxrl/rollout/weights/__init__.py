"""Brings the learner's weights to the engines, as numbered versions.

`weight_sync` decides when engines get new weights; a `WeightStore` brings them there.
There are three stores, one for each way that learner and engines may be related:

- `weight_store.InProcessWeightStore`: both in one process. Engines get a copy.
- `verified_store.VerifiedWeightStore`: in different processes. The learner publishes
  checksummed chunks through a transport, engines load them and return a digest.
- `direct_transfer.DirectWeightStore`: GPU to GPU, by CUDA IPC or NCCL.

The published path in the order in which a version takes it: `snapshots` (devices to
host), `delta_encoding` (chunks and deltas), `manifest` (format), `transport` (where the
bytes lie), `publisher` (the learner's end), `manifest_reader` and `subscriber` (the
engine's end). `reader_registry` keeps the publisher from deleting what is being read.
"""
