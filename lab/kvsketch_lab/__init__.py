"""The laboratory of kvsketch: everything that makes and shows numbers.

    records/      what a record is, one reader, one estimator
    evaluation/   the papers' experiments on real models: `kvsketch eval`
    benchmark/    speed, beside the strongest full-cache baselines: `kvsketch bench`
    report/       records to pages, figures and one HTML page: `kvsketch report`

It stands on the library, and the library knows of it only the names of its commands.
"""
