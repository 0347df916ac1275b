"""Records a run: metrics, console output, trajectories and its working directory."""
