"""The built-in example and its comparison. `train` is the script that the demo records: read it first."""
