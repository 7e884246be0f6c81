"""Sweeps: a grid of deployments x loads x strategies over the GPUs and hosts of a dask cluster.

`kinds.measure` adds each measured step to a record file as it comes, `kinds.simulate` each summary
of served traffic, and `kinds.predict` writes a map of any size in Parquet parts. All three take up
where the file or folder ends, and keep what failed, with its reason, in a file beside it. Who wins
at each load of a map, and how many loads each strategy wins:

    best = kinds.winners("map")  # one row per deployment and load
    best.strategy.value_counts()
    best.pivot_table("tokens_per_s", "context", "concurrency")

And of a record file:

    frame(read("record.jsonl")).sort_values("step_ms").groupby(["concurrency", "context"]).first()
"""
