"""The laboratory of kvsketch: everything that makes and shows numbers.

    records/      what a record is, one reader, one estimator
    evaluation/   the papers' experiments on real models: `kvsketch eval`
    benchmark/    speed, beside the strongest full-cache baselines: `kvsketch bench`
    report/       records to pages, figures and one HTML page: `kvsketch report`
    commands.py   the three commands
    reference.py  docs/api.md
    sizes.py      tables of users and contexts that fit on a GPU
    columns.py    columns of a table, declared in one text
    lists.py      measurements that belong together, a few of many
    options.py    options of benchmarks and experiments, declared once

It stands on the library, and the library knows of it only the names of its commands.
"""
