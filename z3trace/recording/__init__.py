"""Recording: run a training script, profile some of its steps on every rank, write a run directory.

`launch` starts the ranks, `worker` is what each of them runs, `program` runs the user's script as `__main__`.
The `adapters` hear of trainings and of what looks like their steps, `steps` decides what is one and tells the
`recorder`, which has a `session` profile and time them and keeps, in the `rundir`, what comes of it.
Nothing here imports torch before a step is to be profiled, and no library that the script does not import.
"""
